"""What is claimed, what is refused, and what is left to others, over every causal LM type of transformers."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from atom_core.errors import LayerError
from atom_mha.claim import _is_foreign
from atom_mha.forward_facts import read_forward
from atom_mha.heads import Heads
from atom_mha.mask import Mask
from atom_mha.mask_facts import MaskFacts, learn_mask
from atom_mha.plugin import plugin

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
REFUSED = {
    "blt": "cannot tell which mask",
    "diffllama": "in 2 places",
    "doge": "'attn_mask' as the mask",
    "dory": "takes 'cache_offset'",
    "hrm_text": "takes 'cycle_offset'",
    "inkling_text": "'position_bias'",
    "minimax_m3_vl_text": "'block_indices'",
    "zamba2": "takes 'layer_idx'",
}
FOREIGN_CLASSES = {
    "deepseek_v3": "DeepseekV3Attention",
    "deepseek_v4": "DeepseekV4Attention",
    "glm_moe_dsa": "GlmMoeDsaAttention",
    "bart": "BartAttention",
    "zaya": "ZayaAttention",
    "jetmoe": "JetMoeAttention",
}
OWN_PROJECTIONS = {
    "DeepseekV4Attention",
    "Inkling2FullAttention",
    "Inkling2LoopFullAttention",
    "Inkling2LoopSlidingAttention",
    "Inkling2SlidingAttention",
    "JetMoeAttention",
    "MoshiAttention",
    "ZayaAttention",
}
"""Causal self attention without plain query, key and value projections: not this plugin's."""
BIG = {"blt", "git", "gemma3", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal"}
NEEDS_MORE_INPUTS = {"gemma4_assistant", "gemma4_unified_assistant"}


def on_meta(zoo, model_type, **overrides):
    """A tiny model on the meta device, or a skip where the generic shrinking does not fit the type."""
    try:
        config = zoo.tiny_config(model_type, **overrides)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config), config.get_text_config()
    except Exception as error:
        pytest.skip(f"cannot build a tiny {model_type}: {type(error).__name__}")


def interface_modules(model):
    return {name: module for name, module in model.named_modules() if read_forward(type(module)) is not None}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_interface_module_is_claimed_refused_or_foreign_for_a_reason(zoo, model_type):
    model, config = on_meta(zoo, model_type)
    claims = zoo.claim_all(model, config)
    for name, module in interface_modules(model).items():
        if name in claims.layers:
            heads = claims.layers[name].heads
            assert heads.num_heads % heads.num_kv_heads == 0
        elif name in claims.refused:
            assert name in claims.refused[name]
            assert type(module).__name__ in claims.refused[name]
        else:
            assert _is_foreign(module, read_forward(type(module))) or type(module).__name__ in OWN_PROJECTIONS
    assert set(claims.layers) <= set(interface_modules(model))
    assert bool(claims.refused) == (model_type in REFUSED)
    assert all(REFUSED[model_type] in reason for reason in claims.refused.values())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*MODEL_TYPES} - BIG - NEEDS_MORE_INPUTS))
def test_whatever_is_claimed_whole_equals_transformers(zoo, model_type):
    model, config = on_meta(zoo, model_type)
    claims = zoo.claim_all(model, config)
    if claims.refused or claims.unowned or not claims.layers:
        pytest.skip("not every layer is this plugin's")
    zoo.compare_with_stock(zoo.tiny_config(model_type))


@pytest.mark.parametrize("model_type", FOREIGN_CLASSES)
def test_foreign_attention_is_left_to_others(zoo, model_type):
    model, config = on_meta(zoo, model_type)
    modules = [module for module in model.modules() if type(module).__name__ == FOREIGN_CLASSES[model_type]]
    assert modules
    for module in modules:
        assert plugin.atom_claim_layer(module, "x", config, 1) is None


@pytest.mark.parametrize(("model_type", "exact"), [("llama", False), ("mimo_v2_flash", False), ("llama4_text", True)])
def test_claims_are_generic_but_for_classes_known_by_name(zoo, model_type, exact):
    model, config = on_meta(zoo, model_type)
    name, module = next((name, module) for name, module in interface_modules(model).items())
    assert plugin.atom_claim_layer(module, name, config, 1).exact is exact


