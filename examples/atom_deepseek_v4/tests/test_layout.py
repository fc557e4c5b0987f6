"""Bytes per block and per slot against figures worked out by hand, and what the layout promises."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config
from v4_models import HEAVY, MODELS, SLIDING, SPARSE, build_config

from atom_deepseek_v4.layer import HeavilyCompressedLayer, SparseLayer, WindowLayer
from atom_deepseek_v4.plugin import plugin

CONFIGS = Path(__file__).parent / "configs"
BF16 = 2

# Per layer, in bytes. An entry of 512 and an index key of 128; rings of 128, 8 and 128 tokens; a token of a
# compressor's ring has values and gates, of two series where windows overlap.
SPARSE_BLOCK = 32 * 512 * BF16 + 32 * 128 * BF16  # 40,960
HEAVY_BLOCK = 1 * 512 * BF16  # 1,024
WINDOW_SLOT = 128 * 512 * BF16  # 131,072
SPARSE_SLOT = 8 * 2 * 1024 * BF16 + 8 * 2 * 256 * BF16  # 40,960
HEAVY_SLOT = 128 * 2 * 512 * BF16  # 262,144


def released(name):
    """The config of a released model; where its values are from, README.md says."""
    return DeepseekV4Config(**json.loads((CONFIGS / f"deepseek_v4_{name}.json").read_text()))


def claim_all(config):
    """The layers of a model without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers = []
    for name, module in model.named_modules():
        if name.endswith(".self_attn"):
            layer = plugin.atom_claim_layer(module, name).layer
            layer.module_name = name
            layers.append(layer)
    return layers


def block_bytes(layers, block_size, dtype=torch.bfloat16):
    return plugin.atom_compute_block_bytes(layers, None, block_size, dtype)["deepseek_v4"]


def slot_bytes(layers, num_spec_tokens, dtype=torch.bfloat16):
    return plugin.atom_compute_per_req_cache_bytes(layers, None, dtype, num_spec_tokens)["deepseek_v4"]


def requirements(layers, num_spec_tokens=0, max_model_len=4096):
    return plugin.atom_cache_requirements(layers, None, torch.bfloat16, num_spec_tokens, 2048, max_model_len)[
        "deepseek_v4"
    ]


@pytest.mark.parametrize(
    ("name", "num_sliding", "num_sparse", "num_heavy", "block", "slot", "slot_with_3_drafts"),
    [
        ("flash", 2, 21, 20, 880_640, 11_739_136, 12_316_672),
        ("pro", 0, 30, 31, 1_260_544, 17_350_656, 18_189_312),
    ],
)
def test_released_models(name, num_sliding, num_sparse, num_heavy, block, slot, slot_with_3_drafts):
    layers = claim_all(released(name))
    assert len(layers) == num_sliding + num_sparse + num_heavy
    assert sum(isinstance(layer, SparseLayer) for layer in layers) == num_sparse
    assert sum(type(layer) is HeavilyCompressedLayer for layer in layers) == num_heavy
    assert requirements(layers).block_size_multiple == 128
    assert block == num_sparse * SPARSE_BLOCK + num_heavy * HEAVY_BLOCK
    assert block_bytes(layers, 128) == block
    assert block_bytes(layers, 256) == 2 * block
    assert slot == len(layers) * WINDOW_SLOT + num_sparse * SPARSE_SLOT + num_heavy * HEAVY_SLOT
    assert slot_bytes(layers, 0) == slot
    draft = len(layers) * 512 * BF16 + num_sparse * 2 * (1024 + 256) * BF16 + num_heavy * 2 * 512 * BF16
    assert slot_with_3_drafts == slot + 3 * draft
    assert slot_bytes(layers, 3) == slot_with_3_drafts


def test_a_million_tokens_of_the_pro_model_take_what_is_published():
    """9.62 GiB in bf16 (AINews, 25 April 2026, after the release)."""
    blocks = 1_048_576 // 128
    assert blocks * block_bytes(claim_all(released("pro")), 128) == 10_326_376_448
    assert round(10_326_376_448 / 2**30, 2) == 9.62


def test_the_readme_has_these_figures():
    readme = (CONFIGS.parent.parent / "README.md").read_text()
    for flash, pro in ((880_640, 1_260_544), (6_880, 9_848), (11_739_136, 17_350_656), (12_316_672, 18_189_312)):
        assert f"| {flash:,} | {pro:,} |" in readme
    assert f"| {7_214_202_880:,} | {10_326_376_448:,} (9.62 GiB) |" in readme
    assert 880_640 * 8192 == 7_214_202_880


def test_transformers_default_config():
    """2 heavily compressed layers, then heavily compressed and sparse in turn: 23 and 20."""
    layers = claim_all(DeepseekV4Config(num_hidden_layers=43))
    assert block_bytes(layers, 128) == 20 * SPARSE_BLOCK + 23 * HEAVY_BLOCK == 842_752
    assert slot_bytes(layers, 0) == 43 * WINDOW_SLOT + 20 * SPARSE_SLOT + 23 * HEAVY_SLOT == 12_484_608


@pytest.mark.parametrize("num_spec_tokens", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_allocated_bytes_are_the_declared_ones(name, num_spec_tokens):
    layers, cpu = claim_all(build_config(name)), torch.device("cpu")
    block_size = 3 * requirements(layers).block_size_multiple
    paged = plugin.atom_allocate_kv_cache_tensors(layers, None, 5, block_size, torch.float32, cpu)
    state = plugin.atom_allocate_per_req_cache(layers, None, {"deepseek_v4": 4}, torch.float32, num_spec_tokens, cpu)
    assert sum(tensor.nbytes for tensor in paged.values()) == 5 * block_bytes(layers, block_size, torch.float32)
    assert sum(tensor.nbytes for tensor in state.values()) == 4 * slot_bytes(layers, num_spec_tokens, torch.float32)
    assert all(tensor.shape[1] == 5 for tensor in paged.values())
    assert all(tensor.shape[1] == 4 for tensor in state.values())


@pytest.mark.parametrize(
    ("layer_types", "rates", "multiple"),
    [
        ([SLIDING], {SPARSE: 4, HEAVY: 128}, 1),
        ([SLIDING, SPARSE], {SPARSE: 4, HEAVY: 128}, 4),
        ([SPARSE, HEAVY], {SPARSE: 4, HEAVY: 128}, 128),
        ([SPARSE, HEAVY], {SPARSE: 3, HEAVY: 8}, 24),
    ],
    ids=str,
)
def test_a_block_holds_whole_windows_of_the_layers_there_are(layer_types, rates, multiple):
    config = build_config("all-kinds", layer_types=layer_types, compress_rates=rates)
    assert requirements(claim_all(config)).block_size_multiple == multiple


def test_a_request_has_one_slot_whatever_the_drafts():
    layers = claim_all(build_config("all-kinds"))
    assert plugin.atom_slots_per_req(layers, 5) == {"deepseek_v4": 1}
    assert requirements(layers, num_spec_tokens=5).rewind == "overwrite"
    assert requirements(layers).prefix_cacheable


def test_sliding_layers_need_no_blocks():
    layers = claim_all(build_config("sliding-only"))
    assert {type(layer) for layer in layers} == {WindowLayer}
    assert block_bytes(layers, 16) == 0


def test_workspace_grows_with_the_longest_request_and_the_largest_step():
    layers = claim_all(released("flash"))
    short, long = (requirements(layers, max_model_len=length).workspace_bytes for length in (4096, 1 << 20))
    assert 100e6 < short < long < 1e9
