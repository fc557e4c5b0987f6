# mypy: disallow-untyped-decorators=False
"""Float8 keys and values of some rows and heads as the queries' type, in blocks of their own.

A chunk of many tokens reads every key many times, and would convert it as often. Converted once, keys are read as those
of any other cache, at the same rate; what is written and read again is little beside the products of a chunk. The
numbers are those that a prompt without a prefix attends to, see `MhaLayer.attend`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom_mha.kernels.float8 import COPY_BLOCK_SIZE, COPY_BYTES, COPY_ROWS, copy_bytes
from atom_mha.kernels.triton_tiles import first_visible

__all__ = ["Piece", "dequantize_blocks", "pieces"]

_TOKENS = 64
"""Tokens of a program."""


@dataclass(frozen=True)
class Piece:
    """Rows and key heads whose keys and values are held at the same time."""

    rows: slice
    heads: slice


def pieces(num_rows: int, num_kv_heads: int, max_seq_len: int, head_dim: int, v_head_dim: int) -> list[Piece]:
    """Cut rows and key heads into pieces of `COPY_BYTES` at most; none where one head of one row has more.

    Args:
        num_rows: rows.
        num_kv_heads: key heads.
        max_seq_len: keys of the longest row.
        head_dim: of keys.
        v_head_dim: of values.
    """
    fitting = COPY_BYTES // copy_bytes(max_seq_len, head_dim, v_head_dim)
    if fitting == 0:
        return []
    heads, rows = min(fitting, num_kv_heads), min(max(1, fitting // num_kv_heads), COPY_ROWS)
    return [
        Piece(slice(row, min(row + rows, num_rows)), slice(head, min(head + heads, num_kv_heads)))
        for row in range(0, num_rows, rows)
        for head in range(0, num_kv_heads, heads)
    ]


def dequantize_blocks(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_seq_len: int,
    window: int | None,
    chunk: int | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy the keys and values that rows see; arguments as in `reference.prefill_paged`.

    Returns:
        Keys [blocks, block_size, num_kv_heads, head_dim] and values likewise, in `dtype`, and the rows' block tables.
        Places that hold no visible key of the row are not written.
    """
    num_rows, num_kv_heads = seq_lens.shape[0], k_cache.shape[2]
    blocks = triton.cdiv(max_seq_len, COPY_BLOCK_SIZE)
    shape = (num_rows * blocks, COPY_BLOCK_SIZE, num_kv_heads)
    keys, values = (
        torch.empty(*shape, cache.shape[3], dtype=dtype, device=cache.device) for cache in (k_cache, v_cache)
    )
    _dequantize[(num_kv_heads, triton.cdiv(max_seq_len, _TOKENS), num_rows)](
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        keys,
        values,
        query_start_loc,
        seq_lens,
        block_tables,
        blocks * COPY_BLOCK_SIZE,
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        k_scale.stride(),
        block_tables.stride(0),
        BLOCK_SIZE=k_cache.shape[1],
        TOKENS=_TOKENS,
        HEAD_DIM=k_cache.shape[3],
        K_WIDTH=triton.next_power_of_2(k_cache.shape[3]),
        V_HEAD_DIM=v_cache.shape[3],
        V_WIDTH=triton.next_power_of_2(v_cache.shape[3]),
        WINDOW=window or 0,
        CHUNK=chunk or 0,
        num_warps=4,
    )
    tables = torch.arange(num_rows * blocks, dtype=torch.int32, device=keys.device)
    return keys, values, tables.view(num_rows, blocks)


@triton.jit(do_not_specialize=["row_tokens", "table_stride"])
def _dequantize(
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    row_tokens: tl.tensor,
    k_strides: tl.tensor,
    v_strides: tl.tensor,
    scale_strides: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    row = tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    num_tokens = tl.load(query_start_loc + row + 1) - tl.load(query_start_loc + row)
    first = tl.program_id(1) * TOKENS
    if (first >= seq_len) | (first + TOKENS <= first_visible(seq_len - num_tokens, WINDOW, CHUNK)):
        return
    tokens = first + tl.arange(0, TOKENS)
    present = tokens < seq_len
    blocks = tl.load(block_tables + row.to(tl.int64) * table_stride + tokens // BLOCK_SIZE, mask=present, other=0)
    blocks = blocks.to(tl.int64)
    slots = tokens % BLOCK_SIZE
    scales = blocks * scale_strides[0] + head * scale_strides[1] + slots * scale_strides[2]
    # Heads of a token lie next to each other in the copy.
    place = (row.to(tl.int64) * row_tokens + tokens) * tl.num_programs(0) + head
    _convert(
        k_cache + head * k_strides[2], blocks * k_strides[0] + slots * k_strides[1], k_scale + scales, keys, place,
        present, HEAD_DIM, K_WIDTH,
    )  # fmt: skip
    _convert(
        v_cache + head * v_strides[2], blocks * v_strides[0] + slots * v_strides[1], v_scale + scales, values, place,
        present, V_HEAD_DIM, V_WIDTH,
    )  # fmt: skip


@triton.jit
def _convert(
    source: tl.tensor,
    offsets: tl.tensor,
    scales: tl.tensor,
    target: tl.tensor,
    place: tl.tensor,
    present: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    columns = tl.arange(0, WIDTH)
    mask = present[:, None] & (columns < SIZE)[None, :]
    numbers = tl.load(source + offsets[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    numbers *= tl.load(scales, mask=present, other=0.0)[:, None]
    tl.store(target + place[:, None] * SIZE + columns[None, :], numbers.to(target.dtype.element_ty), mask=mask)
