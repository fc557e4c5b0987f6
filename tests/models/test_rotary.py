"""Rotary scalings that transformers takes from the whole batch must not let one request change another."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atom_core import LLM, SamplingParams
from atom_core.models.rotary import fix_rotary_scaling

MAX_LEN = 96
SCALINGS = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 32,
        "factor": 4.0,
    },
}


def make_model(kind):
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32 if kind == "dynamic" else 128,
        rope_parameters=SCALINGS[kind],
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_request_does_not_depend_on_its_neighbours_length(kind):
    limit = 32 if kind == "dynamic" else MAX_LEN
    long_prompt = [(7 * index) % 90 + 1 for index in range(limit - 10)]
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0)
    llm = LLM(make_model(kind), skip_tokenizer=True, cache_memory="4MB", max_model_len=limit)
    alone = llm.generate([[3, 1, 4]], params)[0].outputs[0]
    beside = llm.generate([long_prompt, [3, 1, 4]], params)[1].outputs[0]
    again = llm.generate([[3, 1, 4]], params)[0].outputs[0]
    assert list(alone.token_ids) == list(beside.token_ids) == list(again.token_ids)


@pytest.mark.parametrize("kind", SCALINGS)
def test_the_frequencies_are_those_of_the_longest_request(kind):
    stock, fixed = make_model(kind), make_model(kind)
    assert fix_rotary_scaling(fixed, MAX_LEN) == ["model.rotary_emb"]
    positions = torch.arange(MAX_LEN).unsqueeze(0)
    states = torch.zeros(1, MAX_LEN, 32)
    expected = copy.deepcopy(stock).model.rotary_emb(states, positions)
    found = fixed.model.rotary_emb(states, positions)
    short = fixed.model.rotary_emb(states[:, :4], positions[:, :4])
    for one, other, part in zip(expected, found, short, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(other[:, :4], part)


def test_static_scalings_are_left_alone():
    model = make_model("longrope")
    model.model.rotary_emb.rope_type = "default"
    assert fix_rotary_scaling(model, MAX_LEN) == []
