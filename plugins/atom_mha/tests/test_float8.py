"""A float8 cache: what is kept, its bytes, and models over it."""

import pytest
import torch

from atom_mha.kernels.float8 import dequantize, quantize
from atom_mha.plugin import plugin

FLOAT8 = torch.float8_e4m3fn


def test_the_largest_number_of_a_head_becomes_448():
    numbers, scale = quantize(torch.tensor([[1.0, -2.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert numbers.dtype == FLOAT8
    assert numbers.float().tolist() == [[112.0, -224.0, 448.0, 0.0], [0.0] * 4]
    torch.testing.assert_close(scale, torch.tensor([4 / 448, 1e-12]))
    assert dequantize(numbers, scale, torch.float32).tolist() == [[1.0, -2.0, 4.0, 0.0], [0.0] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_number_is_kept_within_a_sixteenth_or_a_step_of_the_least(dtype):
    """Three bits of mantissa round by 2^-4; below 2^-6 float8 has steps of 2^-9."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(500, 64, generator=generator) * torch.logspace(-6, 4, 500).unsqueeze(1)).to(dtype)
    cached, scale = quantize(numbers)
    error = (dequantize(cached, scale, torch.float64) - numbers.double()).abs()
    assert (error <= torch.maximum(numbers.double().abs() / 16, scale.double().unsqueeze(1) * 2**-10) * 1.001).all()


def test_bytes_count_the_scales(zoo):
    """4 layers, 2 key heads of 16: keys and values of a byte each, and a float32 scale per token and head."""
    from transformers import AutoModelForCausalLM

    config = zoo.tiny_config("llama")
    layers = zoo.FlatModel(AutoModelForCausalLM.from_config(config), config).layers
    common = {"layers": layers, "model_config": config, "block_size": 8}
    assert plugin.atom_compute_block_bytes(**common, cache_dtype=FLOAT8) == {"mha": 4 * 8 * 2 * 2 * (16 + 4)}
    assert plugin.atom_compute_block_bytes(**common, cache_dtype=torch.bfloat16) == {"mha": 4 * 8 * 2 * 2 * 16 * 2}


# gpt_oss: where two experts are nearly as likely, rounding chooses between them
@pytest.mark.parametrize(("model_type", "bound"), [("llama", 0.05), ("gpt_oss", 0.2), ("gemma3_text", 0.05)])
def test_chunks_equal_one_shot_and_resemble_the_model(zoo, model_type, bound):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = zoo.tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(0, 128, (37,)).tolist()
    runs = {}
    for name, cuts, dtype in (
        ("exact", [37], torch.float32),
        ("one-shot", [37], FLOAT8),
        ("chunks", [5, 16, 1, 15], FLOAT8),
        ("token by token", [1] * 37, FLOAT8),
    ):
        flat, start, logits = zoo.FlatModel(model, config, dtype=dtype), 0, []
        for length in cuts:
            logits.append(flat.run([(0, tokens[start : start + length], start > 0 and length == 1)]))
            start += length
        runs[name] = torch.cat(logits)
    torch.testing.assert_close(runs["chunks"], runs["one-shot"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(runs["token by token"], runs["one-shot"], atol=1e-5, rtol=1e-4)
    error = (runs["one-shot"] - runs["exact"]).norm() / runs["exact"].norm()
    assert 1e-5 < error < bound
