"""Every kernel of the plugin's ops equals the op's reference."""

import copy
import inspect

import pytest
import torch

from atom_core.plugin.ops import load_function
from atom_mimo.plugin import plugin

OPS = {op.name: op for op in plugin.atom_ops()}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU = torch.device("cpu")
ON_CPU = [kernel for kernel in plugin.atom_kernels() if kernel.name == "torch_cpu"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda kernel: f"{kernel.op}-{kernel.name}")
def test_equals_the_reference(kernel, dtype):
    op = OPS[kernel.op]
    reference, function = load_function(op.reference), load_function(kernel.function)
    assert list(inspect.signature(function).parameters) == list(inspect.signature(reference).parameters)
    atol, rtol = op.tolerance[dtype]
    for sample in load_function(op.sample_inputs)(CPU, DTYPES[dtype], seed=3):
        expected, found = copy.deepcopy(sample), copy.deepcopy(sample)
        reference(**expected)
        function(**found)
        function(**found)  # again, with what the first call left in scratch
        for name, value in sample.items():
            if not isinstance(value, torch.Tensor):
                continue
            if name in op.mutates:
                assert not torch.equal(value, expected[name]), f"the sample leaves {name} as it was"
                torch.testing.assert_close(found[name], expected[name], atol=atol, rtol=rtol)
            else:
                assert torch.equal(value, expected[name])
                assert torch.equal(value, found[name])


@pytest.mark.parametrize("module", ["reference", "torch_cpu"])
@pytest.mark.parametrize("name", ["ring_decode", "ring_prefill"])
def test_what_was_never_written_may_be_nan(name, module):
    """The samples hold 1e4 there."""
    function = load_function(f"atom_mimo.kernels.{module}:{name}")
    for sample in load_function(OPS[f"mimo.{name}"].sample_inputs)(CPU, torch.float32, seed=5):
        poisoned = copy.deepcopy(sample)
        for ring in ("ring_k", "ring_v"):
            poisoned[ring][poisoned[ring] == 1e4] = torch.nan
        function(**sample)
        function(**poisoned)
        assert torch.equal(sample["out"], poisoned["out"])


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_samples_are_fresh_and_seeded(op):
    make = load_function(op.sample_inputs)
    first, again, other = (make(CPU, torch.float32, seed) for seed in (0, 0, 100))
    assert torch.equal(first[0]["key"], again[0]["key"])
    assert not torch.equal(first[0]["key"], other[0]["key"])
    assert set(first[0]) == set(inspect.signature(load_function(op.reference)).parameters)


@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda kernel: f"{kernel.op}-{kernel.name}")
def test_the_cpu_kernels_say_why_they_refuse(kernel):
    assert kernel.supports(CPU, {"cache": torch.bfloat16}, {}) is True
    assert "cuda" in kernel.supports(torch.device("cuda"), {"cache": torch.bfloat16}, {})
    assert "unquantized" in kernel.supports(CPU, {"cache": torch.float8_e4m3fn}, {})


@pytest.mark.parametrize("module", ["reference", "torch_cpu"])
def test_a_long_chunk_leaves_its_last_tokens_in_the_ring(module):
    write = load_function(f"atom_mimo.kernels.{module}:ring_write")
    sample = load_function(OPS["mimo.ring_write"].sample_inputs)(CPU, torch.float32, seed=0)[0]
    ring_rows, length, computed = sample["ring_k"].shape[1], 29, 5
    sample["key"] = torch.arange(computed, computed + length).view(-1, 1, 1).expand(-1, *sample["key"].shape[1:]) * 1.0
    sample["value"] = sample["key"][..., :16]
    sample["query_start_loc_host"] = sample["query_start_loc"].numpy()
    sample["query_start_loc"][1] = length
    write(**sample)
    slot = int(sample["slots_host"][0])
    for position in range(computed + length - ring_rows, computed + length):
        assert (sample["ring_k"][slot, position % ring_rows] == position).all()
        assert (sample["ring_v"][slot, position % ring_rows] == position).all()
