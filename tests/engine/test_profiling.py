"""What is left for caches is what the model does not take."""

import gc

import pytest
import torch

from atom_core import LLM, SamplingParams
from atom_core.config import EngineConfig
from atom_core.engine.profiling import MemoryUse, largest_steps
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ((4, 10, 100), [[10], [3, 3, 2, 2]]),
        ((4, 10, 7), [[6], [3, 3, 2, 2]]),
        ((8, 3, 100), [[3], [1, 1, 1]]),
        ((1, 5, 100), [[5], [5]]),
        ((2, 100, 11), [[10], [10, 10]]),
    ],
)
def test_the_largest_steps_fill_the_limits(limits, steps):
    assert largest_steps(*limits) == steps


def test_the_peak_counts_once():
    """100 in all: 50 are resident, the peak of 20 holds the 8 of workspace that the plan takes off, 5 are graphs."""
    config = EngineConfig(model="demo", memory=100)
    use = MemoryUse(resident_bytes=50, peak_bytes=20, graph_bytes=5)
    assert use.cache_bytes(config, CPU, 1000, 8) == 100 - 50 - 12 - 5
    assert use.cache_bytes(config, CPU, 1000, 30) == 100 - 50 - 5


def test_roles_take_turns_in_steps_and_share_the_rest():
    use = MemoryUse(resident_bytes=50, peak_bytes=20, graph_bytes=5)
    both = use.with_draft(MemoryUse(resident_bytes=58, peak_bytes=12, graph_bytes=2))
    assert both == MemoryUse(resident_bytes=58, peak_bytes=20, graph_bytes=7)


def test_the_share_is_of_what_was_free():
    config = EngineConfig(model="demo", memory_fraction=0.5)
    assert MemoryUse(100, 0, 0).cache_bytes(config, CPU, 1000, 0) == 400


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("model_type", "draft"), [("llama", None), ("qwen3_next", None), ("llama", "llama"), ("qwen3_next", "llama")]
)
def test_caches_fill_the_share_and_no_more(model_type, draft):
    """Nothing else may use the device meanwhile: what is free is measured."""
    assert 0.7 * 2**32 < reserved_bytes(model_type, draft) < 1.02 * 2**32


def reserved_bytes(model_type, draft):
    """What an engine with 4 GiB took, once it has run; not counting what an earlier test left behind."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    prompts = [[(index * 7 + seed) % 120 for index in range(300)] for seed in range(40)]
    options = {"max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_blocks": 10**7}
    if draft is not None:
        options |= {"draft_model": tiny_model(draft), "num_spec_tokens": 2}
    llm = LLM(tiny_model(model_type), device="cuda", skip_tokenizer=True, memory="4GiB", compile=False, **options)
    llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0))
    return torch.cuda.memory_reserved() - before
