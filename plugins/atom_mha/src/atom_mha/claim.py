"""Claims: which modules become MhaLayers, and which are refused with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_core.errors import LayerError
from atom_core.plugin import Claim
from atom_mha.forward_facts import ForwardFacts, read_forward
from atom_mha.heads import learn_heads
from atom_mha.layer import MhaLayer, PositionScale
from atom_mha.mask_facts import learn_mask, read_masks

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

__all__ = ["claim"]

_LATENT_PREFIXES = ("kv_a_", "kv_b_")
_POSITION_SCALED = frozenset({"Llama4TextAttention"})
"""Classes that scale queries by positions counted within the batch; the layer corrects them (`PositionScale`)."""


def claim(module: nn.Module, module_name: str, model_config: PreTrainedConfig, tp_size: int) -> Claim | None:
    """Claim causal self attention that calls transformers' attention interface.

    Args:
        module: the candidate, perhaps on `meta`.
        module_name: its dotted name.
        model_config: the model's config.
        tp_size: ranks that share the model.

    Returns:
        A claim, generic but for the classes named in this file, or `None` for a foreign module.

    Raises:
        LayerError: the module is causal self attention with something that `MhaLayer` cannot express.
    """
    attention_class: Any = type(module)
    facts = read_forward(attention_class)
    if facts is None or _is_foreign(module, facts):
        return None
    try:
        heads = learn_heads(module, module_name, model_config, tp_size)
        if heads is None:
            return None
        position_scale = _position_scale(module)
        if facts.deviations and type(module).__name__ not in _POSITION_SCALED:
            raise LayerError("; ".join(facts.deviations))
        layer_idx = getattr(module, "layer_idx", None)
        config = getattr(module, "config", model_config)
        mask = learn_mask(read_masks(type(module).__module__), config, layer_idx)
    except LayerError as error:
        raise LayerError(f"atom-mha cannot run {module_name!r} ({type(module).__name__}): {error}") from error
    layer = MhaLayer(heads=heads, mask=mask, position_scale=position_scale)
    return Claim(layer, exact=type(module).__name__ in _POSITION_SCALED)


def _is_foreign(module: nn.Module, facts: ForwardFacts) -> bool:
    """Vision, cross, bidirectional and latent attention are not this plugin's."""
    if facts.foreign or not getattr(module, "is_causal", True):
        return True
    if facts.cross_capable and getattr(module, "is_cross_attention", True):
        return True
    return any(name.startswith(_LATENT_PREFIXES) for name in module._modules)


def _position_scale(module: Any) -> PositionScale | None:
    if type(module).__name__ not in _POSITION_SCALED or module.use_rope or not module.attn_temperature_tuning:
        return None
    return PositionScale(floor_scale=module.floor_scale, attn_scale=module.attn_scale)
