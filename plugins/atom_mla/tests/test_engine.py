"""Through the engine: batches, chunks, preemption, prefix hits and n samples equal transformers."""

import pytest

from atom_core import LLM, SamplingParams
from atom_core.plugin.registry import PluginRegistry
from atom_mla.plugin import plugin

NUM_NEW = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, prompt_logprobs=0)
ROOMY = {"max_model_len": 160, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 96, "max_blocks": 64}


def make_llm(model, **options):
    registry = PluginRegistry.of({"mla": plugin})
    return LLM(
        model, registry=registry, skip_tokenizer=True, dtype="float32", device="cpu", memory="2GiB", **(ROOMY | options)
    )


def check(results, prompts, expected):
    assert [result.error for result in results] == [None] * len(results)
    assert [result.outputs[0].token_ids for result in results] == [tokens for tokens, _ in expected]
    for result, prompt, (_, logits) in zip(results, prompts, expected, strict=True):
        logprobs = logits.log_softmax(-1)
        for position in range(1, len(prompt)):
            found = result.prompt_logprobs[position][prompt[position]].logprob
            assert abs(found - float(logprobs[position - 1, prompt[position]])) < 1e-4


MODELS = ("v2", "v2-lite", "v3", "v3-kimi-k2", "v32", "glm-dsa-shared", "glm4-lite", "minicpm3")
OPTIONS = [
    {"prefill_chunk_tokens": 1},
    {"prefill_chunk_tokens": 7},
    {"prefill_chunk_tokens": 64, "scheduling_policy": "prefill_first"},
    {"max_blocks": 26},
]
"""The last has too few blocks for all: requests are preempted in the middle and computed again."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(tools, name):
    model = tools.build_model(name)
    prompts = tools.make_prompts([1, 8, 9, 40, 23])
    expected = [tools.stock_generate(model, prompt, NUM_NEW) for prompt in prompts]
    for options in OPTIONS:
        llm = make_llm(tools.copy(model), **options)
        check(llm.generate(prompts, GREEDY), prompts, expected)
        assert (llm.stats()["num_preemptions"] > 0) == ("max_blocks" in options)


def test_every_model_of_the_list_is_tested(tools):
    assert set(MODELS) == tools.THROUGH_THE_ENGINE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", "glm-dsa-shared"])
def test_prefix_hits_change_nothing(tools, name):
    model = tools.build_model(name)
    prefix, *tails = tools.make_prompts([32, 1, 8, 13])
    prompts = [prefix + tail for tail in tails]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = [tools.stock_generate(model, prompt, 12)[0] for prompt in prompts]
    llm = make_llm(tools.copy(model))
    for _ in range(2):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert llm.generate([prompt], params)[0].outputs[0].token_ids == tokens