@pytest.mark.parametrize(
    ("model_type", "overrides", "masks"),
    [
        ("qwen2", {"use_sliding_window": False}, [None] * 4),
        ("qwen2", {"max_window_layers": 3}, [None] * 3 + [8]),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("phi3", {"sliding_window": 5}, [5] * 4),
        ("gpt_oss", {}, [8, None, 8, None]),
        ("olmo3", {"layer_types": ["full_attention"] * 4}, [None] * 4),
        ("llama", {"sliding_window": 8}, [None] * 4),
    ],
)
def test_windows(zoo, model_type, overrides, masks):
    model, config = on_meta(zoo, model_type, **overrides)
    layers = zoo.claim_all(model, config).layers.values()
    assert [layer.mask.window for layer in layers] == masks


def test_shapes_differ_by_layer(zoo):
    model, config = on_meta(zoo, "mimo_v2_flash")
    layers = list(zoo.claim_all(model, config).layers.values())
    assert [layer.heads for layer in layers] == [Heads(4, 2, 16, 16)] + [Heads(4, 4, 16, 16)] * 3
    common = {"layers": layers, "model_config": config, "block_size": 16, "cache_dtype": torch.bfloat16}
    tensors = plugin.atom_allocate_kv_cache_tensors(**common, num_blocks=3, device=torch.device("cpu"))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "mha.k_cache.0": (1, 3, 16, 2, 16),
        "mha.k_cache.1": (3, 3, 16, 4, 16),
        "mha.v_cache.0": (1, 3, 16, 2, 16),
        "mha.v_cache.1": (3, 3, 16, 4, 16),
    }
    assert plugin.atom_compute_block_bytes(**common)["mha"] * 3 == sum(tensor.nbytes for tensor in tensors.values())


def test_key_and_value_sizes_may_differ(zoo):
    model, config = on_meta(zoo, "mimo_v2_flash", v_head_dim=8)
    assert {layer.heads.v_head_dim for layer in zoo.claim_all(model, config).layers.values()} == {8}
    zoo.compare_with_stock(zoo.tiny_config("mimo_v2_flash", v_head_dim=8))


def test_tensor_parallel_ranks_count_their_own_heads(zoo):
    model, config = on_meta(zoo, "llama")
    (heads,) = {layer.heads for layer in zoo.claim_all(model, config, tp_size=2).layers.values()}
    assert heads == Heads(2, 1, 16, 16)
    refused = zoo.claim_all(model, config, tp_size=4).refused
    assert all("2 key heads cannot be divided among 4 ranks" in reason for reason in refused.values())
    assert len(refused) == 4


def test_projections_that_the_plan_gathers_keep_all_heads(zoo):
    model, config = on_meta(zoo, "phi3")
    (heads,) = {layer.heads for layer in zoo.claim_all(model, config, tp_size=2).layers.values()}
    assert heads == Heads(4, 2, 16, 16)


def test_bidirectional_configs_are_refused(zoo):
    config = PretrainedConfig()
    config.is_causal = False
    facts = MaskFacts({}, False, frozenset({"create_causal_mask"}))
    with pytest.raises(LayerError, match="both directions"):
        learn_mask(facts, config, 0)


def test_unknown_masks_are_refused():
    config = PretrainedConfig(layer_types=["full_attention", "dilated"], sliding_window=None)
    typed = MaskFacts(
        {"full_attention": frozenset({"create_causal_mask"}), "slid": frozenset({"create_sliding_window_causal_mask"})},
        False,
        frozenset(),
    )
    assert learn_mask(typed, config, 0) == Mask()
    with pytest.raises(LayerError, match="layer type 'dilated'"):
        learn_mask(typed, config, 1)
    with pytest.raises(LayerError, match="layer 7 has none"):
        learn_mask(typed, config, 7)
    both = MaskFacts({}, True, frozenset({"create_causal_mask"}))
    with pytest.raises(LayerError, match="cannot tell which mask"):
        learn_mask(both, config, 0)
    with pytest.raises(LayerError, match="cannot tell which mask"):
        learn_mask(MaskFacts({}, False, frozenset()), config, 0)
    with pytest.raises(LayerError, match=r"needs config\.sliding_window, found None"):
        learn_mask(MaskFacts({}, False, frozenset({"create_sliding_window_causal_mask"})), config, 0)


def test_importing_the_plugin_does_not_import_torch():
    code = "import sys, atom_mha.plugin; sys.exit('torch' in sys.modules)"
    path = ":".join(sys.path)
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False).returncode == 0
