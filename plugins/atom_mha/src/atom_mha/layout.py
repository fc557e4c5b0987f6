"""The cache layout: keys and values per token, heads next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from atom_core.plugin import TensorSpec
from atom_mha.kernels.float8 import COPY_BYTES, COPY_ROWS, copy_bytes

if TYPE_CHECKING:
    from atom_mha.layer import MhaLayer

__all__ = ["paged_layout", "workspace_bytes"]

_SPLIT_PROGRAMS = 2048
"""Most programs that long rows of a decode step are cut into: eight for each multiprocessor of the largest GPUs."""


def paged_layout(layers: Sequence[MhaLayer], block_size: int, cache_dtype: torch.dtype) -> list[TensorSpec]:
    """Declare `k_cache` and `v_cache`, one spec each per distinct shape, and scales beside a float8 cache.

    A block is `[block_size, num_kv_heads, dim]`: token `slot = block * block_size + offset` is row `slot` of the
    cache seen as `[slots, num_kv_heads, dim]`, so that writing and gathering tokens are one indexed copy.

    Args:
        layers: the plugin's layers.
        block_size: tokens per block.
        cache_dtype: element type.
    """
    specs = [
        TensorSpec(field, (block_size, num_kv_heads, dim), cache_dtype, tuple(names))
        for field, num_kv_heads, dim, names in _groups(layers)
    ]
    if cache_dtype.itemsize == 1:
        by_heads: dict[int, list[str]] = {}
        for layer in layers:
            by_heads.setdefault(layer.heads.num_kv_heads, []).append(layer.module_name)
        specs += [
            TensorSpec(field, (num_kv_heads, block_size), torch.float32, tuple(names))
            for field in ("k_scale", "v_scale")
            for num_kv_heads, names in by_heads.items()
        ]
    return specs


def workspace_bytes(
    layers: Sequence[MhaLayer],
    cache_dtype: torch.dtype,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_spec_tokens: int,
) -> int:
    """Bytes of the largest scratch of an op; ops and layers run in turn.

    These are the parts, in float32, that a decode step's programs leave for each other, or the keys and values of a
    float8 cache that chunks over a prefix have as numbers of 16 bit.

    Args:
        layers: the plugin's layers.
        cache_dtype: dtype of the cache.
        max_num_batched_tokens: most tokens of a step.
        max_model_len: most tokens of a row.
        num_spec_tokens: most draft tokens of a row.
    """
    scratch = [_parts_bytes(layer, max_num_batched_tokens, num_spec_tokens) for layer in layers]
    if cache_dtype.itemsize == 1:
        scratch += [_copy_bytes(layer, max_model_len) for layer in layers]
    return max(scratch, default=0)


def _copy_bytes(layer: MhaLayer, max_model_len: int) -> int:
    heads = layer.heads
    row_bytes = heads.num_kv_heads * copy_bytes(max_model_len, heads.head_dim, heads.v_head_dim)
    return min(COPY_BYTES, COPY_ROWS * row_bytes)


def _parts_bytes(layer: MhaLayer, max_num_batched_tokens: int, num_spec_tokens: int) -> int:
    """A program's part has the query heads of one key head, of all tokens of a row: `v_head_dim` sums and a weight."""
    heads = layer.heads
    tokens = max_num_batched_tokens + -(-_SPLIT_PROGRAMS // heads.num_kv_heads) * (1 + num_spec_tokens)
    return tokens * heads.num_heads * (heads.v_head_dim + 1) * 4


def _groups(layers: Sequence[MhaLayer]) -> Iterator[tuple[str, int, int, list[str]]]:
    for field in ("k_cache", "v_cache"):
        groups: dict[tuple[int, int], list[str]] = {}
        for layer in layers:
            dim = layer.heads.head_dim if field == "k_cache" else layer.heads.v_head_dim
            groups.setdefault((layer.heads.num_kv_heads, dim), []).append(layer.module_name)
        for (num_kv_heads, dim), names in groups.items():
            yield field, num_kv_heads, dim, names
