"""The kernel gives what the op's reference gives."""

import os
import subprocess
import sys

import pytest
import torch

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
