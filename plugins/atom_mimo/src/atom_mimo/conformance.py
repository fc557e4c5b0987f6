"""What the conformance kit runs: tiny models of full and windowed layers in several orders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from atom_core.testing import AttentionConformance, tiny
from atom_mimo.plugin import MimoPlugin
from atom_mimo.plugin import plugin as mimo_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["TestMimo"]

_FULL, _WINDOW = "full_attention", "sliding_attention"


class TestMimo(AttentionConformance):
    """The invariants, for full attention in blocks and windows in rings."""

    plugin: ClassVar[MimoPlugin] = mimo_plugin
    needs = ("mha",)

    @classmethod
    def configs(cls) -> Mapping[str, PreTrainedConfig]:
        """Windows shorter and longer than prompts, and layers of one kind alone."""
        return {
            "hybrid": _config(),
            "all-windows": _config(layer_types=[_WINDOW] * 2, sliding_window=5),
            "wide-window": _config(sliding_window=40),
            "window-beyond-everything": _config(sliding_window=400),
            "window-2-one-key-head": _config(sliding_window=2, num_key_value_heads=1),
            "all-full": _config(layer_types=[_FULL] * 2),
            "not-periodic": _config(layer_types=[_WINDOW, _FULL, _FULL, _WINDOW], attention_value_scale=None),
        }


def _config(**changes: Any) -> PreTrainedConfig:
    from transformers import MiMoV2FlashConfig

    fields: dict[str, Any] = {
        "head_dim": 24,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "layer_types": [_FULL, _WINDOW],
        "initializer_range": 0.3,
        **changes,
    }
    return tiny(MiMoV2FlashConfig, num_hidden_layers=len(fields["layer_types"]), **fields)
