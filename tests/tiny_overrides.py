"""What the rules of `tiny_models.py` cannot know: fields of single model types."""

from __future__ import annotations

from typing import Any

__all__ = ["OVERRIDES"]

_ROTARY_PART = {"head_dim": 8}  # of latent attention, as large as qk_rope_head_dim
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_MAMBA_AND_ATTENTION = ["mamba", "attention", "mamba", "attention"]

OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": _ROTARY_PART,
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _MROPE, "sliding_attention": _MROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "deepseek_v3": _ROTARY_PART,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32},
        **{"qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16, "head_dim": 8, "sliding_window": 8},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
        **{"swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _MAMBA_AND_ATTENTION},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "llama4_text": {"attention_chunk_size": 16},
    "longcat_flash": _ROTARY_PART,
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {"vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        **{"indexer_compress_ratio": 4, "hc_lowrank": 16},
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh", "local", "lsh"]},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "youtu": _ROTARY_PART,
    "zamba": {"attention_hidden_size": 128},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}
