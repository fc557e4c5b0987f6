"""Layers over one input are one product, and nobody notices."""

import copy

import pytest
import torch
from torch import nn

from atom_core.models.fusion import DeviceLinear, FusedLinear, LinearCalls, fuse_linears, prepare_linears
from atom_core.plugin import Kernel, KernelTable
from atom_core.plugin.core_ops import CORE_OPS
from tests.tiny_models import tiny_model

KERNELS = KernelTable.build([(op, "core") for op in CORE_OPS], [])
IDS = torch.tensor([[3, 5, 8, 13, 21]])


def watched(model, **keywords):
    with LinearCalls(model) as calls, torch.no_grad():
        model(IDS, use_cache=False, **keywords)
    return calls.groups()


def names(model, groups):
    by_module = {module: name for name, module in model.named_modules()}
    return [tuple(by_module[linear].rpartition(".")[2] for linear in group) for group in groups]


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}),
        ("qwen2", {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}),
        ("phi3", set()),
    ],
)
def test_what_is_joined_is_seen_in_a_step(model_type, expected):
    model = tiny_model(model_type)
    groups = watched(model)
    assert set(names(model, groups)) == expected
    assert len(groups) == len(expected) * model.config.num_hidden_layers


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma3_text", "qwen3_next", "gpt_oss"])
def test_the_model_gives_what_it_gave(model_type):
    model = tiny_model(model_type)
    fused = copy.deepcopy(model)
    assert fuse_linears(watched(fused), KERNELS) > 0
    prepare_linears(fused, KERNELS)
    with torch.no_grad():
        expected, found = model(IDS, use_cache=False).logits, fused(IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    for (name, one), (other_name, other) in zip(model.named_parameters(), fused.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)


def test_weights_take_no_more_memory():
    model = tiny_model("llama")
    before = sum(parameter.numel() for parameter in model.parameters())
    fuse_linears(watched(model), KERNELS)
    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in model.parameters()}
    assert sum(storage.nbytes() for storage in storages.values()) == 4 * before


class Siblings(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, one, other):
        return self.first(one), self.second(other)


@torch.no_grad()
def test_a_call_with_another_input_is_computed_alone():
    siblings = Siblings()
    expected = copy.deepcopy(siblings)
    states = torch.randn(2, 4)
    with LinearCalls(nn.ModuleList([siblings])) as calls:
        siblings(states, states)
    assert fuse_linears(calls.groups(), KERNELS) == 1
    assert isinstance(siblings.first, FusedLinear)
    other = torch.randn(2, 4)
    for pair in ((states, other), (states, states), (other, states), (states.clone(), states)):
        for found, wanted in zip(siblings(*pair), expected(*pair), strict=True):
            torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(siblings.second(other), expected.second(other))


def test_layers_that_differ_in_bias_stay_apart():
    assert fuse_linears([[nn.Linear(4, 3), nn.Linear(4, 3, bias=False)]], KERNELS) == 0


def row_by_hand(states, weight, bias):
    product = (weight * states).sum(-1).view(*states.shape[:-1], -1)
    return (product if bias is None else product + bias) + 1  # so that it shows


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_a_single_row_goes_to_the_kernel_that_a_plugin_brings(bias):
    path = "tests.models.test_fusion:row_by_hand"
    kernels = KernelTable.build([(op, "core") for op in CORE_OPS], [(Kernel("core.linear_row", "by_hand", path), "us")])
    linear = nn.Linear(8, 6, bias=bias)
    row, rows = torch.randn(1, 1, 8), torch.randn(1, 3, 8)
    expected, expected_rows = linear(row) + 1, linear(rows)
    prepare_linears(nn.Sequential(linear), kernels)
    assert type(linear) is DeviceLinear
    torch.testing.assert_close(linear(row), expected)
    torch.testing.assert_close(linear(rows), expected_rows)
