"""Several samples of one prompt: it is computed once, they part behind it, and differ in their draws only."""

from dataclasses import replace

import pytest

from atom_core import SamplingParams

PROMPT = [(index * index * 7 + index * 3) % 96 for index in range(100)]


def samples(output):
    return [list(completion.token_ids) for completion in output.outputs]


@pytest.fixture(scope="module")
def params():
    return SamplingParams(n=4, max_tokens=8, temperature=1.5, seed=5, logprobs=0)


def apart(make_llm, prompt, params):
    """The samples as requests of their own: sample i of seed s draws as a request with this seed does."""
    seeds = [(params.seed + index * 0x9E3779B97F4A7C15) % 2**64 for index in range(params.n)]
    single = [replace(params, n=1, seed=seed) for seed in seeds]
    llm = make_llm(enable_prefix_caching=False)
    return [samples(output)[0] for output in llm.generate([prompt] * params.n, single)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 4},
        {"prefill_chunk_tokens": 9},
        {"enable_prefix_caching": False},
        {"state_checkpoint_share": 0.0},
        {"speculation": "ngram"},
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 96, 100])
def test_the_prompt_is_computed_once(make_llm, params, options, length):
    llm = make_llm(**options)
    output = llm.generate(PROMPT[:length], params)[0]
    assert samples(output) == apart(make_llm, PROMPT[:length], params)
    assert len({tuple(sample) for sample in samples(output)}) == 4
    assert [len(completion.logprobs) for completion in output.outputs] == [8] * 4
    stats = llm.stats()
    assert stats["num_generated_tokens"] == 4 * 8
    if "speculation" not in options:
        assert stats["num_computed_tokens"] == length + 4 * 7
    assert stats["cache"]["free_groups"] == llm.engine.plan.num_groups


@pytest.mark.parametrize("options", [{"max_num_seqs": 3}, {"max_num_batched_tokens": 3}])
def test_more_samples_than_run_at_once_are_refused(make_llm, params, options):
    llm = make_llm(**options)
    output = llm.generate(PROMPT, params)[0]
    assert "n is 4, but samples of a prompt run at once, and at most 3 sequences do" in output.error
    assert not llm.engine.has_work


def test_samples_beside_other_requests_under_pressure(make_llm, params):
    llm = make_llm(max_model_len=128, max_blocks=24, max_num_seqs=6)
    alone = [samples(make_llm().generate(prompt, params)[0]) for prompt in (PROMPT, PROMPT[::-1])]
    one, _, other = llm.generate([PROMPT, [1, 2, 3], PROMPT[::-1]], params)
    assert [samples(one), samples(other)] == alone
    assert llm.stats()["cache"]["free_groups"] == 6


def test_cancelling_ends_samples_that_have_not_begun(make_llm, params):
    engine = make_llm().engine
    request_id = engine.add_request(PROMPT, params)
    output = engine.abort(request_id)
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 4
    assert not engine.has_work


def test_one_token_each(make_llm):
    params = SamplingParams(n=3, max_tokens=1, temperature=1.5, seed=5)
    output = make_llm().generate([1, 2, 3], params)[0]
    assert output.finished
    assert [len(sample) for sample in samples(output)] == [1, 1, 1]
