"""Expert layers by the core's implementation equal transformers' own."""

import copy

import pytest
import torch
from torch.nn import functional

from atom_core.models import experts
from atom_core.plugin import Kernel, KernelTable
from atom_core.plugin.core_ops import CORE_OPS, expert_rows
from tests.tiny_models import tiny_model

MODEL_TYPES = ["qwen3_next", "deepseek_v3", "gpt_oss", "qwen3_moe"]


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_way_gives_the_same(model_type, num_tokens):
    model = tiny_model(model_type)
    layer = next(module for module in model.modules() if experts.is_experts(module))
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, model.config.hidden_size, generator=generator)
    top_k = model.config.num_experts_per_tok
    index = torch.stack([torch.randperm(layer.num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k, generator=generator)
    layer.config = copy.deepcopy(layer.config)
    layer.config._experts_implementation = "eager"
    expected = layer(hidden, index, weights)
    for product in (experts._sum_of_products, expert_rows):
        pairs = experts._run_pairs(layer, product, hidden, index, weights)
        torch.testing.assert_close(pairs, expected, rtol=1e-4, atol=1e-4)
    assert experts.choose_experts(model) > 0
    layer.config._experts_implementation = experts.EXPERTS_NAME
    torch.testing.assert_close(layer(hidden, index, weights), expected, rtol=1e-4, atol=1e-4)


def rows_by_hand(states, weight, experts):
    return expert_rows(states, weight, experts) * 0 + 1  # so that it shows


def test_few_pairs_go_to_the_kernel_that_a_plugin_brings():
    model = tiny_model("qwen3_moe")
    layer = next(module for module in model.modules() if experts.is_experts(module))
    brought = Kernel("core.expert_rows", "by_hand", "tests.models.test_experts:rows_by_hand")
    experts.choose_experts(model)
    experts.prepare_experts(model, KernelTable.build([(op, "core") for op in CORE_OPS], [(brought, "us")]))
    hidden_size, num_tokens = model.config.hidden_size, experts._MAX_KERNEL_PAIRS + 1
    few, many = torch.randn(3, hidden_size), torch.randn(num_tokens, hidden_size)
    weights = torch.tensor([[0.25], [0.5], [1.0]])
    found = layer(few, torch.zeros(3, 1, dtype=torch.int64), weights)
    torch.testing.assert_close(found, weights.expand(3, hidden_size))
    found = layer(many, torch.zeros(num_tokens, 1, dtype=torch.int64), torch.ones(num_tokens, 1))
    gate, up = functional.linear(many, layer.gate_up_proj[0]).chunk(2, -1)
    expected = functional.linear(functional.silu(gate) * up, layer.down_proj[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_experts_stays_as_it_is():
    assert experts.choose_experts(tiny_model("llama")) == 0
