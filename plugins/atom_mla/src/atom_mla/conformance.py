"""What the conformance kit runs: tiny models of the latent families, dense and sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from atom_core.testing import AttentionConformance, tiny
from atom_mla.plugin import MlaPlugin
from atom_mla.plugin import plugin as mla_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["TestMla"]

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_SPARSE: dict[str, Any] = {"index_topk": 24, "index_n_heads": 16, "index_head_dim": 12}


class TestMla(AttentionConformance):
    """The invariants, for latent attention."""

    plugin: ClassVar[MlaPlugin] = mla_plugin

    @classmethod
    def configs(cls) -> Mapping[str, PreTrainedConfig]:
        """A sparse family and a dense one; then without compressed queries, one head, and shared indices."""
        from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig

        one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}
        return {
            "v32": tiny(DeepseekV32Config, **_LATENT, **_SPARSE),
            "v3": tiny(DeepseekV3Config, **_LATENT),
            "v2-no-q-lora": tiny(DeepseekV2Config, **{**_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
            "v3-one-head": tiny(DeepseekV3Config, **{**_LATENT, **one_head}),
            "glm-shared-indices": tiny(
                GlmMoeDsaConfig,
                **{**_LATENT, **_SPARSE, "num_hidden_layers": 4},
                indexer_types=["full", "shared", "shared", "full"],
            ),
        }
