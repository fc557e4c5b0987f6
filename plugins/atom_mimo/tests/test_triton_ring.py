"""The Triton kernels against the reference: under Triton's interpreter on the CPU (see `conftest.py`), else compiled.

bfloat16 products are wrong in the interpreter, so that dtype is for the device.
"""

import copy
import inspect

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the package triton")

from atom_core.plugin.ops import load_function
from atom_mimo.kernels import reference, triton_ring
from atom_mimo.kernels.samples import Case, attention_case, write_case
from atom_mimo.kernels.triton_ring_write import ring_write
from atom_mimo.ops import KERNELS, OPS

ON_GPU = torch.cuda.is_available()
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
TOLERANCE = {op.name: op.tolerance for op in OPS}
NARROW = {"num_heads": 4, "num_kv_heads": 2}
CASES = {
    "first-token": Case([1], [0], **NARROW),
    "short-full-wrapped-padding": Case([1, 1, 1, 0, 1], [7, 8, 9, 0, 1000], after=2, **NARROW),
    "verify": Case([4, 4, 1], [1, 17, 6], spare=3, before=1, after=3, **NARROW),
    "window-1": Case([1, 3], [2, 5], window=1, spare=2, num_heads=4, num_kv_heads=4, sinks=False),
    "several-tiles": Case([1, 2], [129, 300], window=100, spare=1, num_heads=2, num_kv_heads=1),
    "192-128": Case([1, 2], [40, 9], window=33, num_heads=2, num_kv_heads=1, head_dim=192, v_head_dim=128),
    "no-ring": Case([2, 2], [0, 30], window=12, spare=1, num_heads=4, num_kv_heads=1, stateless=[1]),
    "chunks": Case([5, 0, 8, 9, 1], [0, 0, 0, 3, 12], before=3, after=2, **NARROW),
    "chunk-longer-than-ring": Case([40, 3], [21, 0], window=8, num_heads=2, num_kv_heads=1),
    "chunk-over-window": Case([50, 11], [100, 7], window=33, spare=3, num_heads=2, num_kv_heads=1, sinks=False),
}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("op", "case"),
    [*(("ring_decode", case) for case in CASES), *(("ring_prefill", case) for case in CASES if "chunk" in case)],
)
def test_attention(op, case, dtype):
    inputs = attention_case(CASES[case], DEVICE, dtype, seed=1)
    for ring in ("ring_k", "ring_v"):
        inputs[ring][inputs[ring] == 1e4] = torch.nan  # what was never written
    expected = copy.deepcopy(inputs)
    getattr(reference, op)(**expected)
    start, end = (int(inputs["query_start_loc"][index]) for index in (0, -1))
    untouched = torch.cat([inputs["out"][:start], inputs["out"][end:]])
    inputs["out"][start:end] = torch.nan
    getattr(triton_ring, op)(**inputs)
    absolute, relative = TOLERANCE[f"mimo.{op}"][name_of(dtype)]
    torch.testing.assert_close(inputs["out"][start:end], expected["out"][start:end], atol=absolute, rtol=relative)
    assert torch.equal(torch.cat([inputs["out"][:start], inputs["out"][end:]]), untouched)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_written_rings_are_the_reference_s(case, dtype):
    inputs = write_case(CASES[case], DEVICE, dtype, seed=2)
    before, expected = copy.deepcopy(inputs), copy.deepcopy(inputs)
    reference.ring_write(**expected)
    ring_write(**inputs)
    for ring in ("ring_k", "ring_v"):
        assert torch.equal(inputs[ring], expected[ring])
        assert not torch.equal(inputs[ring], before[ring])


def test_signatures_are_the_ops():
    references = {op.name: op.reference for op in OPS}
    kernels = [kernel for kernel in KERNELS if kernel.name in ("triton", "hopper")]
    assert {kernel.op for kernel in kernels if kernel.name == "triton"} == set(references)
    for kernel in kernels:
        found, expected = load_function(kernel.function), load_function(references[kernel.op])
        assert list(inspect.signature(found).parameters) == list(inspect.signature(expected).parameters)


def full_size(rows, new, computed, num_slots=None):
    """MiMo-V2-Flash's sliding-window layers: 64 query heads, 8 key heads, 192/128, window 128, one draft."""
    num_slots = num_slots or rows

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * new
    before = torch.full((rows,), computed, device="cuda", dtype=torch.int32)
    slots = torch.arange(num_slots - rows, num_slots, device="cuda")
    return {
        "query": normal(rows * new, 64, 192),
        "key": normal(rows * new, 8, 192),
        "value": normal(rows * new, 8, 128),
        "ring_k": torch.empty(num_slots, 129, 8, 192, device="cuda", dtype=torch.bfloat16).normal_(),
        "ring_v": torch.empty(num_slots, 129, 8, 128, device="cuda", dtype=torch.bfloat16).normal_(),
        "out": torch.full((rows * new, 64, 128), torch.nan, device="cuda", dtype=torch.bfloat16),
        "query_start_loc": starts,
        "query_start_loc_host": starts.cpu().numpy(),
        "num_computed": before,
        "num_computed_host": before.cpu().numpy(),
        "slots": slots,
        "slots_host": slots.cpu().numpy(),
        "max_query_len": new,
        "scaling": 192**-0.5,
        "window": 128,
        "sinks": torch.randn(64, device="cuda"),
        "scratch": {},
    }


