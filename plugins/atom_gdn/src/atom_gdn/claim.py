"""Which modules this plugin owns, and what it refuses about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_core.errors import LayerError
from atom_core.plugin import Claim
from atom_gdn.layer import (
    FusedProjectionLayer,
    GatedDeltaNetLayer,
    HeadShape,
    SeparateProjectionLayer,
    SplitProjectionLayer,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LAYER_CLASSES", "claim_layer"]

LAYER_CLASSES: dict[str, type[GatedDeltaNetLayer]] = {
    "transformers.models.lara_mini.modeling_lara_mini.LaraMiniGatedDeltaNet": SplitProjectionLayer,
    "transformers.models.olmo_hybrid.modeling_olmo_hybrid.OlmoHybridGatedDeltaNet": SeparateProjectionLayer,
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet": SplitProjectionLayer,
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet": SplitProjectionLayer,
    "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet": FusedProjectionLayer,
}
"""By full class name, so that nothing of transformers is imported and a class of the same name elsewhere is foreign."""


def claim_layer(module: nn.Module, module_name: str, tp_size: int) -> Claim | None:
    """Claim a module of the classes above.

    Args:
        module: the candidate, of one rank's or of the whole model.
        module_name: dotted name in the model.
        tp_size: ranks that share the heads.

    Raises:
        LayerError: the heads do not divide, the activation is not SiLU, or the convolution has a bias.
    """
    layer_class = LAYER_CLASSES.get(f"{type(module).__module__}.{type(module).__qualname__}")
    if layer_class is None:
        return None
    original: Any = module
    k_heads, v_heads, taps = original.num_k_heads, original.num_v_heads, original.conv_kernel_size
    where = f"{module_name} ({type(module).__name__}), claimed by plugin 'gdn' (atom-gdn),"
    if k_heads % tp_size or v_heads % tp_size:
        raise LayerError(
            f"{where} has {k_heads} key heads and {v_heads} value heads, which tensor parallel size {tp_size} does "
            "not divide; choose a size that divides both"
        )
    if v_heads % k_heads:
        raise LayerError(f"{where} has {v_heads} value heads, expected a multiple of its {k_heads} key heads")
    if original.activation not in ("silu", "swish"):
        raise LayerError(f"{where} has activation {original.activation!r} after its convolution, expected 'silu'")
    if original.conv1d.bias is not None:
        raise LayerError(f"{where} has a convolution with a bias, which the ops gdn.* do not add")
    if taps < 2:
        raise LayerError(f"{where} has a convolution over {taps} tokens, expected at least 2")
    shape = HeadShape(k_heads // tp_size, v_heads // tp_size, original.head_k_dim, original.head_v_dim, taps)
    return Claim(layer_class(module, shape), exact=True)
