"""The Triton kernels equal the references at small shapes: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from gdn_cases import OPS, Heads, assert_alike, copy_of, make_case, run, widened

from atom_core.plugin import GraphSupport
from atom_core.plugin.ops import load_function
from atom_gdn.plugin import plugin
from atom_gdn.supports import WIDEST_KEY

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Products of bfloat16 are wrong in Triton's interpreter.
DTYPES = {"float32": torch.float32, "float16": torch.float16}
DTYPES |= {"bfloat16": torch.bfloat16} if torch.cuda.is_available() else {}
ODD = Heads(k_heads=2, v_heads=6, head_k=24, head_v=12, taps=3)
WIDE = Heads(k_heads=1, v_heads=1, head_k=64, head_v=128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_equals_the_reference_on_the_samples(op, dtype):
    atol, rtol = OPS[op].tolerance[dtype]
    for sample in load_function(OPS[op].sample_inputs)(torch.device(DEVICE), DTYPES[dtype], seed=11):
        expected = copy.deepcopy(sample)
        load_function(OPS[op].reference)(**expected)
        assert_alike(op, run(op, sample), expected, atol, rtol)


@pytest.mark.parametrize("heads", [ODD, WIDE], ids=["odd", "wide"])
@pytest.mark.parametrize(
    ("op", "lengths", "slots_per_row"),
    [("causal_conv", [70, 2], 1), ("chunk_delta_rule", [130, 3], 1), ("decode", [1, 1], 1), ("decode", [3, 1], 3)],
)
def test_heads_of_any_size(op, lengths, slots_per_row, heads):
    case = make_case(op, lengths, heads, device=DEVICE, slots_per_row=slots_per_row)
    assert_alike(op, run(op, case), run(op, case, "reference"), 2e-5, 2e-5)


@pytest.mark.parametrize(
    ("op", "lengths", "slots_per_row"),
    [
        ("causal_conv", [0, 33, 0, 2, 0], 1),
        ("chunk_delta_rule", [0, 66, 0, 2, 0], 1),
        ("decode", [1, 0, 1, 0, 0], 1),
        ("decode", [2, 0, 5, 1, 0], 5),
    ],
)
def test_padding_of_garbage_changes_nothing(op, lengths, slots_per_row):
    """NaN in tokens of no row and in slots that nobody reads stays where it is, and rows without tokens keep all."""
    case = make_case(op, lengths, device=DEVICE, before=3, after=4, slots_per_row=slots_per_row)
    empty = torch.tensor([not length for length in lengths], device=DEVICE)
    case["state_read"][empty] = -1
    found = run(op, case)
    assert_alike(op, found, run(op, case, "reference"), 2e-5, 2e-5)
    rows = slice(3, 3 + sum(lengths))
    assert not found["out"][rows].isnan().any()
    assert found["out"][:3].isnan().all()
    assert found["out"][3 + sum(lengths) :].isnan().all()


@pytest.mark.parametrize("op", OPS)
def test_no_slot_to_read_means_zeros_and_none_to_write_means_nothing(op):
    case = make_case(op, [1, 1] if op == "decode" else [5, 70], device=DEVICE)
    case["state_read"][0] = -1
    case["state_write"][-1] = -1
    found, expected = run(op, case), run(op, case, "reference")
    assert_alike(op, found, expected, 2e-5, 2e-5)
    for name in set(OPS[op].mutates) - {"out"}:
        kept = case["state_read"][1]
        assert torch.equal(found[name][kept], case[name][kept])


@pytest.mark.parametrize("value", [-1e4, 200.0])
def test_extreme_decay_stays_exact(value):
    case = make_case("chunk_delta_rule", [150], device=DEVICE, seed=5)
    case["a_log"] += 3
    case["dt_bias"] -= 8
    case["a"][::11] = value
    expected = run("chunk_delta_rule", case, "reference")
    assert_alike("chunk_delta_rule", run("chunk_delta_rule", case), expected, 2e-5, 2e-5)


def test_alike_keys_that_never_decay():
    """The hardest system of a chunk: every key the same, full strength, so that powers of it would overflow."""
    case = make_case("chunk_delta_rule", [128], dtype=torch.float16, device=DEVICE, seed=6)
    width = 2 * 2 * 16
    case["qkv"][:, 32:width] = case["qkv"][0, 32:width]
    case["a"].fill_(-100.0)
    case["b"].fill_(100.0)
    expected = widened(case)
    load_function("atom_gdn.kernels.reference:chunk_delta_rule")(**expected)
    assert_alike("chunk_delta_rule", run("chunk_delta_rule", case), expected, 1e-2, 1e-2)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_decode_equals_single_tokens_in_either_state(num_tokens, state_dtype):
    """A verify step leaves in its slots what single steps leave there."""
    at_once = make_case(
        "decode", [num_tokens] * 2, device=DEVICE, state_dtype=state_dtype, slots_per_row=max(2, num_tokens)
    )
    single = copy_of(at_once)
    at_once = run("decode", at_once)
    for index in range(num_tokens):
        tokens = torch.tensor([index, num_tokens + index], device=DEVICE)
        step = {name: single[name][tokens] for name in ("qkv", "a", "b", "state_write", "out")}
        rest = {name: value for name, value in single.items() if name not in step}
        rest |= {"query_start_loc": torch.tensor([0, 1, 2], device=DEVICE, dtype=torch.int32), "max_query_len": 1}
        done = run("decode", {**rest, **step})
        single |= {name: done[name] for name in ("conv_state", "recurrent_state")}
        single["state_read"] = step["state_write"]
    atol = 1e-6 if state_dtype == torch.float32 else 2e-2
    for name in ("conv_state", "recurrent_state"):
        torch.testing.assert_close(at_once[name], single[name], atol=atol, rtol=atol, equal_nan=True)


@pytest.mark.parametrize(("length", "parts"), [(256, (1, 1)), (300, (1, 3, 1)), (256, (1, 1, 1, 2)), (140, (1, 2))])
def test_a_row_in_parts(length, parts):
    """Parts hand their states on, also where the last part begins past the row's end."""
    from atom_gdn.kernels.triton_chunks import ChunkTiles, chunk_delta_rule

    case = make_case("chunk_delta_rule", [length], device=DEVICE, seed=8)
    found = copy_of(case)
    chunk_delta_rule(**found, tiles=ChunkTiles(parts=parts))
    assert_alike("chunk_delta_rule", found, run("chunk_delta_rule", case, "reference"), 2e-5, 2e-5)


