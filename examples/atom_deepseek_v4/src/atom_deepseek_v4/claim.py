"""Which modules this plugin owns, and what it refuses about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_core.errors import LayerError
from atom_core.plugin import Claim
from atom_deepseek_v4.layer import HeavilyCompressedLayer, SparseLayer, WindowLayer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CLAIMED_CLASS", "claim_layer"]

CLAIMED_CLASS = "transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4Attention"
"""The full name, so that nothing of transformers is imported and a class of the same name elsewhere is foreign."""

_LAYERS: dict[str, type[WindowLayer]] = {
    "sliding_attention": WindowLayer,
    "compressed_sparse_attention": SparseLayer,
    "heavily_compressed_attention": HeavilyCompressedLayer,
}
_PROJECTIONS = frozenset({"q_a_proj", "q_a_norm", "q_b_proj", "q_b_norm", "kv_proj", "kv_norm", "o_a_proj", "o_b_proj"})
_COMPRESSOR = frozenset({"kv_proj", "gate_proj", "kv_norm", "rotary_emb"})
_INDEXER = _COMPRESSOR | {"q_b_proj", "scorer"}
_PARTS = {
    "sliding_attention": {"": _PROJECTIONS},
    "compressed_sparse_attention": {
        "": _PROJECTIONS | {"compressor"},
        "compressor": _COMPRESSOR | {"indexer"},
        "compressor.indexer": _INDEXER,
    },
    "heavily_compressed_attention": {"": _PROJECTIONS | {"compressor"}, "compressor": _COMPRESSOR},
}


def claim_layer(module: nn.Module, module_name: str) -> Claim | None:
    """Claim a DeepSeek-V4 attention module. Any number of ranks: transformers' plan leaves attention whole.

    Args:
        module: the candidate, perhaps on `meta`.
        module_name: its dotted name in the model.

    Raises:
        LayerError: the module is of an unknown kind, or lacks or has parts that its class is not known to.
    """
    if f"{type(module).__module__}.{type(module).__qualname__}" != CLAIMED_CLASS:
        return None
    original: Any = module
    where = f"{module_name} ({type(module).__name__}), claimed by plugin 'deepseek_v4' (atom-deepseek-v4),"
    layer_class = _LAYERS.get(original.layer_type)
    if layer_class is None:
        raise LayerError(f"{where} has layer type {original.layer_type!r}; known are {', '.join(_LAYERS)}")
    _check_parts(module, where, original.layer_type)
    if original.sliding_window < 1:
        raise LayerError(f"{where} has sliding_window {original.sliding_window}, expected at least 1")
    return Claim(layer_class(module), exact=True)


def _check_parts(module: nn.Module, where: str, layer_type: str) -> None:
    for path, expected in _PARTS[layer_type].items():
        part = module.get_submodule(path)
        found = {name for name, _ in part.named_children()}
        if found != expected:
            differing = ", ".join(f"{path}.{name}".strip(".") for name in sorted(found ^ expected))
            raise LayerError(
                f"{where} of layer type {layer_type} differs from what atom-deepseek-v4 was written for in: "
                f"{differing}; use a version of atom-deepseek-v4 made for this transformers"
            )
