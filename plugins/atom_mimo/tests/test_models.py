"""Whole models through the engine: tokens and prompt logprobs are transformers' own, in float32."""

import pytest
import torch

from atom_core import SamplingParams

NUM_NEW = 64
LENGTHS = [1, 16, 17, 40]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy(num_tokens=NUM_NEW, **fields):
    return SamplingParams(max_tokens=num_tokens, temperature=0, **fields)


def prompt_logprobs(output):
    prompt = output.prompt_token_ids
    return [output.prompt_logprobs[index][prompt[index]].logprob for index in range(1, len(prompt))]


@pytest.fixture(scope="module")
def hybrid(tools):
    """A model, prompts and what transformers says."""
    model = tools.build_model("hybrid")
    prompts = tools.make_prompts([*LENGTHS, 5, 33], seed=1)
    return model, prompts, [tools.stock_generate(model, prompt, 24) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    "hybrid wide-window window-beyond-everything window-1-one-kv-head-tied all-full all-sliding-dense "
    "non-periodic-experts many-kv-heads-bias".split(),
)
def test_equals_transformers_for_mixed_lengths_and_every_chunking(tools, name):
    model = tools.build_model(name)
    prompts = tools.make_prompts(LENGTHS)
    logprobs = [tools.stock_logprobs(model, prompt) for prompt in prompts]
    expected = None
    for chunk in (1, 7, 64):
        outputs = tools.make_llm(model, prefill_chunk_tokens=chunk).generate(prompts, greedy(prompt_logprobs=0))
        if expected is None:
            expected = [
                tools.stock_confirm(model, prompt, found)
                for prompt, found in zip(prompts, tokens(outputs), strict=True)
            ]
            assert min(len(set(found)) for found in expected) > 8, "the weights are too dull to compare tokens"
        assert tokens(outputs) == expected, f"chunks of {chunk}"
        for output, wanted in zip(outputs, logprobs, strict=True):
            found = prompt_logprobs(output)
            assert max((abs(a - b) for a, b in zip(found, wanted, strict=True)), default=0) < 1e-4


def test_every_model_of_the_list_is_tested(tools):
    (mark,) = test_equals_transformers_for_mixed_lengths_and_every_chunking.pytestmark[:1]
    assert set(mark.args[1]) == set(tools.MODELS)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 20, "prefill_chunk_tokens": 16},
        {"scheduling_policy": "prefill_first"},
        {"block_size": 32, "num_spec_tokens": 3},
        {"kernels": {f"mimo.{op}": "reference" for op in ("ring_decode", "ring_prefill", "ring_write")}},
    ],
    ids=str,
)
def test_no_schedule_and_no_kernel_changes_tokens(tools, hybrid, options):
    model, prompts, expected = hybrid
    llm = tools.make_llm(model, **options)
    assert tokens(llm.generate(prompts, greedy(24))) == expected
    assert tokens(llm.generate(prompts, greedy(24))) == expected, "with slots and blocks that were used before"


def test_poisoned_caches_change_nothing(tools, hybrid):
    model, prompts, expected = hybrid
    llm = tools.make_llm(model, plugins={"poisoner": tools.Poisoner()}, prefill_chunk_tokens=7)
    assert tokens(llm.generate(prompts, greedy(24))) == expected


def test_preempted_requests_resume_as_if_nothing_happened(tools):
    model = tools.build_model("hybrid")
    prompts = tools.make_prompts([50] * 6)
    llm = tools.make_llm(model, max_model_len=96, max_blocks=24)
    outputs = llm.generate(prompts, greedy(40))
    assert llm.stats()["num_preemptions"] > 0
    assert tokens(outputs) == [tools.stock_generate(model, prompt, 40) for prompt in prompts]


def test_shared_prefixes_change_nothing(tools):
    model = tools.build_model("hybrid")
    (stem,) = tools.make_prompts([48])
    prompts = [stem, stem[:33], [*stem, 5, 6, 7], stem[:32], stem]
    llm = tools.make_llm(model, max_num_seqs=2)
    expected = [tools.stock_generate(model, prompt, 12) for prompt in prompts]
    assert tokens(llm.generate(prompts, greedy(12))) == expected
    assert tokens(llm.generate(prompts, greedy(12))) == expected


@torch.no_grad()
def test_transformers_windows_count_the_query(tools):
    """One sliding-window layer: a token sees window - 1 tokens before itself, and not one more."""
    model = tools.build_model("hybrid", layer_types=["sliding_attention"], mlp_layer_types=["dense"])
    window, last = model.config.sliding_window, 30
    (prompt,) = tools.make_prompts([last + 1])
    logits = model(torch.tensor([prompt])).logits[0, last]
    for back, seen in ((window - 1, True), (window, False)):
        changed = list(prompt)
        changed[last - back] = (changed[last - back] + 1) % model.config.vocab_size
        difference = (model(torch.tensor([changed])).logits[0, last] - logits).abs().max()
        assert (difference > 1e-3) == seen


def test_windows_that_differ_by_one_give_other_models(tools):
    """The engine follows transformers for each, and the three differ: an off-by-one would show."""
    (prompt,) = tools.make_prompts([40])
    found = []
    for window in (8, 9, 10):
        model = tools.build_model("hybrid", sliding_window=window)
        output = tools.make_llm(model).generate([prompt], greedy(1, prompt_logprobs=0))[0]
        found.append(torch.tensor(prompt_logprobs(output)))
        torch.testing.assert_close(found[-1], torch.tensor(tools.stock_logprobs(model, prompt)), atol=1e-4, rtol=0)
    assert min((found[a] - found[b]).abs().max() for a, b in ((0, 1), (1, 2), (0, 2))) > 1e-2


def test_bfloat16_stays_near_transformers(tools):
    model = tools.build_model("hybrid", layer_types=["full_attention", "sliding_attention"]).to(torch.bfloat16)
    (prompt,) = tools.make_prompts([40])
    output = tools.make_llm(model, prefill_chunk_tokens=7).generate([prompt], greedy(1, prompt_logprobs=0))[0]
    found, wanted = torch.tensor(prompt_logprobs(output)), torch.tensor(tools.stock_logprobs(model.float(), prompt))
    assert (found.exp() - wanted.exp()).abs().mean() < 5e-3
