"""What the conformance kit runs: tiny hybrids, and models in which every layer is linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from atom_core.testing import AttentionConformance, lively_model, tiny
from atom_gdn.plugin import GdnPlugin
from atom_gdn.plugin import plugin as gdn_plugin

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

__all__ = ["TestGdn"]

_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_DENSE = {name: value for name, value in _LINEAR.items() if name.startswith("linear")}


class TestGdn(AttentionConformance):
    """The invariants, for gated delta nets."""

    plugin: ClassVar[GdnPlugin] = gdn_plugin
    needs = ("mha",)

    @classmethod
    def configs(cls) -> Mapping[str, PreTrainedConfig]:
        """Hybrids, all linear, and a convolution of another length."""
        from transformers import Qwen3_5TextConfig, Qwen3NextConfig

        hybrid = ["linear_attention", "full_attention"]
        linear = ["linear_attention"] * 2
        other = {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}
        return {
            "hybrid": tiny(Qwen3NextConfig, **_LINEAR, layer_types=hybrid),
            "all-linear": tiny(Qwen3_5TextConfig, **_DENSE, layer_types=linear),
            "not-periodic": tiny(
                Qwen3_5TextConfig, **_DENSE, layer_types=[*hybrid, *linear, *hybrid], num_hidden_layers=6
            ),
            "short-convolution": tiny(Qwen3NextConfig, **{**_LINEAR, **other}, layer_types=linear),
        }

    @torch.no_grad()
    def make_model(self, config: PreTrainedConfig) -> nn.Module:
        """Decays from quick to slow; the gated norm blows up rounding near zero, so its share is kept small."""
        model = lively_model(config)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 2, generator=generator)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3, 1, generator=generator)
            elif name.endswith("out_proj.weight"):
                parameter.mul_(0.3)
        return model
