"""What only a GPU shows: large shapes, memory past 2^31 elements, graphs, bfloat16."""

from __future__ import annotations

import pytest
import torch
from gdn_cases import QWEN3_NEXT, assert_alike, copy_of, make_case, run, widened

from atom_core.plugin.ops import load_function

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def relative_error(found, expected):
    keep = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    return ((found[keep].float() - expected[keep]).norm() / expected[keep].norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("op", "lengths", "slots_per_row"),
    [
        ("causal_conv", [300, 0, 1, 64], 1),
        ("chunk_delta_rule", [300, 0, 1, 64, 2], 1),
        ("chunk_delta_rule", [64, 200, 128, 30, 70], 1),
        ("decode", [1] * 20 + [0] * 4, 1),
        ("decode", [4, 1, 3, 0, 4], 4),
        ("decode", [9, 12], 12),
    ],
)
def test_the_shape_of_qwen3_next(op, lengths, slots_per_row, dtype):
    case = make_case(
        op, lengths, QWEN3_NEXT, dtype=dtype, device="cuda", before=7, after=5, slots_per_row=slots_per_row
    )
    expected = widened(case)
    load_function(f"atom_gdn.kernels.reference:{op}")(**expected)
    found = run(op, case)
    assert_alike(op, found, expected, TOLERANCE[dtype], TOLERANCE[dtype])
    for name in ("out", "recurrent_state") if op != "causal_conv" else ("out", "conv_state"):
        assert relative_error(found[name], expected[name]) < TOLERANCE[dtype] / 3
    again = run(op, case)
    for name in set(found) & {"out", "recurrent_state", "conv_state"}:
        torch.testing.assert_close(found[name], again[name], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("parts", [(1,), (1, 1), (1, 3, 4)], ids=str)
@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "triton"])
@pytest.mark.parametrize("rows", [64, 128])
def test_a_long_row(parts, hopper, rows):
    """In parts, systems are solved on a second stream while the states pass over the part before."""
    from atom_gdn.kernels.triton_chunk_scan import ScanTiles
    from atom_gdn.kernels.triton_chunks import ChunkTiles, chunk_delta_rule

    scan = ScanTiles(rows=rows, num_warps=rows // 16, hopper=hopper)

    case = make_case("chunk_delta_rule", [2500], QWEN3_NEXT, dtype=torch.bfloat16, device="cuda", after=5)
    expected = widened(case)
    load_function("atom_gdn.kernels.reference:chunk_delta_rule")(**expected)
    for _ in range(5):
        found = copy_of(case)
        chunk_delta_rule(**found, tiles=ChunkTiles(parts=parts, scan=scan))
        assert_alike("chunk_delta_rule", found, expected, 2e-2, 2e-2)


@pytest.mark.parametrize(("op", "lengths"), [("decode", [1, 1]), ("decode", [3, 3]), ("chunk_delta_rule", [100, 65])])
def test_slots_past_2_to_the_31_elements(op, lengths):
    """The last slots of a pool of more than 2^31 numbers behave like the first ones of a small pool."""
    tokens = max(lengths) if op == "decode" else 1
    near = make_case(op, lengths, QWEN3_NEXT, dtype=torch.bfloat16, device="cuda", slots_per_row=tokens)
    used = near["recurrent_state"].shape[0]
    num_slots = 2**31 // near["recurrent_state"][0].numel() + 8
    far = copy_of(near)
    shift = num_slots - used
    for name in ("recurrent_state", "conv_state"):
        if name in near:
            big = torch.empty((num_slots, *near[name].shape[1:]), device="cuda", dtype=near[name].dtype)
            big[shift:] = near[name]
            far[name] = big
    assert far["recurrent_state"].numel() > 2**31
    far["state_read"] += shift
    far["state_write"] = torch.where(far["state_write"] < 0, -1, far["state_write"] + shift)
    near = run(op, near)
    load_function(f"atom_gdn.kernels.triton_ops:{op}")(**far)
    assert torch.equal(near["out"], far["out"])
    for name in ("recurrent_state", "conv_state"):
        if name in near:
            torch.testing.assert_close(near[name], far[name][shift:], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_replay_equals_eager(num_tokens):
    """A graph of 8 rows replays steps of fewer rows, padded with rows of garbage that change nothing."""
    kernel = load_function("atom_gdn.kernels.triton_ops:decode")
    full = make_case(
        "decode", [num_tokens] * 8, QWEN3_NEXT, dtype=torch.bfloat16, device="cuda", slots_per_row=num_tokens
    )
    captured = copy_of(full)
    kernel(**copy_of(full))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(**captured)
    for num_rows in (8, 5, 1):
        step = copy_of(full)
        end = num_rows * num_tokens
        step["query_start_loc"].clamp_(max=end)
        step["state_read"][num_rows:] = -1
        step["state_write"][end:] = -1
        for name in ("qkv", "a", "b"):
            step[name].normal_()
            step[name][end:] = torch.nan
        for name, value in step.items():
            if torch.is_tensor(value):
                captured[name].copy_(value)
        graph.replay()
        kernel(**step)
        for name in ("out", "conv_state", "recurrent_state"):
            torch.testing.assert_close(captured[name], step[name], atol=0, rtol=0, equal_nan=True)
        assert not step["out"][:end].isnan().any()
        assert step["out"][end:].isnan().all()


def test_decode_does_not_wait_for_the_device():
    case = make_case("decode", [1] * 4, QWEN3_NEXT, dtype=torch.bfloat16, device="cuda")
    run("decode", case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        load_function("atom_gdn.kernels.triton_ops:decode")(**case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
