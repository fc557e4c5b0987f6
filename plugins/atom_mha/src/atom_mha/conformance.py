"""What the conformance kit runs: tiny models whose masks, heads, caps and sinks differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from atom_core.testing import AttentionConformance, tiny
from atom_mha.plugin import MhaPlugin
from atom_mha.plugin import plugin as mha_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["TestMha"]


class TestMha(AttentionConformance):
    """The invariants, for grouped-query softmax attention."""

    plugin: ClassVar[MhaPlugin] = mha_plugin

    @classmethod
    def configs(cls) -> Mapping[str, PreTrainedConfig]:
        """A window and sinks, plain groups; then one key head, soft caps, chunks, and heads that fuse."""
        from transformers import (
            Gemma2Config,
            Gemma3TextConfig,
            GPT2Config,
            GptOssConfig,
            Llama4TextConfig,
            LlamaConfig,
            MistralConfig,
            Phi3Config,
        )

        alternating = ["sliding_attention", "full_attention"]
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return {
            "window-and-sinks": tiny(GptOssConfig, sliding_window=9, layer_types=alternating, **experts),
            "groups": tiny(LlamaConfig),
            "one-key-head": tiny(LlamaConfig, num_key_value_heads=1, tie_word_embeddings=True),
            "window": tiny(MistralConfig, sliding_window=8),
            "soft-cap": tiny(Gemma2Config, sliding_window=8, attn_logit_softcapping=3.0, query_pre_attn_scalar=8),
            "two-windows": tiny(Gemma3TextConfig, sliding_window=8, layer_types=alternating, query_pre_attn_scalar=8),
            "chunks": tiny(
                Llama4TextConfig,
                attention_chunk_size=16,
                layer_types=["chunked_attention", "full_attention"],
                intermediate_size_mlp=48,
                num_local_experts=4,
            ),
            "fused": tiny(Phi3Config),
            "no-groups-learned-positions": GPT2Config(
                vocab_size=97, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
            ),
        }
