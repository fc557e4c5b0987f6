"""Speculation changes how fast tokens come, and nothing else."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from atom_core import LLM, SamplingParams, hookimpl
from atom_core.engine.ngram import NgramDrafter, NgramIndex
from atom_core.engine.running_rows import RunningRows
from atom_core.engine.sequence import Sequence
from atom_core.errors import ConfigError, PluginError
from atom_core.plugin import Rewind
from atom_core.plugin.registry import PluginRegistry
from tests.averaging_plugin import AveragingPlugin, averaging_model, dense_generate
from tests.engine.proposers import Replay, garbage

PROMPTS = [[1, 2, 3], [5] * 17, [7, 8] * 20, [9], list(range(16)), list(range(33))]
NUM_TOKENS = 20


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected():
    model = averaging_model()
    return [dense_generate(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def whole(expected):
    return [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]


def proposer(kind, whole):
    if kind == "ngram":
        return "ngram"
    if kind == "garbage":
        return garbage()
    return Replay(whole, wrong=0.0 if kind == "right" else 0.3, vary=kind == "between")


@pytest.mark.parametrize("kind", ["right", "garbage", "between", "ngram"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_spec_tokens": 1},
        {"num_spec_tokens": 9, "max_num_batched_tokens": 16},
        {"prefill_chunk_tokens": 3, "max_num_seqs": 2},
        {"scheduling_policy": "prefill_first", "max_num_batched_tokens": 20},
        {"block_size": 4, "state_checkpoint_interval": 4},
    ],
    ids=str,
)
def test_the_tokens_are_those_without_speculation(make_llm, greedy, expected, whole, kind, options):
    llm = make_llm(speculation=proposer(kind, whole), **options)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, greedy(NUM_TOKENS))) == expected


def test_right_drafts_save_steps(make_llm, greedy, expected, whole):
    llm = make_llm(speculation=Replay(whole), num_spec_tokens=4)
    assert tokens(llm.generate(PROMPTS[0], greedy(NUM_TOKENS))) == expected[:1]
    stats = llm.stats()
    assert stats["num_steps"] == 1 + 4  # the prompt's step gives one token, then five each, and four at the end
    assert stats["acceptance_length"] == 19 / 4
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"] == 15


def test_a_conversation_hits_inside_an_accepted_answer(make_llm, greedy, whole):
    llm = make_llm(speculation=Replay(whole), block_size=4, state_checkpoint_interval=8, num_spec_tokens=5)
    answer = tokens(llm.generate(PROMPTS[0], greedy(NUM_TOKENS)))[0]
    second = [*PROMPTS[0], *answer, 4, 2]
    outputs = llm.generate(second, greedy(4))
    assert outputs[0].metrics.num_cached_tokens == 16
    assert tokens(outputs) == [dense_generate(averaging_model(), second, 4)]


def test_preemption_under_speculation(make_llm, greedy):
    prompts = [[index + 1] * 40 for index in range(6)]
    model = averaging_model()
    answers = [dense_generate(model, prompt, 30) for prompt in prompts]
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    llm = make_llm(max_model_len=80, max_blocks=12, speculation=Replay(known, wrong=0.2))
    assert tokens(llm.generate(prompts, greedy(30))) == answers
    assert llm.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("kind", ["right", "garbage"])
def test_stop_tokens_end_inside_accepted_drafts(make_llm, greedy, expected, whole, kind):
    for stop in expected[0][1:9]:
        position = expected[0].index(stop)
        llm = make_llm(speculation=proposer(kind, whole), num_spec_tokens=8)
        completion = llm.generate(PROMPTS[0], greedy(NUM_TOKENS, stop_token_ids=[stop], logprobs=0))[0].outputs[0]
        assert list(completion.token_ids) == expected[0][: position + 1]
        assert len(completion.logprobs) == position + 1
        assert llm.stats()["cache"]["free_groups"] == llm.engine.plan.num_groups


def word_tokenizer(vocab_size=96):
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ["right", "between", "garbage"])
def test_stop_strings_end_inside_accepted_drafts(make_llm, greedy, expected, whole, kind):
    """A stop string over two tokens, at every place of a verified row: tokens behind it are taken back."""
    llm = make_llm(speculation=proposer(kind, whole), num_spec_tokens=8, block_size=4, state_checkpoint_interval=4)
    llm.engine.io.tokenizer = word_tokenizer()
    answer = expected[1]
    for place in range(1, 10):
        stop = f"w{answer[place - 1]} w{answer[place]}"
        last = next(at for at in range(1, 20) if answer[at - 1 : at + 1] == answer[place - 1 : place + 1])
        completion = llm.generate(PROMPTS[1], greedy(NUM_TOKENS, stop=(stop,)))[0].outputs[0]
        assert list(completion.token_ids) == answer[: last + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text.split() == [f"w{token}" for token in answer[: last - 1]]
        assert llm.stats()["cache"]["free_groups"] == llm.engine.plan.num_groups
        second = [*PROMPTS[1], *answer[: last + 1], 7]
        assert tokens(llm.generate(second, greedy(4))) == [dense_generate(averaging_model(), second, 4)]


@pytest.mark.parametrize("kind", ["right", "between"])
def test_logprobs_and_penalties_see_the_drafts(make_llm, whole, kind):
    fields = {"max_tokens": NUM_TOKENS, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_tokens": 9}
    for params in (
        SamplingParams(temperature=0, logprobs=2, **fields),
        SamplingParams(temperature=1.2, top_p=0.9, seed=3, logprobs=1, **fields),
    ):
        plain = make_llm().generate(PROMPTS, params)
        known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, tokens(plain), strict=True)]
        drafted = make_llm(speculation=proposer(kind, known)).generate(PROMPTS, params)
        assert tokens(drafted) == tokens(plain)
        for one, other in zip(drafted, plain, strict=True):
            for found, wanted in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
                assert found.keys() == wanted.keys()
                for token, logprob in wanted.items():
                    assert found[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)


def test_sampling_keeps_the_distribution(make_llm):
    """The second and third token of many seeds, with drafts and without: one distribution (chi-squared)."""
    count = 600
    params = [SamplingParams(max_tokens=3, temperature=0.7, top_k=4, seed=seed) for seed in range(2 * count)]
    plain = make_llm(max_num_seqs=64).generate([[1, 2, 3]] * count, params[:count])
    likely = [[1, 2, 3, *answer] for answer, _ in Counter(map(tuple, tokens(plain))).most_common(3)]
    llm = make_llm(max_num_seqs=64, speculation=Replay(likely, wrong=0.1), num_spec_tokens=2)
    drafted = llm.generate([[1, 2, 3]] * count, params[count:])
    assert 0.1 < llm.stats()["num_accepted_tokens"] / llm.stats()["num_draft_tokens"] < 0.9
    for place in (1, 2):
        one, other = (Counter(answer[place] for answer in tokens(outputs)) for outputs in (plain, drafted))
        common = [token for token in one | other if one[token] + other[token] >= 20]
        statistic = sum((one[token] - other[token]) ** 2 / (one[token] + other[token]) for token in common)
        freedom = len(common)
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5


class NeverRewinds(AveragingPlugin):
    rewind = Rewind.NEVER


def test_state_that_cannot_rewind_refuses_speculation():
    registry = PluginRegistry.of({"averaging": NeverRewinds()})
    with pytest.raises(ConfigError, match=r"'averaging'.*rewind 'never'"):
        LLM(averaging_model(), registry=registry, skip_tokenizer=True, cache_memory="2MB", speculation="ngram")


class WithProposer(AveragingPlugin):
    @hookimpl
    def atom_proposers(self):
        return {"garbage": "tests.engine.proposers:make_garbage"}


def test_proposers_come_from_plugins(greedy, expected):
    registry = PluginRegistry.of({"averaging": WithProposer()})
    options = {"registry": registry, "skip_tokenizer": True, "cache_memory": "2MB"}
    llm = LLM(averaging_model(), speculation="garbage", **options)
    assert tokens(llm.generate(PROMPTS, greedy(NUM_TOKENS))) == expected
    assert llm.stats()["num_draft_tokens"] > 0
    with pytest.raises(ConfigError, match="no proposer 'none'; known: ngram, draft_model, mtp, garbage"):
        LLM(averaging_model(), speculation="none", **options)


def test_the_proposer_of_the_documentation_works(make_llm, greedy, expected):
    text = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    example = next(found for found in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "RepeatLast" in found)
    namespace = {"hookimpl": hookimpl}
    exec(compile(example, "hooks.md", "exec"), namespace)
    proposer = namespace["make_repeat_last"](model_config=None, num_spec_tokens=3)
    llm = make_llm(speculation=proposer, num_spec_tokens=3)
    assert tokens(llm.generate(PROMPTS, greedy(NUM_TOKENS))) == expected
    assert llm.stats()["num_draft_tokens"] > 0


class Wrong(Replay):
    def drafts(self, tokens, count):
        return [96]


def test_a_proposer_outside_the_vocabulary_is_named(make_llm, greedy):
    with pytest.raises(PluginError, match=r"'Wrong' drafted \[96\]"):
        make_llm(speculation=Wrong([])).generate(PROMPTS, greedy(4))


class Scribbles(Replay):
    def propose(self, requests):
        requests[0].token_ids[0] = 5


def test_a_proposer_cannot_change_tokens(make_llm, greedy):
    with pytest.raises(ValueError, match="read-only"):
        make_llm(speculation=Scribbles([])).generate(PROMPTS, greedy(4))


def test_ngram_copies_what_followed_the_last_time():
    rows = RunningRows(2, 64, 4)
    drafter = NgramDrafter(4, rows)

    def ask(*tokens, number=0, max_num_tokens=64):
        seq = Sequence(number, tokens, SamplingParams(), max_num_tokens=max_num_tokens)
        seq.num_computed_tokens = seq.prefill_target = len(tokens) - 1
        rows.add(seq)
        drafter.set_drafts([seq])
        drafts = seq.tokens_between(seq.num_tokens, seq.num_tokens + seq.num_draft_tokens).tolist()
        rows.remove(seq)
        return drafts

    assert ask(1, 2, 3, 4, 5, 1, 2, 3) == [4, 5, 1, 2]
    assert ask(1, 2, 3, 4, 5, 1, 2, 3, 9) == []
    assert ask(1, 2, 3, 4, 5, 1, 2, 3, 9, 2, 3) == [9, 2, 3, 9]
    assert ask(7, 7, 7, number=1) == [7, 7, 7, 7]
    assert ask(7, 7, 7, number=1, max_num_tokens=6) == [7, 7]
    assert ask(7, 7, 7, number=1, max_num_tokens=4) == []
    assert ask(8, 2, 3, number=2) == []  # another sequence in the row of the first
    assert ask(5, number=4) == ask(5, 6, number=4) == ask(5, 6, 5, number=4) == []
    assert ask(5, 6, 5, 6, number=4) == [5, 6, 5, 6]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=3), st.integers(1, 6))
def test_the_index_finds_the_latest_occurrence(rows, step):
    """Against a search of every place; a later n-gram may hide one from the table, but never make one up."""
    tokens = np.zeros((len(rows), 41), dtype=np.int32)
    index = NgramIndex(tokens)
    numbers = np.arange(len(rows))
    found = expected = 0
    for end in range(1, 41, step):
        lengths = np.array([min(end, len(row)) for row in rows])
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            tokens[number, :length] = row[:length]
        index.extend(numbers, lengths)
        for row, length, start in zip(rows, lengths, index.occurrences(numbers, lengths), strict=True):
            places = {
                size: [at for at in range(size, length) if row[at - size : at] == row[length - size : length]]
                for size in (3, 2)
                if length >= size
            }
            latest = [max(at) for at in places.values() if at]
            assert start == 0 or start in latest
            found += start > 0
            expected += bool(latest)
    assert found >= 0.7 * expected
