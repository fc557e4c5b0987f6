"""A gate and a sum behind a product, and a norm in front, are joined, and the result stays what it was."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from torch.nn import functional
from atom_linear.joins import join_rows
from atom_linear.kernels.triton_row import linear_row as row

HALF = 24
torch.manual_seed(1)
states = torch.randn(1, 1, 40)
gate_up, down, bias = torch.randn(2 * HALF, 40) / 7, torch.randn(40, HALF) / 5, torch.randn(2 * HALF)


def halves(product):
    return product[..., 0:HALF], product[..., HALF : 2 * HALF]


def whole(states):
    gate, up = halves(row(functional.rms_norm(states, (40,)), gate_up, None))
    return states + row(functional.silu(gate) * up, down, None)


def with_bias(states):
    gate, up = halves(row(states, gate_up, bias))
    return up * functional.silu(gate)


def of_the_other_half(states):
    gate, up = halves(row(states, gate_up, None))
    return gate * functional.silu(up)


def read_twice(states):
    gate, up = halves(row(states, gate_up, None))
    return functional.silu(gate) * up + gate


def another_activation(states):
    gate, up = halves(row(states, gate_up, None))
    return functional.gelu(gate) * up


def sum_of_products(states):
    return row(states, gate_up, None) + row(states, 2 * gate_up, bias)


def doubled(states):
    product = row(states, gate_up, None)
    return product + product


def changed_in_place_meanwhile(states):
    copied = states.clone()
    product = row(copied, gate_up, None)
    copied.zero_()
    return product + product.new_ones(product.shape)


def with_a_change_in_place_elsewhere(states):
    mask = torch.zeros_like(states)
    mask.scatter_(-1, torch.tensor([[[3]]]), 1.0)
    return mask[..., :HALF] + row(states, gate_up[:HALF], None)


def of_another_shape(states):
    return states[..., :1] + row(states, gate_up, None)


def of_another_dtype(states):
    return states.double()[..., :1].expand(1, 1, 2 * HALF) + row(states, gate_up, None)


EXPECTED = [
    (whole, [{"gated": True}, {"residual": True}]),
    (with_bias, [{"gated": True}]),
    (of_the_other_half, [{}]),
    (read_twice, [{}]),
    (another_activation, [{}]),
    (sum_of_products, [{}, {"residual": True}]),
    (doubled, [{}]),
    (changed_in_place_meanwhile, [{}]),
    (with_a_change_in_place_elsewhere, [{"residual": True}]),
    (of_another_shape, [{}]),
    (of_another_dtype, [{}]),
]
for function, expected in EXPECTED:
    found = []

    def backend(traced, inputs):
        join_rows(traced.graph)
        traced.graph.lint()
        traced.recompile()
        for node in traced.graph.nodes:
            if node.target is torch.ops.atom_linear.row.default:
                found.append({name: value is True or name == "residual" for name, value in node.kwargs.items()})
        return traced.forward

    joined = torch.compile(function, backend=backend)(states)
    plain = function(states)
    torch.testing.assert_close(joined, plain, rtol=1e-5, atol=1e-5)
    assert joined.dtype == plain.dtype
    assert found == expected, (function.__name__, found)
print("all equal")
"""


NORMS = """
import torch
from torch import nn
from atom_linear.joins import join_rows

SIZE = 48
torch.manual_seed(1)


class Norm(nn.Module):
    def __init__(self, cast=lambda x: x.to(torch.float32), back=lambda x, like: x.to(like.dtype), center=False):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE) + 0.5)
        self.eps, self.cast, self.back, self.center = 1e-5, cast, back, center

    def forward(self, x):
        wide = self.cast(x)
        if self.center:
            wide = wide - wide.mean(-1, keepdim=True)
        return self.weight * self.back(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps), x)


class Sum(nn.Module):
    def __init__(self, norm, in_place=False):
        super().__init__()
        self.norm, self.in_place = norm, in_place

    def forward(self, a, b):
        x = a + b
        if self.in_place:
            x.mul_(2)
        return x + self.norm(x).tanh()


row, other, rows = torch.randn(1, 1, SIZE), torch.randn(1, 1, SIZE), torch.randn(1, 3, SIZE)
EXPECTED = [
    (Norm(), (row,), [False]),
    (Norm().half(), (row.half(),), [False]),
    (Norm(), (rows,), []),
    (Norm(lambda x: x.float(), lambda x, like: x.type_as(like)), (row,), [False]),
    (Norm(center=True), (row,), []),
    (Norm(lambda x: x), (row,), []),
    (Sum(Norm()), (row, other), [True]),
    (Sum(Norm().half()), (row.half(), other.half()), [True]),
    (Sum(Norm()), (row, other[..., :1]), [False]),
    (Sum(Norm(), in_place=True), (row, other), []),
]
for number, (module, arguments, expected) in enumerate(EXPECTED):
    for dynamic in (True, False):
        torch._dynamo.reset()
        found = []

        def backend(traced, inputs):
            join_rows(traced.graph)
            traced.graph.lint()
            traced.recompile()
            calls = [node for node in traced.graph.nodes if node.target is torch.ops.atom_linear.rms_norm.default]
            found.extend(node.args[1] is not None for node in calls)
            return traced.forward

        with torch.no_grad():
            joined = torch.compile(module, backend=backend, dynamic=dynamic)(*arguments)
            plain = module(*arguments)
        tolerance = 1e-5 if plain.dtype is torch.float32 else 2e-3
        torch.testing.assert_close(joined, plain, rtol=tolerance, atol=tolerance)
        assert found == expected, (number, dynamic, found)
print("all equal")
"""


@pytest.mark.parametrize("program", [PROGRAM, NORMS], ids=["products", "norms"])
def test_joined_launches_give_what_they_gave(program):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all equal", done.stderr
