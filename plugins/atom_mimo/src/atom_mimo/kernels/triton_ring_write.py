# mypy: disallow-untyped-decorators=False
"""`mimo.ring_write` in Triton: the last tokens of every row into its ring, by one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from atom_mimo.kernels.triton_ring import unit_inner_stride

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["ring_write"]

_COPIED_ELEMENTS = 2048
"""Elements of a token's keys that one program copies, and as many of its values."""


def ring_write(
    key: Tensor,
    value: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Array,
    num_computed: Tensor,
    num_computed_host: Array,
    slots: Tensor,
    slots_host: Array,
    max_query_len: int,
    scratch: dict[Any, Any],
) -> None:
    """Write each row's last tokens into its ring; see `reference.ring_write`."""
    num_rows, ring_rows, num_kv_heads, head_dim = slots.shape[0], *ring_k.shape[1:]
    if num_rows == 0 or max_query_len == 0:
        return
    key, value = unit_inner_stride(key), unit_inner_stride(value)
    k_width, v_width = triton.next_power_of_2(head_dim), triton.next_power_of_2(ring_v.shape[3])
    heads = min(triton.next_power_of_2(num_kv_heads), max(1, _COPIED_ELEMENTS // max(k_width, v_width)))
    _ring_write[(min(max_query_len, ring_rows), triton.cdiv(num_kv_heads, heads), num_rows)](
        key,
        value,
        ring_k,
        ring_v,
        query_start_loc,
        num_computed,
        slots,
        key.stride()[:2],
        value.stride()[:2],
        ring_k.stride()[:3],
        ring_v.stride()[:3],
        RING_ROWS=ring_rows,
        NUM_HEADS=num_kv_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        K_WIDTH=k_width,
        V_HEAD_DIM=ring_v.shape[3],
        V_WIDTH=v_width,
        num_warps=4,
    )


@triton.jit
def _copy_heads(
    source: tl.tensor,
    target: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    heads: tl.tensor,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    columns = tl.arange(0, WIDTH)
    present = (heads < NUM_HEADS)[:, None] & (columns < SIZE)[None, :]
    numbers = tl.load(source + heads[:, None] * source_stride + columns[None, :], mask=present, other=0.0)
    places = target + heads[:, None] * target_stride + columns[None, :]
    tl.store(places, numbers.to(target.dtype.element_ty), mask=present)


@triton.jit
def _ring_write(
    key: tl.tensor,
    value: tl.tensor,
    ring_k: tl.tensor,
    ring_v: tl.tensor,
    query_start_loc: tl.tensor,
    num_computed: tl.tensor,
    slots: tl.tensor,
    key_strides: tl.tensor,
    value_strides: tl.tensor,
    ring_k_strides: tl.tensor,
    ring_v_strides: tl.tensor,
    RING_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(2)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    slot = tl.load(slots + row).to(tl.int64)
    # The last token first: there are at least as many programs as tokens to write.
    token = num_tokens - 1 - tl.program_id(0)
    if (token < 0) | (slot < 0):
        return
    ring_row = ((tl.load(num_computed + row) + token) % RING_ROWS).to(tl.int64)
    source = (start + token).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    _copy_heads(
        key + source * key_strides[0],
        ring_k + slot * ring_k_strides[0] + ring_row * ring_k_strides[1],
        key_strides[1],
        ring_k_strides[2],
        heads,
        NUM_HEADS,
        HEAD_DIM,
        K_WIDTH,
    )
    _copy_heads(
        value + source * value_strides[0],
        ring_v + slot * ring_v_strides[0] + ring_row * ring_v_strides[1],
        value_strides[1],
        ring_v_strides[2],
        heads,
        NUM_HEADS,
        V_HEAD_DIM,
        V_WIDTH,
    )
