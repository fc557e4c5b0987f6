"""Tiny models with lively random weights: gates, norms and decays differ between heads and channels."""

from __future__ import annotations

import torch

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def tiny_config(model_type: str, **changes):
    """A config of the model type, four layers unless changed, every fourth with softmax attention."""
    from transformers import AutoConfig

    fields = TINY | (EXPERTS if model_type in ("qwen3_next", "qwen3_5_moe_text", "lara_mini") else {}) | changes
    if "layer_types" in fields:
        fields["num_hidden_layers"] = len(fields["layer_types"])
    return AutoConfig.for_model(model_type, **fields)


def lively_model(config, seed: int = 0) -> torch.nn.Module:
    """A float32 model of the config whose weights are neither tiny nor constant."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 2)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3, 1)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                # The gated norm blows up the rounding of outputs near zero; keep its share of the residual small.
                share = 0.4 if name.endswith("out_proj.weight") else 1.0
                parameter.normal_(0, share * parameter.shape[-1] ** -0.5)
    return model
