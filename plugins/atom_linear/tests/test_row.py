"""The kernel gives what the op's reference gives."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from atom_core.plugin import KernelTable
from atom_core.plugin.core_ops import CORE_OPS, linear_row, sample_rows
from atom_linear.plugin import plugin

SHAPES = [(5, 3), (1, 64), (300, 1024), (7, 1025), (64, 2048), (33, 3000)]
CASES = """
import torch
from atom_core.plugin.core_ops import linear_row
from atom_linear.kernels.row import linear_row as kernel
for out_features, in_features in {shapes}:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        for bias in (None, torch.randn(out_features).to(dtype)):
            states = torch.randn(1, 1, in_features).to(dtype)
            weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
            expected = linear_row(states.double(), weight.double(), None if bias is None else bias.double())
            found = kernel(states, weight, bias)
            assert found.dtype is dtype and found.shape == (1, 1, out_features)
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
print("all equal")
"""


def test_equal_to_the_reference_by_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    script = CASES.format(shapes=SHAPES)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all equal", done.stderr


COMPILED = """
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from atom_linear.kernels.triton_row import _linear_row as kernel
pointers = dict.fromkeys(("states", "weight", "bias", "residual", "out"), "*bf16")
for single in (False, True):
    for gated in (False, True):
        numbers = {"out_features": "constexpr" if single else "i32", "weight_stride": "i32"}
        constants = {"IN_FEATURES": 1536, "ROWS": 1, "COLUMNS": 1024, "HAS_BIAS": True, "HAS_RESIDUAL": True}
        constants |= {"GATED": gated, "EARLY": True, **({"out_features": 1} if single else {})}
        signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants)
        code = compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        weights, wait, launch = [
            code.index(what) for what in ("ld.global", "griddepcontrol.wait", "griddepcontrol.launch_dependents")
        ]
        assert weights < wait < launch, "weights are loaded, then waited, then others may begin"
        assert "ld.global" in code[launch:], "and only then the row is loaded"
print("all compiled")
"""


def test_it_compiles_for_a_device_and_waits_before_it_reads_the_row():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "all compiled", done.stderr


def select(**facts):
    table = KernelTable.build(
        [(op, "core") for op in CORE_OPS], [(kernel, "linear") for kernel in plugin.atom_kernels()]
    )
    dtypes = {"weight": facts.pop("dtype", torch.bfloat16)}
    device = torch.device(facts.pop("device", "cuda"))
    return table.select("core.linear_row", device=device, dtypes=dtypes, facts=facts).name


def test_what_it_is_chosen_for():
    pytest.importorskip("triton")
    assert select(in_features=4096, out_features=24576) == "triton"
    assert select(in_features=4096, out_features=151936) == "reference"
    assert select(in_features=4096, out_features=4096, device="cpu") == "reference"
    assert select(in_features=4096, out_features=4096, dtype=torch.float8_e4m3fn) == "reference"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_to_the_reference_on_the_device(dtype):
    from atom_linear.kernels.row import linear_row as kernel

    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for case in sample_rows(torch.device("cuda"), dtype, seed=1):
        wide = {name: None if tensor is None else tensor.double() for name, tensor in case.items()}
        torch.testing.assert_close(kernel(**case).double(), linear_row(**wide), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_launches_that_begin_early_see_what_was_computed_before_them():
    """A chain in a graph, where each product reads what the kernel in front of it wrote and overwrites it later."""
    from atom_linear.kernels.row import linear_row as kernel
    from atom_linear.kernels.triton_norm import rms_norm

    size, depth = 2048, 24
    weights = [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) / size**0.5 for _ in range(depth)]
    first = torch.empty(1, size, device="cuda", dtype=torch.bfloat16)

    def chain(product, norm):
        states = first
        for weight in weights:
            states = norm(states, product(states, weight, None))
        return states

    def by_kernel(states, other):
        return rms_norm(states, other, torch.ones(size, device="cuda", dtype=torch.bfloat16), None, 1e-6)[1]

    def by_torch(states, other):
        return functional.rms_norm(states + other, (size,), eps=1e-6)

    chain(kernel, by_kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(kernel, by_kernel)
    for _ in range(20):
        first.normal_()
        graph.replay()
        expected = chain(linear_row, by_torch)
        assert (found.float() - expected.float()).norm() < 0.05 * expected.float().norm()
