"""The cache: shapes and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atom_core.plugin import CacheRequirements, TensorSpec
from atom_mla.kernels.torch_cpu import SCRATCH_BYTES
from atom_mla.layer import LatentLayer

if TYPE_CHECKING:
    import torch

    from atom_core.plugin import AttentionLayer

__all__ = ["paged_layout", "requirements"]


def paged_layout(layers: Sequence[AttentionLayer], block_size: int, cache_dtype: torch.dtype) -> list[TensorSpec]:
    """Declare the paged tensors, one spec per field and width.

    `latent_cache` holds, per token, `kv_lora_rank` values of the normalized latent, then `qk_rope_head_dim` of the
    rotated key that all heads share; `index_cache` holds `index_head_dim` values of the indexer's rotated key, in
    layers that have an indexer of their own. Every rank holds all of it.

    Args:
        layers: the plugin's layers.
        block_size: tokens per block.
        cache_dtype: dtype of both tensors.
    """
    widths: dict[tuple[str, int], list[str]] = {}
    for layer in layers:
        assert isinstance(layer, LatentLayer), f"foreign layer {type(layer).__name__} in the latent layout"
        for field, width in layer.cache_widths().items():
            widths.setdefault((field, width), []).append(layer.module_name)
    return [
        TensorSpec(field, (block_size, width), cache_dtype, tuple(names)) for (field, width), names in widths.items()
    ]


def requirements(layers: Sequence[AttentionLayer], max_num_batched_tokens: int) -> CacheRequirements:
    """Ask for scratch memory: the keys and values of the largest chunk, and the kernels' pieces.

    A chunk's keys and values exist expanded, joined with the rotary key, and padded to one width.

    Args:
        layers: the plugin's layers.
        max_num_batched_tokens: most tokens of a step.
    """
    token_bytes = 0
    for layer in layers:
        assert isinstance(layer, LatentLayer), f"foreign layer {type(layer).__name__} in the latent layout"
        copies = 3 * layer.num_heads * (layer.key_dim + layer.value_dim)
        token_bytes = max(token_bytes, copies * layer.kv_a_layernorm.weight.dtype.itemsize)
    return CacheRequirements(workspace_bytes=token_bytes * max_num_batched_tokens + SCRATCH_BYTES)
