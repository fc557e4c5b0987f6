"""The fast paths on every plugin's tiny models: each gives the tokens of transformers' own cache."""

from dataclasses import replace

import pytest

from atom_core import LLM, SamplingParams
from tests.engine.proposers import Replay, garbage
from tests.tiny_models import reference_generate, tiny_model

MODEL_TYPES = ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "mimo_v2_flash"]
BLOCK, NUM_TOKENS = 4, 3
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)


def prompt_of(length, seed=0):
    return [(index * index * 7 + index * 3 + seed) % 120 for index in range(length)]


LONG_PROMPTS = [prompt_of(3), prompt_of(17, 1), prompt_of(40, 2), [5, 6, 7] * 9]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=MODEL_TYPES)
def model_type(request):
    return request.param


@pytest.fixture(scope="module")
def block_size(model_type):
    """The least block that the model's plugins accept."""
    llm = make_llm(model_type, block_size=None)
    return llm.engine.plan.block_size if llm.engine.plan.block_size > 16 else BLOCK


@pytest.fixture(scope="module")
def answers(model_type, block_size):
    """What transformers answers to prompts of 1 to four blocks and one token."""
    model = tiny_model(model_type)
    prompts = {length: prompt_of(length) for length in range(1, 4 * block_size + 2)}
    return dict(zip(prompts, reference_generate(model, list(prompts.values()), NUM_TOKENS), strict=True))


def make_llm(model_type, **options):
    defaults = {"cache_memory": "128MB", "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return LLM(tiny_model(model_type), skip_tokenizer=True, **{**defaults, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_tokens": 3, "max_blocks": 34},
        {"prefill_chunk_tokens": 8, "state_checkpoint_interval": 8, "max_blocks": 34},
    ],
    ids=str,
)
def test_a_prefix_hit_equals_cold(model_type, block_size, answers, options):
    llm = make_llm(model_type, block_size=block_size, **options)
    for use in range(3):
        outputs = llm.generate([prompt_of(length) for length in answers], GREEDY)
        assert tokens(outputs) == list(answers.values()), use
        if use == 2 and "max_blocks" not in options:
            hits = [output.metrics.num_cached_tokens for output in outputs]
            assert hits == [(length - 1) // block_size * block_size for length in answers]
    assert llm.stats()["hit_rate"] > 0.25


@pytest.fixture(scope="module")
def long_answers(model_type):
    return reference_generate(tiny_model(model_type), LONG_PROMPTS, 14)


@pytest.mark.parametrize("kind", ["right", "garbage", "between", "ngram"])
def test_speculation_changes_no_token(model_type, long_answers, kind):
    known = [[*prompt, *answer] for prompt, answer in zip(LONG_PROMPTS, long_answers, strict=True)]
    proposers = {
        "ngram": "ngram",
        "right": Replay(known),
        "garbage": garbage(vocab_size=120),
        "between": Replay(known, wrong=0.3, vary=True, vocab_size=120),
    }
    llm = make_llm(model_type, speculation=proposers[kind], num_spec_tokens=3, prefill_chunk_tokens=7)
    assert tokens(llm.generate(LONG_PROMPTS, SamplingParams(max_tokens=14, temperature=0))) == long_answers
    if kind == "right":
        assert llm.stats()["num_accepted_tokens"] == llm.stats()["num_draft_tokens"] > 0


def test_samples_part_behind_the_prompt(model_type):
    """Each sample is what a request of its own would be; the prompt is computed once, also without a prefix cache."""
    params = SamplingParams(max_tokens=6, temperature=1.2, seed=3)
    seeds = [(3 + index * 0x9E3779B97F4A7C15) % 2**64 for index in range(3)]
    apart = make_llm(model_type).generate([LONG_PROMPTS[1]] * 3, [replace(params, seed=seed) for seed in seeds])
    llm = make_llm(model_type, enable_prefix_caching=False, prefill_chunk_tokens=7)
    output = llm.generate(LONG_PROMPTS[1], replace(params, n=3))[0]
    assert [list(completion.token_ids) for completion in output.outputs] == tokens(apart)
    assert llm.stats()["num_computed_tokens"] == len(LONG_PROMPTS[1]) + 3 * 5


def test_a_registered_model_type_without_state_still_hits():
    from atom_core import hookimpl
    from atom_core.plugin.registry import PluginRegistry
    from atom_mha.plugin import MhaPlugin

    class Registered(MhaPlugin):
        @hookimpl
        def atom_model_types(self):
            return {"mha": ("llama",)}

    prompt = prompt_of(20)
    expected = reference_generate(tiny_model("llama"), [prompt], NUM_TOKENS)
    llm = make_llm("llama", registry=PluginRegistry.of({"mha": Registered()}), block_size=BLOCK)
    for hit in (0, 16):
        outputs = llm.generate([prompt], GREEDY)
        assert tokens(outputs) == expected
        assert outputs[0].metrics.num_cached_tokens == hit


def test_a_long_prompt_is_computed_once_on_a_hybrid():
    """By default the third request that shares a system prompt hits, with an interval the second."""
    one_token = SamplingParams(max_tokens=1, temperature=0)
    options = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "cache_memory": "256MB"}

    def computed(llm, prompts):
        counts = []
        for prompt in prompts:
            before = llm.stats()["num_computed_tokens"]
            llm.generate([prompt], one_token)
            counts.append(llm.stats()["num_computed_tokens"] - before)
        return counts

    llm = make_llm("qwen3_next", **options)
    assert computed(llm, [prompt_of(2000)] * 2) == [2000, 16]
    shared = [prompt_of(1900, 7) + prompt_of(50, seed) for seed in (1, 2, 3)]
    assert computed(llm, shared) == [1950, 1950, 1950 - 1888]
    llm = make_llm("qwen3_next", state_checkpoint_interval=512, **options)
    assert computed(llm, shared) == [1950, 1950 - 1536, 1950 - 1888]
