"""What the conformance kit runs: tiny models of every pattern of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from atom_core.testing import AttentionConformance, lively_model, tiny
from atom_deepseek_v4.plugin import DeepseekV4Plugin
from atom_deepseek_v4.plugin import plugin as v4_plugin

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

__all__ = ["TestDeepseekV4"]

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


class TestDeepseekV4(AttentionConformance):
    """The invariants, for windows, compressed sparse layers and heavily compressed ones."""

    plugin: ClassVar[DeepseekV4Plugin] = v4_plugin
    max_tokens = 72

    @classmethod
    def configs(cls) -> Mapping[str, PreTrainedConfig]:
        """All kinds of layers with small ratios, so that short texts cross every boundary; then each alone."""
        return {
            "all-kinds": _config([_WINDOW, _SPARSE, _HEAVY]),
            "odd-ratios": _config([_SPARSE, _HEAVY], compress_rates={_SPARSE: 3, _HEAVY: 6}),
            "windows": _config([_WINDOW] * 2),
            "sparse": _config([_SPARSE] * 2),
            "heavy": _config([_HEAVY] * 2),
            "window-2": _config([_SPARSE, _WINDOW], sliding_window=2),
            "selects-all": _config([_SPARSE, _HEAVY], index_topk=512),
        }

    @torch.no_grad()
    def make_model(self, config: PreTrainedConfig) -> nn.Module:
        """Sinks and position biases as large as scores, and experts by token that differ."""
        model = lively_model(config)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith(("position_bias", "sinks")):
                parameter.normal_(generator=generator)
            elif "_hc." in name or "hc_head" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                picks = torch.rand(len(buffer), config.n_routed_experts, generator=generator).argsort(-1)
                buffer.copy_(picks[:, : buffer.shape[1]])
        return model


def _config(layer_types: list[str], **changes: Any) -> PreTrainedConfig:
    from transformers import DeepseekV4Config

    fields: dict[str, Any] = {
        "moe_intermediate_size": 16,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "compress_rates": {_SPARSE: 4, _HEAVY: 16},
        "sliding_window": 9,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 3,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 5,
        **changes,
    }
    mlps = ["hash_moe"] + ["moe"] * (len(layer_types) - 1)
    return tiny(
        DeepseekV4Config,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        mlp_layer_types=mlps,
        num_key_value_heads=1,
        **fields,
    )