def relative_error(inputs, kernel=triton_ring.ring_decode):
    wide = {name: inputs[name].float() for name in ("query", "key", "value", "ring_k", "ring_v")}
    wide["out"] = torch.zeros_like(inputs["out"], dtype=torch.float32)
    reference.ring_decode(**{**inputs, **wide})
    kernel(**inputs)
    return float((inputs["out"].float() - wide["out"]).norm() / wide["out"].norm())


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "new", "computed"), [(64, 1, 5000), (9, 2, 77), (2, 1500, 300), (1, 4096, 0)])
def test_full_size(rows, new, computed):
    assert relative_error(full_size(rows, new, computed)) < 8e-3


WIDE = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 192, "v_head_dim": 128}


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a device of compute capability 9")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case([300, 3, 0, 70, 16], [21, 0, 5, 1000, 127], window=128, spare=1, before=3, after=5, **WIDE),
        Case([50, 200], [0, 300], window=128, sinks=False, stateless=[1], **WIDE),
        Case([150, 33], [40, 7], window=33, spare=3, **WIDE),
        Case([33], [9], window=1, **WIDE),
    ],
    ids=["rows", "no-ring", "window-33", "window-1"],
)
def test_hopper_kernel(case, dtype):
    """What was never written is NaN, in rings and behind the rows."""
    from atom_mimo.kernels import gluon_ring

    inputs = attention_case(case, DEVICE, dtype, seed=3)
    start, end = (int(inputs["query_start_loc"][index]) for index in (0, -1))
    for ring in ("ring_k", "ring_v"):
        inputs[ring][inputs[ring] == 1e4] = torch.nan
    for name in ("query", "key", "value"):
        inputs[name][:start] = inputs[name][end:] = torch.nan
    expected = copy.deepcopy(inputs)
    reference.ring_prefill(**expected)
    inputs["out"].fill_(torch.nan)
    gluon_ring.ring_prefill(**inputs)
    absolute, relative = TOLERANCE["mimo.ring_prefill"][name_of(dtype)]
    torch.testing.assert_close(inputs["out"][start:end], expected["out"][start:end], atol=absolute, rtol=relative)
    assert inputs["out"][:start].isnan().all()
    assert inputs["out"][end:].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a device of compute capability 9")
@pytest.mark.parametrize(("rows", "new", "computed"), [(2, 1500, 300), (1, 4096, 0), (40, 1, 0), (3, 37, 100)])
def test_hopper_kernel_at_full_size(rows, new, computed):
    from atom_mimo.kernels import gluon_ring

    inputs = full_size(rows, new, computed)
    assert relative_error(inputs, gluon_ring.ring_prefill) < 8e-3
    first = inputs["out"].clone()
    gluon_ring.ring_prefill(**inputs)
    assert torch.equal(first, inputs["out"])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_rings_of_more_than_2_to_the_31_elements():
    inputs = full_size(4, 3, 500, num_slots=2**31 // (129 * 8 * 128) + 100)
    assert inputs["ring_v"].numel() > 2**31
    small = {**inputs, "slots": torch.arange(4, device="cuda"), "out": inputs["out"].clone()}
    small |= {ring: inputs[ring][-4:].clone() for ring in ("ring_k", "ring_v")}
    arguments = {name for name in inputs} - {"query", "out", "scaling", "window", "sinks"}
    kernels = [triton_ring.ring_decode]
    if ON_HOPPER:
        from atom_mimo.kernels import gluon_ring

        kernels.append(gluon_ring.ring_prefill)
    for kernel in kernels:
        for sample in (small, inputs):
            kernel(**sample)
        assert torch.equal(small["out"], inputs["out"])
        assert not small["out"].isnan().any()
    for sample in (small, inputs):
        ring_write(**{name: sample[name] for name in arguments})
    assert not small["out"].isnan().any()
    for name in ("out", "ring_k", "ring_v"):
        assert torch.equal(small[name], inputs[name][-len(small[name]) :])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_replay_reads_new_positions_and_leaves_padding_alone():
    inputs = full_size(8, 2, 300)
    inputs["query_start_loc"].zero_()
    inputs["slots"].fill_(-1)
    write = {name for name in inputs} - {"query", "out", "scaling", "window", "sinks"}

    def step():
        triton_ring.ring_decode(**inputs)
        ring_write(**{name: inputs[name] for name in write})

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for real in (5, 1, 8):
        inputs["query_start_loc"].copy_(torch.arange(9, device="cuda").clamp(max=real) * 2)
        inputs["num_computed"].copy_(torch.randint(0, 400, (8,), device="cuda"))
        inputs["slots"].copy_(torch.where(torch.arange(8, device="cuda") < real, torch.randperm(8, device="cuda"), -1))
        for name in ("query", "key", "value"):
            inputs[name].normal_()
            inputs[name][real * 2 :] = torch.nan
        rings = {ring: inputs[ring].clone() for ring in ("ring_k", "ring_v")}
        inputs["out"].fill_(torch.nan)
        graph.replay()
        replayed = {name: inputs[name].clone() for name in ("out", "ring_k", "ring_v")}
        inputs["out"].fill_(torch.nan)
        for ring, content in rings.items():
            inputs[ring].copy_(content)
        step()
        for name, found in replayed.items():
            torch.testing.assert_close(found, inputs[name], rtol=0, atol=0, equal_nan=True)
        assert not replayed["out"][: real * 2].isnan().any()
        assert replayed["out"][real * 2 :].isnan().all()
