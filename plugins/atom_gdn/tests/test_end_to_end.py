"""The whole engine on tiny hybrids: greedy tokens and prompt logprobs are those of transformers' own model."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from gdn_models import lively_model, tiny_config

from atom_core import LLM, SamplingParams, hookimpl
from atom_core.errors import StatefulModelTypeError
from atom_core.plugin.registry import PluginRegistry
from atom_gdn.plugin import GdnPlugin

LINEAR, FULL, WINDOW = "linear_attention", "full_attention", "sliding_attention"
BLOCK_SIZE = 16
NEW_TOKENS = 64
PROMPT_LENGTHS = (1, BLOCK_SIZE, BLOCK_SIZE + 1, 70, 3)

MODELS = {
    "next": ("qwen3_next", {"layer_types": [LINEAR, LINEAR, LINEAR, FULL]}),
    "next-dense-tied": (
        "qwen3_next",
        {
            "layer_types": [LINEAR, FULL],
            "mlp_only_layers": [0, 1],
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
    ),
    "next-only-linear": ("qwen3_next", {"layer_types": [LINEAR, LINEAR]}),
    "next-none-linear": ("qwen3_next", {"layer_types": [FULL, FULL]}),
    "3_5-not-periodic": ("qwen3_5_text", {"layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR]}),
    "3_5-equal-heads": (
        "qwen3_5_text",
        {"layer_types": [LINEAR, FULL], "linear_num_value_heads": 2, "num_key_value_heads": 1},
    ),
    "3_5-moe": ("qwen3_5_moe_text", {"layer_types": [LINEAR, LINEAR, FULL], "linear_num_value_heads": 6}),
    "olmo": ("olmo_hybrid", {"layer_types": [LINEAR, FULL, LINEAR]}),
    "lara": ("lara_mini", {"layer_types": [LINEAR, WINDOW, LINEAR, FULL], "sliding_window": 24}),
}

CASES = [(name, chunk) for name in MODELS for chunk in (1, 7, 64)]


@pytest.fixture(scope="module")
def registry():
    atom_mha = pytest.importorskip("atom_mha.plugin")
    return PluginRegistry.of({"mha": atom_mha.plugin, "gdn": GdnPlugin()})


@cache
def stock(name):
    model_type, changes = MODELS[name]
    return lively_model(tiny_config(model_type, **changes))


def prompts():
    random = np.random.default_rng(11)
    return [random.integers(0, 97, length).tolist() for length in PROMPT_LENGTHS]


@cache
@torch.inference_mode()
def expected(name):
    """By prompt: transformers' greedy continuation, and the logprobs of the whole text."""
    model = stock(name)
    found = []
    for prompt in prompts():
        # transformers cannot keep a cache for a model without softmax attention.
        cached = name != "next-only-linear"
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=cached)[0]
        logits = model(tokens[None], use_cache=False).logits[0]
        found.append((tokens[len(prompt) :].tolist(), logits.log_softmax(-1)))
    return found


def make_llm(name, registry, **options):
    options = {"max_model_len": 256, "max_num_seqs": 8, "cache_memory": "64MB", "block_size": BLOCK_SIZE, **options}
    return LLM(copy.deepcopy(stock(name)), registry=registry, skip_tokenizer=True, device="cpu", **options)


def greedy(**fields):
    return SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, **fields)


@pytest.mark.parametrize(("name", "chunk"), CASES)
def test_equals_transformers(name, chunk, registry):
    llm = make_llm(name, registry, prefill_chunk_tokens=chunk)
    outputs = llm.generate(prompts(), greedy(prompt_logprobs=0, logprobs=0))
    for output, prompt, (tokens, logprobs) in zip(outputs, prompts(), expected(name), strict=True):
        assert output.error is None
        assert list(output.outputs[0].token_ids) == tokens
        for position, token in enumerate(prompt[1:]):
            found = output.prompt_logprobs[position + 1][token].logprob
            assert found == pytest.approx(logprobs[position, token].item(), abs=1e-4)


@pytest.mark.parametrize("name", ["next", "3_5-not-periodic", "3_5-moe", "olmo", "lara"])
def test_preempted_requests_are_not_changed(name, registry):
    """Too few blocks for all requests at once: some are preempted in the middle and computed again."""
    llm = make_llm(name, registry, max_blocks=18, max_model_len=140, max_num_batched_tokens=64)
    outputs = llm.generate(prompts(), greedy())
    assert [list(output.outputs[0].token_ids) for output in outputs] == [tokens for tokens, _ in expected(name)]
    assert any(output.metrics.num_preemptions for output in outputs)


def test_fewer_groups_than_requests_and_reused_groups(registry):
    llm = make_llm("next", registry, max_num_seqs=2)
    for _ in range(2):
        outputs = llm.generate(prompts(), greedy())
        assert [list(output.outputs[0].token_ids) for output in outputs] == [tokens for tokens, _ in expected("next")]


class Forgetful(GdnPlugin):
    """The plugin, had its author forgotten to register model types."""

    @hookimpl
    def atom_model_types(self):
        return {}


def test_state_for_an_unregistered_model_type_stops_the_startup():
    """Before weights load: there are none to load here, and they are not asked for."""
    atom_mha = pytest.importorskip("atom_mha.plugin")
    registry = PluginRegistry.of({"mha": atom_mha.plugin, "gdn": Forgetful()})
    # Three layers of 3 x 96 x 4 and 4 x 8 x 16 x 4 bytes.
    with pytest.raises(StatefulModelTypeError, match=r"'gdn'.* has 9600 bytes .* model type 'qwen3_next'"):
        LLM(tiny_config("qwen3_next"), registry=registry, random_weights=0, skip_tokenizer=True, device="cpu")
