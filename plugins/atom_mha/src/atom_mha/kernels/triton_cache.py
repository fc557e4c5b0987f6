# mypy: disallow-untyped-decorators=False
"""`mha.write_kv` in Triton: keys and values of a step scattered into the paged cache by one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from atom_mha.kernels.float8 import LARGEST, LEAST_SCALE, SCALE_FACTOR
from atom_mha.kernels.triton_early import can_start_early
from atom_mha.kernels.triton_tiles import unit_inner_stride

__all__ = ["write_kv"]

_TILE_ELEMENTS = 2048
"""Elements of a token's keys that one program copies, and as many of its values."""
_LARGEST = tl.constexpr(LARGEST)
_SCALE_FACTOR = tl.constexpr(SCALE_FACTOR)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    scratch: dict[Any, Any],
) -> None:
    """Write a step's keys and values into the paged cache; see `reference.write_kv`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    v_head_dim = value.shape[2]
    if num_tokens == 0:
        return
    key, value = unit_inner_stride(key), unit_inner_stride(value)
    width = max(triton.next_power_of_2(head_dim), triton.next_power_of_2(v_head_dim))
    heads = min(triton.next_power_of_2(num_kv_heads), max(1, _TILE_ELEMENTS // width))
    scales = k_scale if k_scale is not None else key
    early = can_start_early(key.device)
    _write_kv[(num_tokens, triton.cdiv(num_kv_heads, heads))](
        key,
        value,
        k_cache,
        v_cache,
        scales,
        v_scale if v_scale is not None else value,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        scales.stride(0),
        scales.stride(1),
        scales.stride(2),
        BLOCK_SIZE=k_cache.shape[1],
        NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        HEADS=heads,
        K_WIDTH=triton.next_power_of_2(head_dim),
        V_WIDTH=triton.next_power_of_2(v_head_dim),
        QUANTIZED=k_scale is not None,
        EARLY=early,
        num_warps=4 if heads * width >= 1024 else 1,
        **({"launch_pdl": True} if early else {}),
    )


@triton.jit
def _write_kv(
    key: tl.tensor,
    value: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    slot_mapping: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    scale_slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    scale_offset = block * scale_block_stride + offset * scale_slot_stride
    _copy_heads(
        key + token * key_token_stride,
        key_head_stride,
        k_cache + block * k_block_stride + offset * k_slot_stride,
        k_head_stride,
        k_scale + scale_offset,
        scale_head_stride,
        heads,
        NUM_HEADS,
        HEAD_DIM,
        K_WIDTH,
        QUANTIZED,
    )
    _copy_heads(
        value + token * value_token_stride,
        value_head_stride,
        v_cache + block * v_block_stride + offset * v_slot_stride,
        v_head_stride,
        v_scale + scale_offset,
        scale_head_stride,
        heads,
        NUM_HEADS,
        V_HEAD_DIM,
        V_WIDTH,
        QUANTIZED,
    )


@triton.jit
def _copy_heads(
    source: tl.tensor,
    source_stride: tl.tensor,
    target: tl.tensor,
    target_stride: tl.tensor,
    scales: tl.tensor,
    scale_stride: tl.tensor,
    heads: tl.tensor,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr,
) -> None:
    columns = tl.arange(0, WIDTH)
    present = (heads < NUM_HEADS)[:, None] & (columns < SIZE)[None, :]
    numbers = tl.load(source + heads[:, None] * source_stride + columns[None, :], mask=present, other=0.0)
    if QUANTIZED:
        wide = numbers.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(wide), axis=1) * _SCALE_FACTOR, _LEAST_SCALE)
        tl.store(scales + heads * scale_stride, scale, mask=heads < NUM_HEADS)
        wide = tl.div_rn(wide, scale[:, None])
        numbers = tl.minimum(tl.maximum(wide, -_LARGEST), _LARGEST)
    places = target + heads[:, None] * target_stride + columns[None, :]
    tl.store(places, numbers.to(target.dtype.element_ty), mask=present)
