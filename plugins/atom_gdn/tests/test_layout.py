"""Bytes of real models against figures worked out by hand, and the choice of the state's dtype."""

from __future__ import annotations

import pytest
import torch
from gdn_models import tiny_config

from atom_core.errors import ConfigError, LayerError
from atom_gdn.plugin import GdnPlugin, plugin

DEVICE = torch.device("cpu")

# Values of the released config.json, as far as the linear layers and the number of layers go.
RELEASED = {
    "Qwen3-Next-80B-A3B": (
        "qwen3_next",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "Qwen3.5-397B-A17B": (
        "qwen3_5_moe_text",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 60,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
}

# One slot of one layer: (taps - 1) x channels x 2 bytes, and v_heads x 128 x 128 x 4 bytes.
# Qwen3-Next: 3 x (2 x 2048 + 4096) x 2 = 49,152;     32 x 65,536 = 2,097,152;  36 of 48 layers are linear.
# Qwen3.5:    3 x (2 x 2048 + 8192) x 2 = 73,728;     64 x 65,536 = 4,194,304;  45 of 60 layers are linear.
SLOT_BYTES = {
    ("Qwen3-Next-80B-A3B", 1, "float32"): 36 * (49_152 + 2_097_152),
    ("Qwen3-Next-80B-A3B", 4, "float32"): 36 * (12_288 + 524_288),
    ("Qwen3-Next-80B-A3B", 1, "bfloat16"): 36 * (49_152 + 1_048_576),
    ("Qwen3.5-397B-A17B", 1, "float32"): 45 * (73_728 + 4_194_304),
    ("Qwen3.5-397B-A17B", 4, "float32"): 45 * (18_432 + 1_048_576),
    ("Qwen3.5-397B-A17B", 1, "bfloat16"): 45 * (73_728 + 2_097_152),
}
# The same, multiplied out on paper.
assert SLOT_BYTES["Qwen3-Next-80B-A3B", 1, "float32"] == 77_266_944
assert SLOT_BYTES["Qwen3-Next-80B-A3B", 4, "float32"] == 19_316_736
assert SLOT_BYTES["Qwen3.5-397B-A17B", 1, "float32"] == 192_061_440
assert SLOT_BYTES["Qwen3.5-397B-A17B", 4, "float32"] == 48_015_360


def claimed(model_type, changes, tp_size=1, dtype=torch.bfloat16):
    """Layers of the model on the meta device, with a single expert: experts have no state."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layers = []
    for name, module in model.named_modules():
        claim = plugin.atom_claim_layer(module, name, tp_size)
        if claim is not None:
            claim.layer.module_name = name
            layers.append(claim.layer)
    return layers, config


@pytest.mark.parametrize(("name", "tp_size", "state_dtype"), SLOT_BYTES)
def test_slot_bytes_of_released_models(name, tp_size, state_dtype):
    layers, config = claimed(*RELEASED[name], tp_size)
    gdn = GdnPlugin(state_dtype)
    expected = SLOT_BYTES[name, tp_size, state_dtype]
    assert gdn.atom_compute_per_req_cache_bytes(layers, config, torch.bfloat16, 0) == {"gdn": expected}
    assert gdn.atom_compute_block_bytes(layers, config, 16, torch.bfloat16) == {"gdn": 0}
    assert gdn.atom_allocate_kv_cache_tensors(layers, config, 8, 16, torch.bfloat16, DEVICE) == {}
    for drafts in (0, 4):
        assert gdn.atom_slots_per_req(layers, drafts) == {"gdn": 1 + drafts}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_allocated_bytes_are_declared_bytes(dtype, state_dtype):
    gdn = GdnPlugin(state_dtype)
    layers, config = claimed("qwen3_5_text", {}, dtype=dtype)
    tensors = gdn.atom_allocate_per_req_cache(layers, config, {"gdn": 7}, torch.bfloat16, 2, DEVICE)
    # [layers, slots, taps - 1, channels], [layers, slots, v_heads, head_v, head_k]
    assert tensors["gdn.conv_state"].shape == (3, 7, 3, 96)
    assert tensors["gdn.recurrent_state"].shape == (3, 7, 4, 8, 16)
    assert tensors["gdn.conv_state"].dtype == dtype
    slot = gdn.atom_compute_per_req_cache_bytes(layers, config, torch.bfloat16, 2)["gdn"]
    assert sum(tensor.nbytes for tensor in tensors.values()) == 7 * slot


def test_the_environment_chooses_the_state_dtype_unless_the_plugin_was_told(monkeypatch):
    layers, config = claimed("qwen3_5_text", {})

    def dtype_of(gdn):
        tensors = gdn.atom_allocate_per_req_cache(layers, config, {"gdn": 1}, torch.bfloat16, 0, DEVICE)
        return tensors["gdn.recurrent_state"].dtype

    monkeypatch.delenv("ATOM_GDN_STATE_DTYPE", raising=False)
    assert dtype_of(plugin) == torch.float32
    monkeypatch.setenv("ATOM_GDN_STATE_DTYPE", "bfloat16")
    assert dtype_of(plugin) == torch.bfloat16
    assert dtype_of(GdnPlugin("float32")) == torch.float32
    monkeypatch.setenv("ATOM_GDN_STATE_DTYPE", "fp4")
    with pytest.raises(ConfigError, match=r"ATOM_GDN_STATE_DTYPE is 'fp4'.*float32 and bfloat16"):
        dtype_of(plugin)


@pytest.mark.parametrize(("k_heads", "v_heads", "tp_size"), [(2, 4, 4), (3, 6, 2), (2, 4, 3)])
def test_heads_that_do_not_divide_are_refused(k_heads, v_heads, tp_size):
    changes = {"linear_num_key_heads": k_heads, "linear_num_value_heads": v_heads}
    with pytest.raises(LayerError, match=f"{k_heads} key heads and {v_heads} value heads.*size {tp_size}"):
        claimed("qwen3_5_text", changes, tp_size)


def test_a_model_without_linear_layers_needs_nothing():
    layers, config = claimed("qwen3_5_text", {"layer_types": ["full_attention"] * 2})
    assert layers == []
    assert plugin.atom_compute_per_req_cache_bytes(layers, config, torch.float32, 0) == {"gdn": 0}
    assert plugin.atom_build_metadata(layers, None) == {}


def test_workspace_counts_the_convolution_and_one_group_of_chunks():
    layers, config = claimed("qwen3_5_text", {})
    requirements = plugin.atom_cache_requirements(layers, config, torch.float32, 0, 1000, 4096)["gdn"]
    # 1000 tokens x 96 channels x 3 float32, and 32 MiB.
    assert requirements.workspace_bytes == 1000 * 96 * 12 + 33_554_432
    assert requirements.rewind == "slots"
    assert requirements.block_size_multiple == 1
    assert requirements.initial_values == {"conv_state": 0.0, "recurrent_state": 0.0}
