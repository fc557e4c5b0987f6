"""The cache layout: rings per request, compressed entries in blocks, and the scratch memory of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from atom_core.plugin import CacheRequirements, TensorSpec
from atom_deepseek_v4.kernels.reference import SCRATCH_BYTES
from atom_deepseek_v4.layer import SparseLayer, WindowLayer

if TYPE_CHECKING:
    import torch

__all__ = ["paged_specs", "requirements", "state_specs"]

_FLOAT = 4


def paged_specs(layers: Sequence[WindowLayer], block_size: int, cache_dtype: torch.dtype) -> list[TensorSpec]:
    """Declare `compressed` and `index_keys`: one row per compression window, `block_size / ratio` in a block.

    Args:
        layers: the plugin's layers.
        block_size: tokens per block, a multiple of every ratio.
        cache_dtype: element type.
    """
    shapes: list[tuple[str, tuple[int, ...], torch.dtype, str]] = []
    for layer in layers:
        for part in layer.compressions():
            shape = (block_size // part.ratio, part.dim)
            shapes.append((part.entries_field, shape, cache_dtype, layer.module_name))
    return _specs(shapes)


def state_specs(layers: Sequence[WindowLayer], cache_dtype: torch.dtype, num_spec_tokens: int) -> list[TensorSpec]:
    """Declare the rings; the row of position p is p modulo the rows.

    A step at position p writes up to p + num_spec_tokens, and the next starts at p + 1 or later, so a ring that must
    hold the last n tokens has n + num_spec_tokens rows: then rejected drafts displace nothing that is still needed.

    Args:
        layers: the plugin's layers.
        cache_dtype: element type of the window; the compressors' rings hold what their projections gave, unrounded.
        num_spec_tokens: most draft tokens of a request and step.
    """
    shapes: list[tuple[str, tuple[int, ...], torch.dtype, str]] = []
    for layer in layers:
        rows = layer.window + num_spec_tokens
        shapes.append(("window_ring", (rows, layer.head_dim), cache_dtype, layer.module_name))
        for part in layer.compressions():
            shape = (part.num_source_tokens + num_spec_tokens, 2, part.width)
            shapes.append((part.ring_field, shape, part.dtype, layer.module_name))
    return _specs(shapes)


def requirements(layers: Sequence[WindowLayer], max_num_batched_tokens: int, max_model_len: int) -> CacheRequirements:
    """Blocks of whole compression windows, so that an entry belongs to one block; scratch memory.

    Args:
        layers: the plugin's layers.
        max_num_batched_tokens: most tokens of a step.
        max_model_len: most tokens of a request.
    """
    ratios = [layer.ratio for layer in layers if layer.ratio is not None]
    scratch = max((_scratch_bytes(layer, max_num_batched_tokens, max_model_len) for layer in layers), default=0)
    return CacheRequirements(block_size_multiple=math.lcm(*ratios), workspace_bytes=scratch)


def _scratch_bytes(layer: WindowLayer, max_num_batched_tokens: int, max_model_len: int) -> int:
    """What the references have in work at a time: pooling, selecting or attending, in float32.

    Pooling holds the sources of all windows that a step closes, several times over. Selecting and attending hold a
    row's keys, and a tile of queries: scores thrice, and entries where each query has its own. A sparse layer also
    keeps the selection.
    """
    num_keys, num_entries = layer.window + max_num_batched_tokens, 0
    selected = pooling = selecting = 0
    for part in layer.compressions():
        num_entries = max_model_len // part.ratio
        closed = max_num_batched_tokens // part.ratio + 1
        pooling = max(pooling, closed * part.num_source_tokens * 2 * part.width * 5 * _FLOAT)
    keys = (num_keys + num_entries) * layer.head_dim
    if isinstance(layer, SparseLayer):
        index_keys = num_entries * layer.index_dim
        selecting = _tiled_bytes(index_keys, 3 * layer.num_index_heads * num_entries)
        num_entries = min(layer.top_k, num_entries)
        keys = num_keys * layer.head_dim
        selected = num_entries * layer.head_dim
    attending = _tiled_bytes(keys, 3 * layer.num_heads * (num_keys + num_entries) + selected)
    return max(pooling, selecting, attending) + layer.selection_bytes(max_num_batched_tokens)


def _tiled_bytes(shared_elements: int, token_elements: int) -> int:
    """Bytes of what all queries share, and of a tile of queries, which has one at least."""
    return shared_elements * _FLOAT + max(SCRATCH_BYTES, token_elements * _FLOAT)


def _specs(shapes: Iterable[tuple[str, tuple[int, ...], torch.dtype, str]]) -> list[TensorSpec]:
    """One spec per field, shape and dtype, over all layers that have it."""
    names: dict[tuple[str, tuple[int, ...], torch.dtype], list[str]] = {}
    for field, shape, dtype, name in shapes:
        names.setdefault((field, shape, dtype), []).append(name)
    return [TensorSpec(field, shape, dtype, tuple(found)) for (field, shape, dtype), found in names.items()]
