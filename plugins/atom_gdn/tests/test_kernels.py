"""Every kernel of the plugin's ops equals the op's reference."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from atom_core.plugin.ops import load_function
from atom_gdn.plugin import plugin

OPS = {op.name: op for op in plugin.atom_ops()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU_KERNELS = [kernel for kernel in plugin.atom_kernels() if kernel.name == "torch_cpu"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: f"{kernel.op}-{kernel.name}")
def test_equals_the_reference(kernel, dtype):
    op = OPS[kernel.op]
    reference, function = load_function(op.reference), load_function(kernel.function)
    assert list(inspect.signature(function).parameters) == list(inspect.signature(reference).parameters)
    atol, rtol = op.tolerance[dtype]
    for sample in load_function(op.sample_inputs)(torch.device("cpu"), DTYPES[dtype], seed=3):
        expected, found = copy.deepcopy(sample), copy.deepcopy(sample)
        reference(**expected)
        function(**found)
        for name, value in sample.items():
            if not isinstance(value, torch.Tensor):
                continue
            if name in op.mutates:
                assert not torch.equal(value, expected[name]), f"the sample leaves {name} as it was"
                torch.testing.assert_close(found[name], expected[name], atol=atol, rtol=rtol)
            else:
                assert torch.equal(value, expected[name])
                assert torch.equal(value, found[name])


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_samples_are_fresh_and_seeded(op):
    make = load_function(op.sample_inputs)
    first, again, other = (make(torch.device("cpu"), torch.float32, seed) for seed in (0, 0, 100))
    assert torch.equal(first[0]["out"], again[0]["out"])
    assert not torch.equal(first[0]["out"], other[0]["out"])
    assert set(first[0]) == set(inspect.signature(load_function(op.reference)).parameters)


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: f"{kernel.op}-{kernel.name}")
def test_the_cpu_kernels_say_why_they_refuse_a_gpu(kernel):
    assert kernel.supports(torch.device("cpu"), {}, {}) is True
    assert "cuda" in kernel.supports(torch.device("cuda"), {}, {})


@pytest.mark.parametrize("value", [-1e4, 200.0])
def test_extreme_decay_stays_exact(value):
    """A token that forgets everything, or nothing, must not cost its neighbours digits."""
    op = OPS["gdn.chunk_delta_rule"]
    kernel = next(kernel for kernel in CPU_KERNELS if kernel.op == op.name)
    sample = load_function(op.sample_inputs)(torch.device("cpu"), torch.float32, seed=5)[1]
    sample["a_log"] += 3
    sample["dt_bias"] -= 8
    sample["a"][::11] = value
    expected, found = copy.deepcopy(sample), copy.deepcopy(sample)
    load_function(op.reference)(**expected)
    load_function(kernel.function)(**found)
    for name in op.mutates:
        torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("path", ["atom_gdn.kernels.reference:decode", "atom_gdn.kernels.torch_cpu:decode"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_tokens_at_once_equal_tokens_one_by_one(path, state_dtype):
    """After any number of accepted tokens, the slots hold what sequential decoding leaves there."""
    decode = load_function(path)
    sample = load_function(OPS["gdn.decode"].sample_inputs)(torch.device("cpu"), torch.float32, seed=1)[3]
    sample["recurrent_state"] = sample["recurrent_state"].to(state_dtype)
    sample["state_write"] = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    sample["state_read"] = torch.tensor([3, 5])
    at_once, single = copy.deepcopy(sample), copy.deepcopy(sample)
    decode(**at_once)
    for index in range(5):
        tokens = torch.tensor([index, 5 + index])
        step = {name: single[name][tokens] for name in ("qkv", "a", "b", "state_write", "out")}
        rest = {name: value for name, value in single.items() if name not in step}
        rest |= {"query_start_loc": torch.tensor([0, 1, 2]), "max_query_len": 1}
        decode(**rest, **step)
        single["out"][tokens] = step["out"]
        single["state_read"] = step["state_write"]
    for name in ("out", "conv_state", "recurrent_state"):
        torch.testing.assert_close(at_once[name], single[name], atol=1e-6, rtol=1e-6)
