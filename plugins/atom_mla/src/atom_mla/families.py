"""The known classes of latent attention: how each one's forward differs, and how its heads are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["FAMILIES", "REFUSED", "Family", "Gate", "Rotary", "tensor_parallel_plan"]


class Rotary(Enum):
    """How a class rotates; but for `COMPLEX`, the function is its own modeling module's."""

    COMPLEX = auto()
    """As `apply_rotary_emb`: one complex tensor, which turns neighbouring pairs."""
    INTERLEAVED = auto()
    """`apply_rotary_pos_emb_interleave`, neighbouring pairs."""
    HALF = auto()
    """`apply_rotary_pos_emb`, first half with second half."""
    CONFIG = auto()
    """`INTERLEAVED` or `HALF` by `config.rope_interleave`."""
    NONE = auto()
    """No positions."""


class Gate(Enum):
    """What multiplies the attention output."""

    NONE = auto()
    HEAD = auto()
    """`sigmoid(g_proj(hidden))`, one factor per head."""
    QUERY = auto()
    """The gate half of `q_gate_proj`, which also makes the queries."""


@dataclass(frozen=True)
class Family:
    """What is particular to one class.

    Attributes:
        rotary: rotation of queries and keys.
        gate: gate on the output.
        lora_scales: queries and latents are multiplied by `mla_scale_q_lora` and `mla_scale_kv_lora`.
        position_scale: queries are multiplied by `get_llama_4_attn_scale(position_ids, ...)`.
        index_rotary: rotation in the indexer; `None` for a dense class.
        returns_selection: the forward takes `prev_topk_indices` and returns its selection as a third value; a
            layer without an indexer then uses the selection of the layer before.
        shares_names: other mixers of the model have the same module names, so no sharding plan can tell them apart.
    """

    rotary: Rotary
    gate: Gate = Gate.NONE
    lora_scales: bool = False
    position_scale: bool = False
    index_rotary: Rotary | None = None
    returns_selection: bool = False
    shares_names: bool = False


FAMILIES: Mapping[tuple[str, str], Family] = {
    ("axk1", "AXK1Attention"): Family(Rotary.CONFIG),
    ("axk2", "AXK2Attention"): Family(Rotary.INTERLEAVED, gate=Gate.QUERY, index_rotary=Rotary.HALF),
    ("bailing_hybrid", "BailingHybridAttention"): Family(Rotary.INTERLEAVED, gate=Gate.HEAD, shares_names=True),
    ("deepseek_v2", "DeepseekV2Attention"): Family(Rotary.COMPLEX),
    ("deepseek_v3", "DeepseekV3Attention"): Family(Rotary.CONFIG),
    ("deepseek_v32", "DeepseekV32Attention"): Family(Rotary.INTERLEAVED, index_rotary=Rotary.HALF),
    ("glm4_moe_lite", "Glm4MoeLiteAttention"): Family(Rotary.CONFIG),
    ("glm_moe_dsa", "GlmMoeDsaAttention"): Family(
        Rotary.INTERLEAVED, index_rotary=Rotary.INTERLEAVED, returns_selection=True
    ),
    ("kimi_linear", "KimiLinearAttention"): Family(Rotary.NONE, shares_names=True),
    ("longcat_flash", "LongcatFlashMLA"): Family(Rotary.INTERLEAVED, lora_scales=True),
    ("minicpm3", "MiniCPM3Attention"): Family(Rotary.HALF),
    ("mistral4", "Mistral4Attention"): Family(Rotary.CONFIG, position_scale=True),
    ("youtu", "YoutuAttention"): Family(Rotary.CONFIG),
}
"""By the folder below `transformers.models` and the class whose forward runs."""

REFUSED: Mapping[tuple[str, str], str] = {
    ("dots3_note", "Dots3NoteTextAttention"): "its layers mix sliding windows and indexers over latents",
    ("glm5_next", "Glm5NextTextAttention"): "its indexer pools keys over several tokens",
    ("hy_v4", "HYV4Attention"): "it has attention sinks and an indexer of its own kind",
    ("hy_v4_vl", "HYV4VLAttention"): "it has attention sinks and an indexer of its own kind",
    ("mistral_large4", "MistralLarge4TextAttention"): "its layers share one another's latents",
}
"""Latent attention that this plugin knows and cannot run, and why."""


def tensor_parallel_plan(model_config: PreTrainedConfig, tp_size: int) -> dict[str, Any]:
    """Shard the projections that have a head dimension; nothing for other models or a single rank.

    Args:
        model_config: the model's config.
        tp_size: ranks.

    Returns:
        transformers' styles by module pattern. The latent's own projection keeps the model's style, if it has
        one, and the indexer is whole on every rank, so that all ranks select the same tokens.
    """
    families = {folder: family for (folder, _), family in FAMILIES.items()}
    family = families.get(model_config.model_type)
    if tp_size == 1 or family is None or family.shares_names:
        return {}
    attention = "model.layers.*.self_attn" + (".*" if model_config.model_type == "longcat_flash" else "")
    query = "q_b_proj" if model_config.q_lora_rank is not None else "q_proj"
    sharded = "q_gate_proj" if family.gate is Gate.QUERY else query
    return {
        f"{attention}.{sharded}": "colwise",
        f"{attention}.kv_b_proj": "colwise",
        f"{attention}.o_proj": "rowwise",
    }
