"""Bytes of released models against figures worked out by hand, on one rank and on four."""

import pytest
import torch
import transformers

from atom_core.errors import LayerError
from atom_mla.plugin import plugin

V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "max_position_embeddings": 163840,
}
"""deepseek-ai/DeepSeek-V3 config.json, with few experts: they have no cache."""
V32 = {**V3, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
"""deepseek-ai/DeepSeek-V3.2 config.json."""
V2_LITE = {
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""deepseek-ai/DeepSeek-V2-Lite config.json."""
GLM5_EVERY_SECOND = {
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "indexer_types": ["full", "shared"] * 39,
}
"""zai-org/GLM-5's dims, with an indexer in every second layer."""

CASES = {
    # 61 layers x (512 + 64) values x 2 bytes
    "v3": ("DeepseekV3", V3, 70_272),
    # 61 layers x (512 + 64 + 128) values x 2 bytes
    "v32": ("DeepseekV32", V32, 85_888),
    # 27 layers x 576 values x 2 bytes
    "v2-lite": ("DeepseekV2", V2_LITE, 31_104),
    # (78 layers x 576 + 39 layers x 128) values x 2 bytes
    "glm-dsa-shared": ("GlmMoeDsa", GLM5_EVERY_SECOND, 99_840),
}


def meta_layers(prefix, values, tp_size):
    config = getattr(transformers, f"{prefix}Config")(**values)
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    layers = []
    for name, module in model.named_modules():
        claim = plugin.atom_claim_layer(module, name, tp_size)
        if claim is not None:
            claim.layer.module_name = name
            layers.append(claim.layer)
    return config, layers


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_bytes_per_token_are_those_worked_out_by_hand_on_every_rank(case, tp_size):
    prefix, values, token_bytes = CASES[case]
    config, layers = meta_layers(prefix, values, tp_size)
    assert len(layers) == values["num_hidden_layers"]
    assert {layer.num_heads for layer in layers} == {values["num_attention_heads"] // tp_size}
    common = {"layers": layers, "model_config": config, "cache_dtype": torch.bfloat16}
    for block_size in (1, 16):
        found = plugin.atom_compute_block_bytes(**common, block_size=block_size)
        assert found == {"mla": token_bytes * block_size}
    tensors = plugin.atom_allocate_kv_cache_tensors(**common, block_size=16, num_blocks=3, device=torch.device("meta"))
    assert sum(tensor.nbytes for tensor in tensors.values()) == 3 * 16 * token_bytes
    assert tensors["mla.latent_cache"].shape == (len(layers), 3, 16, 576)
    assert plugin.atom_compute_per_req_cache_bytes(**common, num_spec_tokens=4) == {"mla": 0}


@pytest.mark.slow
# 61 layers x (512 + 64 numbers and 4 bytes of scale), and those x (128 + 4) for index keys
@pytest.mark.parametrize(
    ("prefix", "values", "token_bytes"), [("DeepseekV3", V3, 35_380), ("DeepseekV32", V32, 43_432)]
)
def test_float8_caches_count_their_scales(prefix, values, token_bytes):
    config, layers = meta_layers(prefix, values, 1)
    common = {"layers": layers, "model_config": config, "cache_dtype": torch.float8_e4m3fn, "block_size": 16}
    assert plugin.atom_compute_block_bytes(**common) == {"mla": 16 * token_bytes}
    tensors = plugin.atom_allocate_kv_cache_tensors(**common, num_blocks=3, device=torch.device("meta"))
    assert sum(tensor.nbytes for tensor in tensors.values()) == 3 * 16 * token_bytes
    assert tensors["mla.latent_scale"].shape == (61, 3, 16)


@pytest.mark.slow
def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(LayerError, match="128 heads, which 3 ranks cannot share evenly"):
        meta_layers("DeepseekV3", {**V3, "num_hidden_layers": 1}, 3)


def test_layers_of_different_width_get_their_own_tensors(tools):
    driver = tools.Driver(tools.build_model("glm-dsa-shared"))
    shapes = {name: tuple(tensor.shape) for name, tensor in driver.tensors.items()}
    assert shapes == {"mla.latent_cache": (4, 96, 8, 20), "mla.index_cache": (2, 96, 8, 12)}
    assert [sorted(layer.kv_cache.paged) for layer in driver.layers] == [
        ["index_cache", "latent_cache"],
        ["latent_cache"],
        ["latent_cache"],
        ["index_cache", "latent_cache"],
    ]


def test_workspace_grows_with_the_step():
    config, layers = meta_layers("DeepseekV2", {**V2_LITE, "num_hidden_layers": 1}, 1)
    common = {"layers": layers, "model_config": config, "cache_dtype": torch.bfloat16, "num_spec_tokens": 0}
    small, large = (
        plugin.atom_cache_requirements(**common, max_num_batched_tokens=tokens, max_model_len=4096)["mla"]
        for tokens in (1024, 2048)
    )
    # 3 copies x 16 heads x (192 + 128) float32 values per token
    assert large.workspace_bytes - small.workspace_bytes == 1024 * 3 * 16 * 320 * 4
    assert small.block_size_multiple == 1
    assert small.prefix_cacheable
