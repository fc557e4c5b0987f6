"""Expert layers by the core's implementation equal transformers' own."""

import copy

import pytest
import torch

from atom_core.models import experts
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
    first = layer.gate_up_proj if layer.has_gate else layer.up_proj
    pairs = experts._run_pairs(layer, first, hidden, index, weights)
    torch.testing.assert_close(pairs, expected, rtol=1e-4, atol=1e-4)
    assert experts.choose_experts(model) > 0
    layer.config._experts_implementation = experts.EXPERTS_NAME
    torch.testing.assert_close(layer(hidden, index, weights), expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_experts_stays_as_it_is():
    assert experts.choose_experts(tiny_model("llama")) == 0
