"""Claimed layers over paged caches equal transformers' eager attention, on prompts longer than window and chunk."""

import pytest
import torch

from atom_core.errors import LayerError
from atom_mha.mask import Mask

CAUSAL, WINDOWED, CHUNKED = Mask(), Mask(window=8), Mask(chunk=16)
MODELS = {
    "llama": {CAUSAL},
    "mistral": {WINDOWED},
    "gemma2": {CAUSAL, WINDOWED},
    "gemma3_text": {CAUSAL, WINDOWED},
    "gemma3n_text": {CAUSAL, WINDOWED},
    "gemma4_text": {CAUSAL, WINDOWED},
    "gpt2": {CAUSAL},
    "gpt_bigcode": {CAUSAL},
    "gpt_neox": {CAUSAL},
    "gpt_oss": {CAUSAL, WINDOWED},
    "llama4_text": {CAUSAL, CHUNKED},
    "mimo_v2_flash": {CAUSAL, WINDOWED},
    "qwen2": {CAUSAL, WINDOWED},
    "qwen2_moe": {CAUSAL, WINDOWED},
    "phi3": {WINDOWED},
    "phimoe": {WINDOWED},
    "mixtral": {WINDOWED},
    "cohere": {CAUSAL},
    "cohere2": {CAUSAL, WINDOWED},
    "starcoder2": {WINDOWED},
    "granite": {CAUSAL},
    "olmo2": {CAUSAL},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_flat_steps_equal_transformers(zoo, model_type):
    flat = zoo.compare_with_stock(zoo.tiny_config(model_type))
    assert len(flat.layers) == 4
    assert {layer.mask for layer in flat.layers} == MODELS[model_type]


@pytest.mark.parametrize(
    ("model_type", "wrong"),
    [("mistral", Mask(window=9)), ("mixtral", CAUSAL), ("llama4_text", Mask(chunk=15)), ("llama", Mask(window=30))],
)
def test_the_comparison_notices_a_wrong_mask(zoo, monkeypatch, model_type, wrong):
    monkeypatch.setattr("atom_mha.claim.learn_mask", lambda *_: wrong)
    monkeypatch.setattr("atom_mha.layer.MhaLayer._check", lambda *_: None)
    with pytest.raises(AssertionError, match="not close"):
        zoo.compare_with_stock(zoo.tiny_config(model_type))


def test_the_comparison_notices_positions_counted_in_the_batch(zoo, monkeypatch):
    monkeypatch.setattr("atom_mha.layer.PositionScale.correction", lambda *_: None)
    with pytest.raises(AssertionError, match="not close"):
        zoo.compare_with_stock(zoo.tiny_config("llama4_text"))


def attend(zoo, layer_options, heads=(4, 2), **keywords):
    from transformers import AutoModelForCausalLM

    config = zoo.tiny_config("mistral", **layer_options)
    layer = zoo.FlatModel(AutoModelForCausalLM.from_config(config), config).layers[0]
    query, key = torch.zeros(3, heads[0], 16), torch.zeros(3, heads[1], 16)
    return layer.attend(query, key, key, scaling=1.0, **keywords)


def test_another_window_than_the_learned_one_is_refused(zoo):
    with pytest.raises(LayerError, match="sliding_window=7, but its model's mask is window of 8"):
        attend(zoo, {}, sliding_window=7)
    with pytest.raises(LayerError, match="sliding_window=8, but its model's mask is causal"):
        attend(zoo, {"sliding_window": None}, sliding_window=8)


def test_repeated_keys_are_refused(zoo):
    with pytest.raises(LayerError, match="num_kv_heads=2"):
        attend(zoo, {}, heads=(4, 4))


def test_sinks_of_another_shape_are_refused(zoo):
    with pytest.raises(LayerError, match="sinks"):
        attend(zoo, {}, s_aux=torch.zeros(3))


def test_padding_tokens_write_nothing_and_come_out_as_zero(zoo):
    from dataclasses import replace

    from transformers import AutoModelForCausalLM

    from atom_mha.plugin import plugin

    config = zoo.tiny_config("mistral")
    flat = zoo.FlatModel(AutoModelForCausalLM.from_config(config), config)
    layer = flat.layers[0]
    query, key, value = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)

    def run(garbage):
        flat.blocks, flat.computed = {0: [3], 1: [5]}, {0: 0, 1: 0}
        batch, _ = flat._batch([(0, [1, 2], False), (1, [1], False), (2, [], False)])
        slots = torch.cat([batch.slot_mapping, torch.tensor([-1, -1])])
        batch = replace(batch, num_tokens=5, slot_mapping=slots)
        flat.step.begin(batch, plugin.atom_build_metadata(layers=flat.layers, batch=batch, buffers=flat.buffers))
        padded = [torch.cat([tensor[:3], garbage.expand(2, *tensor.shape[1:])]) for tensor in (query, key, value)]
        return layer.attend(*padded, scaling=0.25, sliding_window=8)

    clean, dirty = run(torch.zeros(())), run(torch.tensor(float("nan")))
    torch.testing.assert_close(clean, dirty, rtol=0, atol=0)
    assert (clean[3:] == 0).all()
    written = layer.kv_cache.k_cache.isfinite().flatten(1).any(dim=1).nonzero().squeeze(1)
    assert written.tolist() == [3, 5]


def test_bfloat16_is_close(zoo):
    """The cache's dtype may differ from the model's."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = zoo.tiny_config("qwen2")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    prompts = torch.randint(3, 100, (4, 60)).tolist()
    expected = zoo.stock_logits(model, prompts)
    found = zoo.flat_logits(zoo.FlatModel(model, config, dtype=torch.bfloat16), prompts)
    for number, logits in found.items():
        torch.testing.assert_close(logits, expected[number][: len(logits)], atol=2e-2, rtol=2e-2)
