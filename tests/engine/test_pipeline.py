"""Running one step ahead changes no token, and leaks nothing."""

import pytest
import torch

from atom_core import LLM, SamplingParams
from atom_core.engine.pipeline import StepPipeline
from tests.tiny_models import tiny_model

MODEL_TYPES = ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "mimo_v2_flash"]


def prompt_of(length, seed=0):
    return [(index * index * 7 + index * 3 + seed) % 120 for index in range(length)]


def make_llm(model_type, *, overlaps, **options):
    defaults = {"cache_memory": "128MB", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    llm = LLM(tiny_model(model_type), skip_tokenizer=True, **{**defaults, **options})
    llm.engine._pipeline = StepPipeline(llm.engine.runner, llm.engine.scheduler, overlaps=overlaps)
    return llm


def run(llm, prompts, params):
    outputs = llm.generate(prompts, params)
    return [([*output.outputs[0].token_ids], output.outputs[0].finish_reason) for output in outputs]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tokens_are_those_of_one_step_after_another(model_type):
    prompts = [prompt_of(length, length) for length in (3, 17, 40, 26, 1, 33)]
    params = [
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(max_tokens=20, temperature=1.0, seed=5),
        SamplingParams(max_tokens=31, temperature=0),
        SamplingParams(max_tokens=20, temperature=0.7, seed=6),
        SamplingParams(max_tokens=1, temperature=0),
        SamplingParams(max_tokens=14, temperature=0, stop_token_ids=[7, 11, 30, 65, 100]),
    ]
    expected = run(make_llm(model_type, overlaps=False), prompts, params)
    llm = make_llm(model_type, overlaps=True)
    for _ in range(3):
        assert run(llm, prompts, params) == expected
    llm.engine.scheduler.block_manager.check()


def test_most_steps_run_ahead():
    llm = make_llm("llama", overlaps=True)
    launches = []
    original = llm.engine.runner.launch

    def launch(batch, follows=None):
        launches.append(follows is not None)
        return original(batch, follows)

    llm.engine.runner.launch = launch
    llm.generate([prompt_of(5), prompt_of(9)], SamplingParams(max_tokens=20, temperature=0))
    assert sum(launches) == 18
    assert len(launches) == 20


def test_a_request_that_ends_early_leaves_nothing():
    llm = make_llm("qwen3_next", overlaps=True, enable_prefix_caching=False)
    free = llm.engine.scheduler.block_manager.num_free_blocks
    first = run(llm, [prompt_of(8)], SamplingParams(max_tokens=12, temperature=0))[0][0]
    stop = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=[first[4]])
    tokens, reason = run(llm, [prompt_of(8)], stop)[0]
    assert reason == "stop"
    assert tokens == first[: first.index(first[4]) + 1]
    assert llm.engine.scheduler.block_manager.num_free_blocks == free
    assert not llm.engine.has_work
    assert run(llm, [prompt_of(8)], SamplingParams(max_tokens=12, temperature=0))[0][0] == first


def test_an_abort_between_steps_leaves_nothing():
    llm = make_llm("qwen3_next", overlaps=True, enable_prefix_caching=False)
    engine = llm.engine
    free = engine.scheduler.block_manager.num_free_blocks
    expected = run(llm, [prompt_of(8)], SamplingParams(max_tokens=12, temperature=0))[0][0]
    params = SamplingParams(max_tokens=12, temperature=0)
    gone, kept = (engine.add_request(prompt, params) for prompt in (prompt_of(11), prompt_of(8)))
    for _ in range(4):
        engine.step()
    engine.abort(gone)
    finished = []
    while engine.has_work:
        finished += engine.step()
    assert [output.request_id for output in finished] == [kept]
    assert list(finished[0].outputs[0].token_ids) == expected
    assert engine.scheduler.block_manager.num_free_blocks == free


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_steps_on_a_device_never_wait_for_it(model_type, temperature):
    options = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "compile": False}
    llm = LLM(tiny_model(model_type), device="cuda", skip_tokenizer=True, cache_memory="128MB", **options)
    engine = llm.engine
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
    for length in (3, 17, 9):
        engine.add_request(prompt_of(length), params)
    for _ in range(12):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.has_work:
        engine.step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_chunks_run_ahead_of_a_busy_device(model_type):
    """Nobody waits for the tokens of a chunk, so the host could fill arrays whose upload is still to come."""
    options = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 8, "compile": False}
    options |= {"enable_prefix_caching": False, "cache_memory": "128MB", "skip_tokenizer": True}
    llm = LLM(tiny_model(model_type), device="cuda", **options)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    expected = run(llm, [prompt_of(100)], params)
    assert run(llm, [prompt_of(100)], params) == expected
    torch.cuda._sleep(2_000_000_000)  # about a second, in which the host launches every chunk
    assert run(llm, [prompt_of(100)], params) == expected
