"""Several samples of one prompt: they share its blocks and its state, and differ in their draws only."""

import pytest

from atom_core import SamplingParams

PROMPT = [(index * index * 7 + index * 3) % 96 for index in range(100)]


def samples(output):
    return [list(completion.token_ids) for completion in output.outputs]


@pytest.fixture(scope="module")
def params():
    return SamplingParams(n=4, max_tokens=8, temperature=1.5, seed=5, logprobs=0)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 2}, {"max_num_seqs": 1}, {"prefill_chunk_tokens": 9}])
def test_the_prompt_is_computed_once(make_llm, params, options):
    apart = make_llm(enable_prefix_caching=False)
    llm = make_llm(**options)
    output = llm.generate(PROMPT, params)[0]
    assert samples(output) == samples(apart.generate(PROMPT, params)[0])
    assert len({tuple(sample) for sample in samples(output)}) == 4
    decodes = 4 * 7
    assert apart.stats()["num_computed_tokens"] == 4 * 100 + decodes
    assert llm.stats()["num_computed_tokens"] == 100 + 3 * 4 + decodes


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
