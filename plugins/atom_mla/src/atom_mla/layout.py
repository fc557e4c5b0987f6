"""The cache: shapes and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from atom_core.plugin import CacheRequirements, GraphSupport, TensorSpec
from atom_mla.kernels import LARGEST_PIECE_BYTES, torch_cpu
from atom_mla.layer import LatentLayer

if TYPE_CHECKING:
    from atom_core.plugin import AttentionLayer

__all__ = ["paged_layout", "requirements"]


def paged_layout(layers: Sequence[AttentionLayer], block_size: int, cache_dtype: torch.dtype) -> list[TensorSpec]:
    """Declare the paged tensors, one spec per field and width.

    `latent_cache` holds, per token, `kv_lora_rank` values of the normalized latent, then `qk_rope_head_dim` of the
    rotated key that all heads share; `index_cache` holds `index_head_dim` values of the indexer's rotated key, in
    layers that have an indexer of their own. Beside a float8 cache, `latent_scale` and `index_scale` hold one float32
    factor per token. Every rank holds all of it.

    Args:
        layers: the plugin's layers.
        block_size: tokens per block.
        cache_dtype: dtype of latents and index keys.
    """
    widths: dict[tuple[str, int], list[str]] = {}
    for layer in layers:
        assert isinstance(layer, LatentLayer), f"foreign layer {type(layer).__name__} in the latent layout"
        for field, width in layer.cache_widths().items():
            widths.setdefault((field, width), []).append(layer.module_name)
    specs = [
        TensorSpec(field, (block_size, width), cache_dtype, tuple(names)) for (field, width), names in widths.items()
    ]
    if cache_dtype.itemsize == 1:
        owners: dict[str, list[str]] = {}
        for (field, _), names in widths.items():
            owners.setdefault(field.replace("cache", "scale"), []).extend(names)
        specs += [TensorSpec(field, (block_size,), torch.float32, tuple(names)) for field, names in owners.items()]
    return specs


def requirements(
    layers: Sequence[AttentionLayer], max_num_batched_tokens: int, max_model_len: int
) -> CacheRequirements:
    """Ask for scratch memory: the keys and values of the largest chunk, and the kernels' pieces.

    A chunk's keys and values exist expanded, joined with the rotary key, and padded to one width. Pieces are those of
    the kernels in torch, or of expanded prefixes, or of index scores: one kind at a time.

    Args:
        layers: the plugin's layers.
        max_num_batched_tokens: most tokens of a step.
        max_model_len: most tokens of a request.
    """
    token_bytes = piece_bytes = 0
    for layer in layers:
        assert isinstance(layer, LatentLayer), f"foreign layer {type(layer).__name__} in the latent layout"
        itemsize = layer.kv_a_layernorm.weight.dtype.itemsize
        key_bytes = layer.num_heads * (layer.nope_dim + layer.value_dim) * itemsize
        token_bytes = max(token_bytes, 3 * layer.num_heads * (layer.key_dim + layer.value_dim) * itemsize)
        # Index scores are 4 bytes; key_bytes is more.
        piece_bytes = max(piece_bytes, max_num_batched_tokens * max_model_len * max(4, key_bytes))
    scratch_bytes = max(torch_cpu.SCRATCH_BYTES, min(piece_bytes, LARGEST_PIECE_BYTES))
    return CacheRequirements(
        graph_support=GraphSupport.UNIFORM,
        workspace_bytes=token_bytes * max_num_batched_tokens + scratch_bytes,
        float8_cache=True,
    )
