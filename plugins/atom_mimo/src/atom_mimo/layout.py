"""The cache layout: blocks of full layers, rings of sliding-window layers, and the scratch memory of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from atom_core.plugin import TensorSpec
from atom_mimo.kernels.torch_cpu import SCRATCH_BYTES
from atom_mimo.layer import FullLayer, MimoLayer, WindowLayer

Layer = TypeVar("Layer", bound=MimoLayer)

__all__ = ["paged_specs", "ring_specs", "workspace_bytes"]


def paged_specs(layers: Sequence[MimoLayer], block_size: int, cache_dtype: torch.dtype) -> list[TensorSpec]:
    """Declare `k_cache` and `v_cache` of the full layers, and scales of float8 ones, as the ops `mha.*` expect them.

    Args:
        layers: the plugin's layers.
        block_size: tokens per block.
        cache_dtype: element type.
    """
    specs = []
    for layer, names in _alike([layer for layer in layers if isinstance(layer, FullLayer)]):
        heads = layer.heads
        specs.append(TensorSpec("k_cache", (block_size, heads.num_kv_heads, heads.head_dim), cache_dtype, names))
        specs.append(TensorSpec("v_cache", (block_size, heads.num_kv_heads, heads.v_head_dim), cache_dtype, names))
        if cache_dtype.itemsize == 1:
            scales = (heads.num_kv_heads, block_size)
            specs += [TensorSpec(field, scales, torch.float32, names) for field in ("k_scale", "v_scale")]
    return specs


def ring_specs(layers: Sequence[MimoLayer], cache_dtype: torch.dtype, num_spec_tokens: int) -> list[TensorSpec]:
    """Declare `ring_k` and `ring_v` of the sliding-window layers: `window + num_spec_tokens` rows per request.

    The row of position p is p modulo the rows. A verify step at position p writes up to p + num_spec_tokens, and so
    destroys nothing younger than p - window, whatever is rejected afterwards.

    Args:
        layers: the plugin's layers.
        cache_dtype: element type.
        num_spec_tokens: most draft tokens of a request and step.
    """
    specs = []
    for layer, names in _alike([layer for layer in layers if isinstance(layer, WindowLayer)]):
        rows, heads = layer.window + num_spec_tokens, layer.heads
        specs.append(TensorSpec("ring_k", (rows, heads.num_kv_heads, heads.head_dim), cache_dtype, names))
        specs.append(TensorSpec("ring_v", (rows, heads.num_kv_heads, heads.v_head_dim), cache_dtype, names))
    return specs


def workspace_bytes(layers: Sequence[MimoLayer], max_num_batched_tokens: int) -> int:
    """Scratch bytes of the widest sliding-window layer in the largest step; layers run one after another.

    A chunk's keys and values in float32, those of its ring before them, and what is in work at a time.
    """
    windows = [layer for layer in layers if isinstance(layer, WindowLayer)]
    widest = max((layer.heads.row_elements * (max_num_batched_tokens + layer.window) for layer in windows), default=0)
    return widest * 4 + SCRATCH_BYTES if windows else 0


def _alike(layers: Sequence[Layer]) -> list[tuple[Layer, tuple[str, ...]]]:
    """Group layers of equal shape: one of them, and the names of all."""
    groups: dict[object, list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.heads, layer.window), []).append(layer)
    return [(group[0], tuple(layer.module_name for layer in group)) for group in groups.values()]
