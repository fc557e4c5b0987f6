"""Every way to draft on a GPU: tokens are transformers' own, with captured steps and without."""

import pytest
import torch
from transformers.modeling_layers import MtpModel

from atom_core import LLM, SamplingParams
from tests.engine.proposers import Replay
from tests.engine.test_mtp import config_of
from tests.tiny_models import reference_generate, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
PROMPTS = [[(index * index * 7 + index * 3 + length) % 120 for index in range(length)] for length in (1, 17, 40, 27)]
PROMPTS.append([5, 6, 7] * 9)


def make_llm(model, **options):
    torch.backends.cuda.matmul.allow_tf32 = False
    defaults = {"cache_memory": "512MB", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    options = {"device": "cuda", "dtype": "float32", "compile": False, "num_spec_tokens": 3, **defaults, **options}
    return LLM(model, skip_tokenizer=True, **options)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "mimo_v2_flash"])
def test_a_draft_model_that_is_the_model(model_type, eager):
    """A state of either role that is missing or stale would cost acceptance."""
    expected = reference_generate(tiny_model(model_type), PROMPTS, NUM_TOKENS)
    llm = make_llm(tiny_model(model_type), draft_model=tiny_model(model_type), eager=eager)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    stats = llm.stats()
    assert stats["num_accepted_tokens"] > 0.95 * stats["num_draft_tokens"] > 0


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "deepseek_v3"])
def test_drafts_of_which_some_are_wrong(model_type, eager):
    expected = reference_generate(tiny_model(model_type), PROMPTS, NUM_TOKENS)
    answers = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    llm = make_llm(tiny_model(model_type), speculation=Replay(answers, wrong=0.3, vary=True), eager=eager)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert 0 < llm.stats()["num_accepted_tokens"] < llm.stats()["num_draft_tokens"]


@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="this transformers cannot run a layer by itself")
@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_prediction_layers(model_type):
    """Random weights are drawn on the device, so the reference is the model without drafts."""
    plain = make_llm(config_of(model_type), random_weights=0, num_spec_tokens=0)
    expected = tokens(plain.generate(PROMPTS, GREEDY))
    llm = make_llm(config_of(model_type), random_weights=0, speculation="mtp")
    assert llm.engine.runner._graphs
    assert llm.engine.runner._graphs._captured
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert llm.stats()["num_draft_tokens"] > 0