def test_views_with_wider_rows():
    """Inputs may be parts of a wider projection."""
    case = make_case("decode", [1, 1, 1], device=DEVICE)
    expected = run("decode", case)
    for name in ("qkv", "a", "b"):
        wide = torch.full((3, 2 * case[name].shape[1]), torch.nan, device=DEVICE)
        wide[:, : case[name].shape[1]] = case[name]
        case[name] = wide[:, : case[name].shape[1]]
    own = {name: value if name in ("qkv", "a", "b") else copy_of({name: value})[name] for name, value in case.items()}
    load_function("atom_gdn.kernels.triton_ops:decode")(**own)
    for name in OPS["decode"].mutates:
        torch.testing.assert_close(own[name], expected[name], atol=0, rtol=0, equal_nan=True)


def test_supports_says_why_not():
    kernels = [kernel for kernel in plugin.atom_kernels() if kernel.name == "triton"]
    assert {kernel.op for kernel in kernels} == {f"gdn.{op}" for op in OPS}
    gpu, dtypes = torch.device("cuda"), {"conv_state": torch.bfloat16, "recurrent_state": torch.float32}
    facts = {"head_k": 128, "head_v": 128}
    for kernel in kernels:
        assert kernel.supports(gpu, dtypes, facts) is True
        assert "cpu" in kernel.supports(torch.device("cpu"), dtypes, facts)
        assert "float64" in kernel.supports(gpu, dtypes | {"recurrent_state": torch.float64}, facts)
        assert "512" in kernel.supports(gpu, dtypes, facts | {"head_k": 512})


def test_graphs_only_where_the_kernel_takes_every_layer():
    from atom_gdn.supports import graph_support

    class Layer:
        def __init__(self, head_k):
            self.shape = Heads(head_k=head_k)

    assert graph_support([Layer(128), Layer(64)]) is GraphSupport.UNIFORM
    assert graph_support([Layer(128), Layer(WIDEST_KEY + 1)]) is GraphSupport.NEVER
