"""Prefix hits through the whole engine: the averaging plugin against its cache-free twin."""

import re

import pytest

from atom_core import LLM
from atom_core.plugin.registry import PluginRegistry
from tests.averaging_plugin import AveragingPlugin, averaging_model, dense_generate

BLOCK = 4


def prompt_of(length, seed=0):
    return [(index * index * 7 + index * 3 + seed) % 96 for index in range(length)]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached(outputs):
    return [output.metrics.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def answers():
    """The dense answers to `prompt_of(1)` up to four blocks and one."""
    model = averaging_model()
    return {length: dense_generate(model, prompt_of(length), 4) for length in range(1, 4 * BLOCK + 2)}


@pytest.mark.parametrize("chunk", [None, 3, BLOCK])
def test_a_hit_equals_cold_for_every_length(make_llm, greedy, answers, chunk):
    for length, expected in answers.items():
        llm = make_llm(block_size=BLOCK, prefill_chunk_tokens=chunk, max_model_len=32)
        for use in range(3):
            outputs = llm.generate([prompt_of(length)], greedy(4))
            assert tokens(outputs) == [expected]
            assert cached(outputs) == [(length - 1) // BLOCK * BLOCK if use else 0]


@pytest.mark.parametrize(
    "options",
    [{"max_blocks": 9}, {"state_checkpoint_share": 0.02, "state_checkpoint_interval": 4, "cache_memory": "40KB"}],
)
def test_eviction_changes_nothing(make_llm, greedy, answers, options):
    llm = make_llm(block_size=BLOCK, max_model_len=32, **{"max_num_seqs": 3, **options})
    for _ in range(3):
        assert tokens(llm.generate([prompt_of(length) for length in answers], greedy(4))) == list(answers.values())
    cache = llm.stats()["cache"]
    assert cache["evicted_blocks"] + cache["checkpoints_evicted"] > 0
    assert cache["hit_tokens"] > 0


def test_the_second_use_computes_the_last_block_only(make_llm, greedy):
    llm = make_llm(max_model_len=512)
    prompt = prompt_of(400)
    llm.generate([prompt], greedy(2))
    before = llm.stats()["num_computed_tokens"]
    assert cached(llm.generate([prompt], greedy(2))) == [384]
    assert llm.stats()["num_computed_tokens"] - before == 16 + 1


@pytest.mark.parametrize(("interval", "hits"), [(None, [0, 0, 192]), (64, [0, 192, 192]), (128, [0, 128, 192])])
def test_a_shared_system_prompt_hits_at_the_interval_or_the_third_time(make_llm, greedy, interval, hits):
    llm = make_llm(max_model_len=512, state_checkpoint_interval=interval)
    prompts = [prompt_of(200) + prompt_of(100, seed) for seed in (1, 2, 3)]
    model = averaging_model()
    for prompt, hit in zip(prompts, hits, strict=True):
        outputs = llm.generate([prompt], greedy(4))
        assert cached(outputs) == [hit]
        assert tokens(outputs) == [dense_generate(model, prompt, 4)]


def test_the_next_turn_hits_inside_the_answer(make_llm, greedy):
    llm = make_llm(max_model_len=512, state_checkpoint_interval=32)
    first = prompt_of(40)
    answer = tokens(llm.generate([first], greedy(70)))[0]
    second = [*first, *answer, *prompt_of(20, 5)]
    outputs = llm.generate([second], greedy(4))
    assert cached(outputs) == [96]
    assert tokens(outputs) == [dense_generate(averaging_model(), second, 4)]


def test_a_preempted_request_resumes_from_a_checkpoint(make_llm, greedy):
    prompts = [prompt_of(100, seed) for seed in range(6)]
    model = averaging_model()
    llm = make_llm(max_model_len=160, max_blocks=24)
    outputs = llm.generate(prompts, greedy(40))
    assert llm.stats()["num_preemptions"] > 0
    assert llm.stats()["cache"]["checkpoints_restored"] > 0
    assert tokens(outputs) == [dense_generate(model, prompt, 40) for prompt in prompts]


def test_salts_do_not_share(make_llm, greedy):
    llm = make_llm()
    for salt, hit in (("a", 0), ("b", 0), ("a", 32), (None, 0)):
        assert cached(llm.generate([prompt_of(40)], greedy(2), cache_salt=salt)) == [hit]


class Uncacheable(AveragingPlugin):
    def requirements(self, layers, **_):
        from atom_core.plugin import CacheRequirements

        return CacheRequirements(prefix_cacheable=False)


@pytest.mark.parametrize(
    ("plugin", "options", "reason"),
    [
        (AveragingPlugin(), {"state_checkpoint_share": 0.0}, "state_checkpoint_share 0.0"),
        (Uncacheable(), {}, "'averaging'.* cannot start from cached blocks"),
    ],
)
def test_the_startup_says_why_there_are_no_hits(caplog, greedy, plugin, options, reason):
    registry = PluginRegistry.of({"averaging": plugin})
    llm = LLM(averaging_model(), registry=registry, skip_tokenizer=True, cache_memory="2MB", **options)
    found = [record.getMessage() for record in caplog.records if "no prefix cache hits" in record.getMessage()]
    assert len(found) == 1
    assert re.search(reason, found[0])
    for _ in range(2):
        assert cached(llm.generate([prompt_of(40)], greedy(2))) == [0]
