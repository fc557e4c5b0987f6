"""What users may ask of requests, on a model of which every token can be checked."""

import pytest

from atom_core import SamplingParams
from atom_core.errors import ConfigError, RequestError
from tests.averaging_plugin import averaging_model, dense_generate


def first(outputs):
    return outputs[0].outputs[0]


def test_bad_requests_fail_alone(make_llm, greedy):
    llm = make_llm(max_model_len=64)
    prompts = [[1, 2, 3], [], [4] * 64, [5, 96], "text", [6, 7]]
    outputs = llm.generate(prompts, greedy(5))
    assert [output.error is None for output in outputs] == [True, False, False, False, False, True]
    assert "empty" in outputs[1].error
    assert "64 tokens" in outputs[2].error
    assert "96 is outside the vocabulary of 96" in outputs[3].error
    assert "no tokenizer" in outputs[4].error
    model = averaging_model()
    assert list(outputs[5].outputs[0].token_ids) == dense_generate(model, [6, 7], 5)


def test_a_request_larger_than_the_cache_is_refused(make_llm, greedy):
    llm = make_llm(max_model_len=64, per_req_cache_equiv_blocks=10**6)
    output = llm.generate([[1, 2]], greedy(2))[0]
    assert output.error is not None
    assert "blocks" in output.error


def test_max_tokens_ends_with_length(make_llm, greedy):
    completion = first(make_llm().generate([[1, 2, 3]], greedy(7)))
    assert (len(completion.token_ids), completion.finish_reason) == (7, "length")


def test_the_model_length_ends_with_length(make_llm):
    params = SamplingParams(max_tokens=None, temperature=0)
    completion = first(make_llm(max_model_len=40).generate([[1, 2, 3]], params))
    assert (len(completion.token_ids), completion.finish_reason) == (37, "length")


def test_a_stop_token_ends_and_is_named(make_llm, greedy):
    expected = dense_generate(averaging_model(), [1, 2, 3], 12)
    stop = expected[4]
    position = expected.index(stop)
    completion = first(make_llm().generate([[1, 2, 3]], greedy(12, stop_token_ids=[stop])))
    assert list(completion.token_ids) == expected[: position + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_end_of_sequence_ends_unless_ignored(greedy, registry):
    from atom_core import LLM

    expected = dense_generate(averaging_model(), [1, 2, 3], 12)
    eos = expected[4]
    model = averaging_model()
    model.generation_config.eos_token_id = eos
    llm = LLM(model, registry=registry, skip_tokenizer=True, cache_memory="2MB")
    stopped, ignored = llm.generate([[1, 2, 3]] * 2, [greedy(12), greedy(12, ignore_eos=True)])
    assert list(stopped.outputs[0].token_ids) == expected[: expected.index(eos) + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", None)
    assert list(ignored.outputs[0].token_ids) == expected


def test_a_seed_fixes_the_draws_whatever_runs_beside(make_llm):
    params = SamplingParams(max_tokens=10, temperature=1.5, seed=11)
    alone = first(make_llm().generate([[1, 2, 3]], params)).token_ids
    others = [[index, 4] for index in range(1, 6)]
    beside = make_llm(prefill_chunk_tokens=2).generate([*others, [1, 2, 3]], params)[-1].outputs[0].token_ids
    assert list(alone) == list(beside)
    other_seed = SamplingParams(max_tokens=10, temperature=1.5, seed=12)
    assert list(first(make_llm().generate([[1, 2, 3]], other_seed)).token_ids) != list(alone)


def test_n_samples_differ_and_are_repeatable(make_llm):
    params = SamplingParams(n=3, max_tokens=10, temperature=1.5, seed=5)
    once, again = (
        [list(completion.token_ids) for completion in make_llm().generate([[1, 2, 3]], params)[0].outputs]
        for _ in range(2)
    )
    assert once == again
    assert len({tuple(tokens) for tokens in once}) == 3


def test_logprobs_are_those_of_the_whole_sequence(make_llm):
    import copy

    import torch

    from tests.averaging_plugin import DenseAveraging

    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=0)
    for options in ({}, {"prefill_chunk_tokens": 5}):
        output = make_llm(**options).generate([prompt], params)[0]
        completion = output.outputs[0]
        dense = copy.deepcopy(averaging_model())
        for layer in dense.model.layers:
            layer.self_attn = DenseAveraging(layer.self_attn)
        tokens = prompt + list(completion.token_ids)
        with torch.inference_mode():
            logprobs = dense(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            found = output.prompt_logprobs[position][prompt[position]].logprob
            assert found == pytest.approx(float(logprobs[position - 1, prompt[position]]), abs=1e-4)
        for index, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            expected = float(logprobs[len(prompt) - 1 + index, token])
            assert found[token].logprob == pytest.approx(expected, abs=1e-4)
            assert len(found) == 2
        of_output = logprobs[range(len(prompt) - 1, len(tokens) - 1), list(completion.token_ids)]
        assert completion.cumulative_logprob == pytest.approx(float(of_output.sum()), abs=1e-3)


def test_prompt_logprobs_survive_preemption(make_llm):
    prompts = [[index + 1] * 100 for index in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0, prompt_logprobs=0)
    llm = make_llm(max_model_len=160, max_blocks=24)
    outputs = llm.generate(prompts, params)
    assert llm.stats()["num_preemptions"] > 0
    assert {len(output.prompt_logprobs) for output in outputs} == {100}


def test_cancelled_requests_free_what_they_held(make_llm, greedy):
    llm = make_llm()
    engine = llm.engine
    before = engine.scheduler.block_manager.num_free_blocks
    kept = engine.add_request([1, 2, 3], greedy(12))
    cancelled = engine.add_request([5] * 40, greedy(12))
    waiting = engine.add_request([6] * 40, greedy(12))
    engine.step()
    engine.step()
    assert engine.abort(cancelled).outputs[0].finish_reason == "abort"
    engine.abort(waiting)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.request_id for output in outputs] == [kept]
    assert list(outputs[0].outputs[0].token_ids) == dense_generate(averaging_model(), [1, 2, 3], 12)
    assert engine.scheduler.block_manager.num_free_blocks == before
    with pytest.raises(RequestError, match="no unfinished request"):
        engine.abort(cancelled)


def test_leaving_a_stream_early_cancels(make_llm, greedy):
    llm = make_llm()
    for _ in llm.stream([1, 2, 3], greedy(50)):
        break
    assert not llm.engine.has_work


def test_a_stream_grows_to_the_whole_output(make_llm, greedy):
    llm = make_llm()
    lengths = [len(output.outputs[0].token_ids) for output in llm.stream([1, 2, 3], greedy(9))]
    assert lengths == list(range(1, 10))


def test_one_params_for_all_or_one_each(make_llm, greedy):
    llm = make_llm()
    outputs = llm.generate([[1], [2]], [greedy(3), greedy(5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate([[1], [2]], [greedy(3)])


def test_an_unknown_option_is_named(make_llm):
    with pytest.raises(ConfigError, match="max_seqs"):
        make_llm(max_seqs=3)
