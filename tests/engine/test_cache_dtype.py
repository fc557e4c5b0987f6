"""The option `cache_dtype` through the whole engine."""

import copy

import pytest
import torch

from atom_core import LLM, SamplingParams
from atom_core.errors import ConfigError
from atom_core.plugin.registry import PluginRegistry
from tests.averaging_plugin import AveragingPlugin, averaging_model
from tests.tiny_models import tiny_model

OPTIONS = {"skip_tokenizer": True, "device": "cpu", "cache_memory": "64MB", "max_model_len": 128}
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("model_type", ["llama", "mimo_v2_flash"])
def test_float8_caches_halve_the_blocks_and_keep_the_invariants(model_type):
    """Chunks, a prefix hit and other requests in the batch change nothing; state keeps the dtype of activations."""
    model = tiny_model(model_type)
    prompt, other = list(range(3, 50)), list(range(60, 90))
    engines = {
        name: LLM(copy.deepcopy(model), cache_dtype=dtype, prefill_chunk_tokens=chunk, **OPTIONS)
        for name, dtype, chunk in (("plain", "auto", None), ("float8", "float8_e4m3fn", None))
    }
    engines["chunks"] = LLM(copy.deepcopy(model), cache_dtype="float8_e4m3fn", prefill_chunk_tokens=7, **OPTIONS)
    block_bytes = {name: llm.engine.inspection.figures.block_bytes for name, llm in engines.items()}
    for name, plain in block_bytes["plain"].items():
        assert block_bytes["float8"][name] <= 0.75 * plain
    assert (
        engines["float8"].engine.inspection.figures.slot_bytes == engines["plain"].engine.inspection.figures.slot_bytes
    )

    def tokens(llm, *prompts):
        return [list(output.outputs[0].token_ids) for output in llm.generate(list(prompts), PARAMS)]

    (alone,) = tokens(engines["float8"], prompt)
    assert tokens(engines["float8"], prompt, other)[0] == alone
    assert engines["float8"].stats()["hit_rate"] > 0
    assert tokens(engines["chunks"], other, prompt)[1] == alone


def test_a_plugin_that_keeps_no_scales_refuses():
    with pytest.raises(ConfigError, match=r"cache_dtype is float8_e4m3fn, but plugin 'averaging' .*float8_cache"):
        LLM(
            averaging_model(),
            registry=PluginRegistry.of({"averaging": AveragingPlugin()}),
            cache_dtype="float8_e4m3fn",
            **OPTIONS,
        )


def test_an_unknown_dtype():
    with pytest.raises(ConfigError, match="cache_dtype must be auto, float32"):
        LLM(tiny_model("llama"), cache_dtype="int8", **OPTIONS)


def test_bfloat16_caches_under_float32_activations():
    llm = LLM(tiny_model("llama"), cache_dtype="bfloat16", **OPTIONS)
    dtypes = {tensor.dtype for layer in llm.engine.runner._layers for tensor in layer.kv_cache.paged.values()}
    assert dtypes == {torch.bfloat16}
    assert len(llm.generate([[3, 4, 5]], PARAMS)[0].outputs[0].token_ids) == 12
