"""Greedy output equals transformers' own `generate`, token for token, in float32."""

import pytest
import torch

from atom_core import LLM, SamplingParams
from tests.tiny_models import reference_generate, tiny_model

FAMILIES = (
    "llama mistral qwen2 qwen3 qwen3_moe mixtral gemma2 gemma3_text phi3 olmo2 granite cohere gpt_oss starcoder2 "
    "llama4_text"
).split()
NUM_TOKENS = 24
PROMPT_LENGTHS = (3, 17, 40, 1, 16, 33)


def prompts_of(vocab_size):
    return [[(7 * length + 13 * index) % (vocab_size - 2) + 1 for index in range(length)] for length in PROMPT_LENGTHS]


def generate(model, prompts, **options):
    llm = LLM(model, skip_tokenizer=True, cache_memory="16MB", max_model_len=512, **options)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_of_every_family(family):
    model = tiny_model(family)
    prompts = prompts_of(model.config.vocab_size)
    expected = reference_generate(model, prompts, NUM_TOKENS)
    assert generate(model, prompts, prefill_chunk_tokens=7, max_num_seqs=4) == expected


def test_prefix_hits_are_cold_runs():
    """Invariant 7, for prompts that share any prefix, second and third use."""
    model = tiny_model("qwen3")
    base = [(5 * index) % 90 + 1 for index in range(70)]
    prompts = [base[:length] for length in range(1, 66, 4)]
    expected = reference_generate(model, prompts, 8)
    llm = LLM(model, skip_tokenizer=True, max_blocks=24, cache_memory="16MB", max_model_len=128)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for _ in range(3):
        outputs = llm.generate(prompts, params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert llm.stats()["cache"]["hit_tokens"] > 0


def test_salted_requests_share_nothing():
    model = tiny_model("llama")
    llm = LLM(model, skip_tokenizer=True, cache_memory="16MB", max_model_len=128)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    prompt = list(range(1, 50))
    hits = []
    for salt in ("a", "b", "a", None, None):
        llm.generate([prompt], params, cache_salt=salt)
        hits.append(llm.stats()["cache"]["hit_tokens"])
    assert hits == [0, 0, 48, 48, 96]


@pytest.mark.slow
def test_the_demo_model():
    """SmolLM2-135M-Instruct with its real weights, against transformers on the same weights; one ends by itself."""
    from transformers import AutoModelForCausalLM

    from atom_core import EngineConfig
    from atom_core.models.loader import load_model, resolve_config

    config = EngineConfig(model="demo", dtype="float32")
    model_config = resolve_config(config)
    weights = load_model(config, model_config, torch.float32, torch.device("cpu")).state_dict()
    model_config._attn_implementation = "eager"
    reference = AutoModelForCausalLM.from_config(model_config, attn_implementation="eager").eval()
    reference.load_state_dict(weights)
    llm = LLM("demo", dtype="float32", cache_memory="256MB", max_model_len=256, prefill_chunk_tokens=48)
    texts = [
        "The capital of France is",
        "def fibonacci(n):",
        "Once upon a time, in a small village by the sea, there lived an old fisherman who every morning",
    ]
    prompts = [llm.engine.io.tokenizer(text)["input_ids"] for text in texts]
    params = SamplingParams(max_tokens=32, temperature=0)
    found = [list(output.outputs[0].token_ids) for output in llm.generate(texts, params)]
    assert found == [list(tokens) for tokens in reference_generate(reference, prompts, 32)]
    assert min(map(len, found)) < 32
