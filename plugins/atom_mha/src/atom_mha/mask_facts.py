"""MaskFacts: which mask a modeling file builds for which layer, read from its source.

The attention module does not know its mask: the model's forward builds one per layer type, or one for all. Files
of transformers do this in three ways, and anything else is refused:

1. a dictionary from layer type to mask, indexed by `config.layer_types[layer_idx]`;
2. `create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask`, for all layers;
3. one kind of mask for all layers.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from atom_core.errors import LayerError
from atom_mha.mask import Mask

__all__ = ["MaskFacts", "learn_mask", "read_masks"]

_CAUSAL = "create_causal_mask"
_WINDOW = "create_sliding_window_causal_mask"
_CHUNK = "create_chunked_causal_mask"
_CREATORS = frozenset({_CAUSAL, _WINDOW, _CHUNK})


@dataclass(frozen=True)
class MaskFacts:
    """What a modeling file builds.

    Attributes:
        by_layer_type: layer type to the functions that build its mask.
        by_window: a window for all layers where the config has one, else causal.
        for_all: functions called outside both patterns.
    """

    by_layer_type: dict[str, frozenset[str]]
    by_window: bool
    for_all: frozenset[str]

    @property
    def only_causal(self) -> bool:
        """Whether the file builds plain causal masks and no others, so that layer types do not matter."""
        return not self.by_window and self.for_all.union(*self.by_layer_type.values()) == {_CAUSAL}


@cache
def read_masks(module_name: str) -> MaskFacts:
    """Read an imported modeling file.

    Args:
        module_name: its Python module.

    Raises:
        LayerError: the source cannot be read.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    except (OSError, KeyError, SyntaxError) as error:
        raise LayerError(f"cannot read the source of {module_name} to learn which masks it builds: {error}") from error
    by_type: dict[str, set[str]] = {}
    used: set[ast.Name] = set()
    for layer_type, value in _typed_masks(tree):
        found = [node for node in _creator_names(value) if node.id in _CREATORS]
        used.update(found)
        if found:
            by_type.setdefault(layer_type, set()).update(node.id for node in found)
    by_window = False
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and ast.unparse(node.test).endswith(".sliding_window is None"):
            chosen = ast.unparse(node.body), ast.unparse(node.orelse)
            if chosen == (_CAUSAL, _WINDOW):
                by_window = True
                used.update(_creator_names(node))
    for_all = {node.id for node in _creator_names(tree) if node not in used}
    return MaskFacts({key: frozenset(value) for key, value in by_type.items()}, by_window, frozenset(for_all))


def _typed_masks(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Entries `"type": mask` of dictionaries, and assignments `masks["type"] = mask`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            index = node.targets[0].slice
            if isinstance(index, ast.Constant) and isinstance(index.value, str):
                yield index.value, node.value


def _creator_names(tree: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in _CREATORS)


def learn_mask(facts: MaskFacts, config: Any, layer_idx: int | None) -> Mask:
    """Choose the mask that the model's forward hands to a layer.

    Args:
        facts: of the layer's modeling file.
        config: the config that the model gives to transformers' mask functions.
        layer_idx: the layer's index, where it has one.

    Raises:
        LayerError: the kind of mask is unknown or cannot be told.
    """
    if not getattr(config, "is_causal", True):
        raise LayerError("the config sets is_causal=False: attention runs in both directions")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise LayerError("the config sets use_bidirectional_attention: attention runs in both directions")
    if facts.only_causal:
        return Mask()
    ways = sum((bool(facts.by_layer_type), facts.by_window, bool(facts.for_all)))
    if facts.by_layer_type and not facts.by_window:
        return _mask_of_layer_type(facts, config, layer_idx)
    if ways != 1:
        raise LayerError(f"cannot tell which mask its model builds for it; found {facts}")
    if facts.by_window:
        return Mask(window=getattr(config, "sliding_window", None))
    return _mask_of(facts.for_all, config)


def _mask_of_layer_type(facts: MaskFacts, config: Any, layer_idx: int | None) -> Mask:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or layer_idx is None or not 0 <= layer_idx < len(layer_types):
        raise LayerError(f"its model masks by layer type, but layer {layer_idx} has none in config.layer_types")
    layer_type = layer_types[layer_idx]
    creators = facts.by_layer_type.get(layer_type)
    if creators is None:
        known = ", ".join(sorted(facts.by_layer_type))
        raise LayerError(f"no mask is known for layer type {layer_type!r}; known: {known}")
    return _mask_of(creators, config)


def _mask_of(creators: frozenset[str], config: Any) -> Mask:
    if creators == {_CAUSAL}:
        return Mask()
    if creators == {_WINDOW}:
        return Mask(window=_limit(config, "sliding_window"))
    if creators == {_CHUNK}:
        return Mask(chunk=_limit(config, "attention_chunk_size"))
    raise LayerError(f"cannot tell which mask its model builds for it; found {', '.join(sorted(creators)) or 'none'}")


def _limit(config: Any, name: str) -> int:
    limit = getattr(config, name, None)
    if not isinstance(limit, int) or limit < 1:
        raise LayerError(f"its mask needs config.{name}, found {limit!r}")
    return limit
