"""Which modules this plugin owns, and what it refuses about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_core.errors import LayerError
from atom_core.plugin import Claim
from atom_mimo.layer import FullLayer, Heads, WindowLayer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CLAIMED_CLASS", "claim_layer"]

CLAIMED_CLASS = "transformers.models.mimo_v2_flash.modeling_mimo_v2_flash.MiMoV2FlashAttention"
"""The full name, so that nothing of transformers is imported and a class of the same name elsewhere is foreign."""


def claim_layer(module: nn.Module, module_name: str, tp_size: int) -> Claim | None:
    """Claim a MiMo-V2 attention module.

    Everything is read from the module, not from `config.layer_types[layer_idx]`: `layer_idx` restarts at 0 in layers
    for multi-token prediction.

    Args:
        module: the candidate, of one rank's or of the whole model, perhaps on `meta`.
        module_name: its dotted name in the model.
        tp_size: ranks that share the heads.

    Raises:
        LayerError: the heads do not divide, or the mask is of an unknown kind.
    """
    if f"{type(module).__module__}.{type(module).__qualname__}" != CLAIMED_CLASS:
        return None
    original: Any = module
    where = f"{module_name} ({type(module).__name__}), claimed by plugin 'mimo' (atom-mimo),"
    heads = _heads(original, where, tp_size)
    if original.layer_type == "full_attention":
        return Claim(FullLayer(heads), exact=True)
    if original.layer_type != "sliding_attention":
        raise LayerError(
            f"{where} has layer type {original.layer_type!r}; known are 'full_attention' and 'sliding_attention'"
        )
    window = original.sliding_window
    if not isinstance(window, int) or window < 1:
        raise LayerError(f"{where} has sliding_window {window!r}, expected the number of keys that a query sees")
    return Claim(WindowLayer(heads, window), exact=True)


def _heads(module: Any, where: str, tp_size: int) -> Heads:
    """Heads of one rank; sliding-window layers have twice the key heads of `config.num_key_value_heads`."""
    num_heads = module.config.num_attention_heads
    num_kv_heads = module.config.num_key_value_heads * (2 if module.layer_type == "sliding_attention" else 1)
    if num_heads % num_kv_heads:
        raise LayerError(f"{where} has {num_heads} query heads, expected a multiple of its {num_kv_heads} key heads")
    if num_kv_heads % tp_size:
        raise LayerError(
            f"{where} has {num_heads} query heads and {num_kv_heads} key heads, which cannot be divided among "
            f"{tp_size} ranks; choose a tensor-parallel size that divides both"
        )
    return Heads(num_heads // tp_size, num_kv_heads // tp_size, module.head_dim, module.v_head_dim)
