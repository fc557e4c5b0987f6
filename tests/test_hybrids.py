"""Layers of several plugins in one model, in any order and number, and a model that two plugins can run."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from atom_core import LLM, SamplingParams
from atom_core.plugin.registry import PluginRegistry
from tests.tiny_models import enliven, reference_generate, tiny_config, tiny_model

LINEAR, FULL = "linear_attention", "full_attention"
PATTERNS = {
    "every layer linear": [LINEAR] * 3,
    "no layer linear": [FULL] * 3,
    "not periodic": [FULL, LINEAR, LINEAR, FULL, LINEAR],
}
PROMPTS = [[3, 1, 4, 1, 5], [9], list(range(16)), list(range(17)), [index * 7 % 100 for index in range(50)]]
NUM_TOKENS = 12


def generate(model, registry=None, **options):
    options = {"cache_memory": "64MB", "max_model_len": 128, "max_num_seqs": 3, "block_size": 16, **options}
    llm = LLM(model, registry=registry, skip_tokenizer=True, device="cpu", **options)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0))
    return llm, [list(output.outputs[0].token_ids) for output in outputs]


MODULE = {LINEAR: "linear_attn", FULL: "self_attn"}
OWNER = {LINEAR: "gdn", FULL: "mha"}


def hybrid(model_type, layer_types):
    """A tiny model with these layers; made from the config of a usual pattern, which tiny_config can try out."""
    config = tiny_config(model_type)
    config.layer_types, config.num_hidden_layers = list(layer_types), len(layer_types)
    torch.manual_seed(0)
    return enliven(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def greedy(model, prompt, tokens):
    """transformers' choices after the prompt and each of the tokens; they equal the tokens where those are greedy."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("model_type", "pattern"), [*(("qwen3_next", pattern) for pattern in PATTERNS), ("qwen3_5_text", "not periodic")]
)
def test_any_pattern_of_layers_runs(model_type, pattern):
    layer_types = PATTERNS[pattern]
    llm, found = generate(hybrid(model_type, layer_types), prefill_chunk_tokens=7)
    stock = hybrid(model_type, layer_types)
    assert found == [greedy(stock, prompt, tokens) for prompt, tokens in zip(PROMPTS, found, strict=True)]
    assert max(len(set(tokens)) for tokens in found) > 3, "the weights are too dull to compare tokens"
    owners = llm.engine.inspection.claimed.owners
    expected = {f"model.layers.{i}.{MODULE[kind]}": OWNER[kind] for i, kind in enumerate(layer_types)}
    assert owners == expected
    assert (llm.engine.plan.num_groups > 0) == (LINEAR in layer_types)


def test_without_its_own_plugin_a_windowed_model_pages_every_layer():
    """The generic claim serves what an exact one would serve better: equal tokens, more memory, no state."""
    model = tiny_model("mimo_v2_flash")
    expected = reference_generate(model, PROMPTS, NUM_TOKENS)
    rings, found = generate(tiny_model("mimo_v2_flash"))
    assert found == expected
    paged, found = generate(tiny_model("mimo_v2_flash"), PluginRegistry.discover(without=("mimo",)))
    assert found == expected
    assert set(rings.engine.inspection.claimed.owners.values()) == {"mimo"}
    assert set(paged.engine.inspection.claimed.owners.values()) == {"mha"}
    assert rings.engine.plan.block_bytes < paged.engine.plan.block_bytes
    assert (rings.engine.plan.num_groups > 0, paged.engine.plan.num_groups) == (True, 0)
