"""What is claimed, what is refused, and what a cache of the real model takes."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atom_core import LLM, hookimpl
from atom_core.errors import KernelError, LayerError, StatefulModelTypeError
from atom_core.plugin.registry import PluginRegistry
from atom_mimo.layer import FullLayer, Heads, WindowLayer
from atom_mimo.plugin import MimoPlugin, plugin

REAL = {
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "sliding_window_size": 128,
    "attention_value_scale": 0.707,
    "max_position_embeddings": 131072,
}
"""XiaomiMiMo/MiMo-V2-Flash. Its `sliding_window_size` does not count the query; transformers' `sliding_window` does."""
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def real():
    config = AutoConfig.for_model("mimo_v2_flash", **REAL)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=BF16)


def claim_all(model, tp_size=1):
    layers = []
    for name, module in model.named_modules():
        claim = plugin.atom_claim_layer(module, name, tp_size)
        if claim is not None:
            assert claim.exact
            claim.layer.module_name = name
            layers.append(claim.layer)
    return layers


def figures(layers, num_spec_tokens=0):
    return (
        plugin.atom_compute_block_bytes(layers, None, 16, BF16)["mimo"],
        plugin.atom_compute_per_req_cache_bytes(layers, None, BF16, num_spec_tokens)["mimo"],
    )


def test_the_real_model_by_hand(real):
    layers = claim_all(real)
    full = [index for index, layer in enumerate(layers) if isinstance(layer, FullLayer)]
    assert full == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert {layer.heads for layer in layers if isinstance(layer, FullLayer)} == {Heads(64, 4, 192, 128)}
    windows = {(layer.heads, layer.window) for layer in layers if isinstance(layer, WindowLayer)}
    assert windows == {(Heads(64, 8, 192, 128), 129)}
    block_bytes, slot_bytes = figures(layers)
    assert block_bytes == 9 * 4 * (192 + 128) * 2 * 16 == 368_640
    assert slot_bytes == 39 * 8 * (192 + 128) * 2 * 129 == 25_758_720
    assert plugin.atom_slots_per_req(layers, 3) == {"mimo": 1}
    assert 131_072 // 16 * block_bytes + slot_bytes == 3_045_657_600
    assert (9 * 4 + 39 * 8) * (192 + 128) * 2 * 131_072 == 29_192_355_840
    assert figures(layers, num_spec_tokens=3)[1] == 39 * 8 * 320 * 2 * 132


def test_four_ranks_take_a_quarter_each(real):
    layers = claim_all(real, tp_size=4)
    assert {layer.heads for layer in layers} == {Heads(16, 1, 192, 128), Heads(16, 2, 192, 128)}
    assert figures(layers) == (9 * 1 * 320 * 2 * 16, 39 * 2 * 320 * 2 * 129)


@pytest.mark.parametrize("tp_size", [3, 8])
def test_heads_that_do_not_divide_are_refused(real, tp_size):
    message = rf"layers\.0\.self_attn .*atom-mimo.* 64 query heads and 4 key heads, .* among {tp_size} ranks"
    with pytest.raises(LayerError, match=message):
        claim_all(real, tp_size)


def test_layers_of_one_shape_share_tensors(tools):
    layers = claim_all(tools.build_model("hybrid"))
    cpu = torch.device("cpu")
    paged = plugin.atom_allocate_kv_cache_tensors(layers, None, 5, 16, BF16, cpu)
    assert {name: tuple(tensor.shape) for name, tensor in paged.items()} == {
        "mimo.k_cache": (2, 5, 16, 2, 24),
        "mimo.v_cache": (2, 5, 16, 2, 16),
    }
    state = plugin.atom_allocate_per_req_cache(layers, None, {"mimo": 3}, BF16, 1, cpu)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "mimo.ring_k": (2, 3, 10, 4, 24),
        "mimo.ring_v": (2, 3, 10, 4, 16),
    }


def test_only_the_attention_modules_are_claimed(tools):
    model = tools.build_model("non-periodic-experts")
    assert [layer.module_name for layer in claim_all(model)] == [f"model.layers.{i}.self_attn" for i in range(5)]

    class MiMoV2FlashAttention(torch.nn.Module):
        """A class of the same name elsewhere."""

    assert plugin.atom_claim_layer(MiMoV2FlashAttention(), "self_attn", 1) is None


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("layer_type", "chunked_attention", "layer type 'chunked_attention'; known are"),
        ("sliding_window", None, "sliding_window None, expected the number of keys"),
    ],
)
def test_an_unknown_mask_is_refused(tools, attribute, value, message):
    module = tools.build_model("hybrid").model.layers[1].self_attn
    setattr(module, attribute, value)
    with pytest.raises(LayerError, match=message):
        plugin.atom_claim_layer(module, "self_attn", 1)


def test_query_heads_must_be_a_multiple_of_the_key_heads(tools):
    module = tools.build_model("hybrid").model.layers[1].self_attn
    module.config.num_attention_heads = 6
    with pytest.raises(LayerError, match="6 query heads, expected a multiple of its 4 key heads"):
        plugin.atom_claim_layer(module, "self_attn", 1)


def test_an_unregistered_model_type_stops_the_startup(tools):
    class Forgetful(MimoPlugin):
        @hookimpl
        def atom_model_types(self):
            return {"mimo": []}

    with pytest.raises(StatefulModelTypeError, match=r"'mimo' .*per-request state for model type 'mimo_v2_flash'"):
        LLM(
            tools.build_model("hybrid"),
            registry=PluginRegistry.of({"mimo": Forgetful(), "mha": tools.mha_plugin}),
            skip_tokenizer=True,
            cache_memory="64MB",
        )


def test_the_full_layers_need_the_ops_of_atom_mha(tools):
    registry = PluginRegistry.of({"mimo": plugin})
    with pytest.raises(KernelError, match=r"op 'mha\.write_kv' is not defined by any loaded plugin"):
        LLM(tools.build_model("hybrid"), registry=registry, skip_tokenizer=True, cache_memory="64MB")


def test_importing_the_plugin_loads_no_torch():
    code = "import sys, atom_mimo.plugin as p; p.plugin.atom_model_types(); sys.exit('torch' in sys.modules)"
    path = ":".join(sys.path)
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False).returncode == 0
