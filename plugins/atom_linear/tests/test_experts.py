"""Rows times the weights of their experts: the kernel gives what the op's reference gives."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from atom_core.plugin.core_ops import expert_rows, sample_expert_rows

CASES = """
import torch
from atom_core.plugin.core_ops import expert_rows, sample_expert_rows
from atom_linear.kernels.experts import expert_rows as kernel
for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 4e-3)):
    for case in sample_expert_rows(torch.device("cpu"), dtype, seed=3):
        expected = expert_rows(case["states"].double(), case["weight"].double(), case["experts"])
        found = kernel(**case)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
print("all equal")
"""


def test_equal_to_the_reference_by_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CASES], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all equal", done.stderr


def test_the_reference_by_hand():
    states, weight = torch.randn(2, 3).double(), torch.randn(4, 5, 3).double()
    found = expert_rows(states, weight, torch.tensor([1, 3, 4, 0]))
    expected = [functional.linear(states[0], weight[1]), functional.linear(states[0], weight[3])]
    expected += [torch.zeros(5).double(), functional.linear(states[1], weight[0])]
    torch.testing.assert_close(found, torch.stack(expected))


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestOnTheDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_equal_to_the_reference(self, dtype):
        from atom_linear.kernels.experts import expert_rows as kernel

        tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
        for case in sample_expert_rows(torch.device("cuda"), dtype, seed=1):
            expected = expert_rows(case["states"].double(), case["weight"].double(), case["experts"])
            torch.testing.assert_close(kernel(**case).double(), expected, rtol=tolerance, atol=tolerance)

    def test_a_weight_of_more_than_two_to_the_31_elements(self):
        from atom_linear.kernels.experts import expert_rows as kernel

        weight = torch.empty(9, 2**14, 2**14, dtype=torch.bfloat16, device="cuda").normal_()
        states = torch.randn(2, 2**14, dtype=torch.bfloat16, device="cuda") / 2**7
        found = kernel(states, weight, torch.tensor([8, 0], device="cuda")).float()
        for row, expert in enumerate((8, 0)):
            expected = weight[expert].float() @ states[row].float()
            torch.testing.assert_close(found[row], expected, rtol=2e-2, atol=2e-2)
