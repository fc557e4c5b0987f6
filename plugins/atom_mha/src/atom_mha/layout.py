"""The cache layout: keys and values per token, heads next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from atom_core.plugin import TensorSpec

if TYPE_CHECKING:
    import torch

    from atom_mha.layer import MhaLayer

__all__ = ["paged_layout"]


def paged_layout(layers: Sequence[MhaLayer], block_size: int, cache_dtype: torch.dtype) -> list[TensorSpec]:
    """Declare `k_cache` and `v_cache`, one spec each per distinct shape.

    A block is `[block_size, num_kv_heads, dim]`: token `slot = block * block_size + offset` is row `slot` of the
    cache seen as `[slots, num_kv_heads, dim]`, so that writing and gathering tokens are one indexed copy.

    Args:
        layers: the plugin's layers.
        block_size: tokens per block.
        cache_dtype: element type.
    """
    return [
        TensorSpec(field, (block_size, num_kv_heads, dim), cache_dtype, tuple(names))
        for field, num_kv_heads, dim, names in _groups(layers)
    ]


def _groups(layers: Sequence[MhaLayer]) -> Iterator[tuple[str, int, int, list[str]]]:
    for field in ("k_cache", "v_cache"):
        groups: dict[tuple[int, int], list[str]] = {}
        for layer in layers:
            dim = layer.heads.head_dim if field == "k_cache" else layer.heads.v_head_dim
            groups.setdefault((layer.heads.num_kv_heads, dim), []).append(layer.module_name)
        for (num_kv_heads, dim), names in groups.items():
            yield field, num_kv_heads, dim, names
