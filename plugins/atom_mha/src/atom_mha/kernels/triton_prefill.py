# mypy: disallow-untyped-decorators=False
"""`mha.prefill_paged` and `mha.prefill` in Triton: chunks of many tokens, keys from the paged cache or from the step.

A program takes one query head and a tile of a row's tokens and walks over the keys (FlashAttention-2, arXiv
2307.08691). Tiles of keys that all its tokens see go without a mask; those at the edges of window, chunk and diagonal
come with one. Programs of the last tokens, which have the most keys, start first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from atom_mha.kernels.triton_attend import attend, unit_queries
from atom_mha.kernels.triton_dequantize import Piece, dequantize_blocks, pieces
from atom_mha.kernels.triton_tiles import (
    LOG2E,
    MASKED_SCORE,
    blocks_of,
    first_visible,
    load_rows,
    padded,
    score_factors,
    split_width,
    unit_inner_stride,
)

__all__ = ["PrefillTiles", "choose_tiles", "prefill", "prefill_from", "prefill_paged"]

_LONG_PREFIX = 4096
"""Keys from which on large tiles of tokens pay, where not all keys are the chunk's own."""


@dataclass(frozen=True)
class PrefillTiles:
    """How the work is cut.

    Attributes:
        tokens: query tokens of a program.
        keys: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight, and one.
        max_registers: bound of registers per thread; none when `None`.
    """

    tokens: int = 128
    keys: int = 64
    num_warps: int = 8
    num_stages: int = 3
    max_registers: int | None = None


def prefill_paged(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    scratch: dict[Any, Any],
) -> None:
    """Chunks of many query tokens attend over the paged cache; see `reference.prefill_paged`."""
    bounds = max_query_len, max_seq_len, 0
    mask = window, chunk, soft_cap
    cut: list[Piece] = []
    if k_scale is not None and query.dtype.itemsize == 2:
        cut = pieces(seq_lens.shape[0], k_cache.shape[2], max_seq_len, k_cache.shape[3], v_cache.shape[3])
    if k_scale is None or v_scale is None or not cut:
        keys = _Keys(k_cache, v_cache, k_cache.shape[1], seq_lens, block_tables, k_scale, v_scale)
        _launch(query, keys, out, query_start_loc, *bounds, scaling, *mask, sinks)
        return
    group = query.shape[1] // k_cache.shape[2]
    for piece in cut:
        rows, kv_heads = piece.rows, piece.heads
        starts = query_start_loc[rows.start : rows.stop + 1]
        new_keys, new_values, tables = dequantize_blocks(
            k_cache[:, :, kv_heads],
            v_cache[:, :, kv_heads],
            k_scale[:, kv_heads],
            v_scale[:, kv_heads],
            starts,
            seq_lens[rows],
            block_tables[rows],
            max_seq_len,
            window,
            chunk,
            query.dtype,
        )
        keys = _Keys(new_keys, new_values, new_keys.shape[1], seq_lens[rows], tables, None, None)
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        own_sinks = None if sinks is None else sinks[heads]
        _launch(query[:, heads], keys, out[:, heads], starts, *bounds, scaling, *mask, own_sinks)


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    scratch: dict[Any, Any],
) -> None:
    """Chunks without a cached prefix attend to their own keys; see `reference.prefill`."""
    prefill_from(0, query, key, value, out, query_start_loc, max_query_len, scaling, window, chunk, soft_cap, sinks)


def prefill_from(
    first_token: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """`prefill` without the first `first_token` queries of each row, for which somebody else attends."""
    keys = _Keys(unit_inner_stride(key).unsqueeze(0), unit_inner_stride(value).unsqueeze(0), 0, None, None, None, None)
    bounds = max_query_len, max_query_len, first_token
    _launch(query, keys, out, query_start_loc, *bounds, scaling, window, chunk, soft_cap, sinks)


@dataclass(frozen=True)
class _Keys:
    """Where keys and values are.

    Attributes:
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], or [1, num_tokens, num_kv_heads, head_dim].
        v_cache: likewise.
        block_size: tokens per block, 0 for keys that are not paged.
        seq_lens: as in `prefill_paged`; `None` for keys that are not paged.
        block_tables: likewise.
        k_scale: likewise.
        v_scale: likewise.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_size: int
    seq_lens: torch.Tensor | None
    block_tables: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def _launch(
    query: torch.Tensor,
    keys: _Keys,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_keys: int,
    first_token: int,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    num_rows = query_start_loc.shape[0] - 1
    if num_rows == 0 or max_query_len <= first_token:
        return
    query = unit_inner_stride(query)
    k_cache, v_cache = keys.k_cache, keys.v_cache
    head_dim, v_head_dim = k_cache.shape[3], v_cache.shape[3]
    low, high = split_width(head_dim)
    paged = keys.block_tables is not None
    tiles = choose_tiles(
        query.dtype,
        k_cache.dtype,
        low + high + padded(v_head_dim),
        max_query_len - first_token,
        paged and max_keys >= _LONG_PREFIX,
    )
    v_width = padded(v_head_dim) if keys.v_scale is None else 2 * padded(v_head_dim // 2)
    if keys.v_scale is not None:
        v_cache = v_cache.view(torch.int16)
    score_factor, cap_factor = score_factors(scaling, soft_cap)
    table = keys.block_tables if keys.block_tables is not None else query_start_loc
    _prefill[(query.shape[1], triton.cdiv(max_query_len - first_token, tiles.tokens), num_rows)](
        query,
        k_cache,
        v_cache,
        keys.k_scale if keys.k_scale is not None else query,
        keys.v_scale if keys.v_scale is not None else query,
        out,
        query_start_loc,
        keys.seq_lens if keys.seq_lens is not None else query_start_loc,
        table,
        sinks if sinks is not None else query,
        score_factor,
        cap_factor,
        first_token,
        query.stride()[:2],
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        keys.k_scale.transpose(1, 2).stride() if keys.k_scale is not None else (0, 0, 0),
        out.stride()[:2],
        table.stride(0),
        GROUP=query.shape[1] // k_cache.shape[2],
        TOKENS=tiles.tokens,
        KEYS=tiles.keys,
        BLOCK_SIZE=keys.block_size if paged else 1,
        HEAD_DIM=head_dim,
        LOW=low,
        HIGH=high,
        V_HEAD_DIM=v_head_dim,
        V_WIDTH=v_width,
        WINDOW=window or 0,
        CHUNK=chunk or 0,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=keys.k_scale is not None,
        ALIKE=keys.k_scale is None and k_cache.stride() == v_cache.stride(),
        NATIVE=query.device.type == "cuda",
        PAGED=paged,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
    )


def choose_tiles(
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    widths: int,
    num_tokens: int,
    long_prefix: bool,
) -> PrefillTiles:
    """Choose by measured shapes: the sum of the padded head sizes, tokens of a row, whether a long prefix is cached.

    Tiles of many tokens read keys less often, but waste more products at the diagonal and leave fewer programs.
    """
    if query_dtype == torch.float32 or cache_dtype == torch.float32:
        return PrefillTiles(tokens=32, keys=32, num_warps=4, num_stages=1)
    if cache_dtype.itemsize == 1 or widths > 384:
        wide = num_tokens > 64
        return PrefillTiles(tokens=128 if wide else 64, keys=32, num_warps=8 if wide else 4)
    if num_tokens >= 512 and widths > 128 and (long_prefix or widths != 256):
        return PrefillTiles(tokens=256)
    if num_tokens > 64 and not 128 < widths <= 256:
        return PrefillTiles()
    return PrefillTiles(tokens=64, keys=64 if widths <= 256 else 32, num_warps=4)


@triton.jit(do_not_specialize=["first_token", "table_stride"])
def _prefill(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    sinks: tl.tensor,
    score_factor: tl.tensor,
    cap_factor: tl.tensor,
    first_token: tl.tensor,
    query_strides: tl.tensor,
    k_strides: tl.tensor,
    v_strides: tl.tensor,
    scale_strides: tl.tensor,
    out_strides: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ALIKE: tl.constexpr,
    NATIVE: tl.constexpr,
    PAGED: tl.constexpr,
) -> None:
    V_NUMBERS: tl.constexpr = V_HEAD_DIM // 2 if HAS_SCALES else V_HEAD_DIM
    V_LOADS: tl.constexpr = V_WIDTH // 2 if HAS_SCALES else V_WIDTH
    head = tl.program_id(0)
    row = tl.program_id(2)
    first = first_token + (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    if first >= num_tokens:
        return
    seq_len = num_tokens
    if PAGED:
        seq_len = tl.load(seq_lens + row)
    tokens = first + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    first_position = seq_len - num_tokens + first
    positions = first_position + tl.arange(0, TOKENS)
    end = tl.minimum(first_position + TOKENS, seq_len)

    query_start = query + start.to(tl.int64) * query_strides[0] + head * query_strides[1]
    token_offsets = tokens.to(tl.int64) * query_strides[0]
    q_low = load_rows(query_start, token_offsets, is_token, 0, LOW, HEAD_DIM, True)
    q_high = q_low
    if HIGH > 0:
        q_high = load_rows(query_start, token_offsets, is_token, LOW, HIGH, HEAD_DIM, True)
    row_factor = score_factor
    if HAS_SCALES and q_low.dtype != tl.float32:
        q_low, q_high, query_scale = unit_queries(q_low, q_high, HIGH)
        row_factor = (query_scale * score_factor)[:, None]

    highest = tl.full([TOKENS], MASKED_SCORE, tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    if HAS_SINKS:
        highest = tl.zeros([TOKENS], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    attended = tl.zeros([TOKENS, V_LOADS], tl.float32)
    attended_odd = attended

    kv_head = head // GROUP
    table = block_tables + row.to(tl.int64) * table_stride
    k_head = k_cache + kv_head * k_strides[2]
    v_head = v_cache + kv_head * v_strides[2]
    k_scale += kv_head * scale_strides[2]
    v_scale += kv_head * scale_strides[2]
    if not PAGED:
        k_head += start.to(tl.int64) * k_strides[1]
        v_head += start.to(tl.int64) * v_strides[1]

    # Keys in whole tiles: at the left edge, seen by all tokens, at the diagonal.
    HAS_LOWER: tl.constexpr = WINDOW > 0 or CHUNK > 0
    lower_key = first_visible(positions, WINDOW, CHUNK)
    left = first_visible(first_position, WINDOW, CHUNK) // KEYS * KEYS
    middle = left
    if HAS_LOWER:
        seen_by_all = first_visible(end - 1, WINDOW, CHUNK)
        middle = tl.minimum(tl.cdiv(seen_by_all, KEYS) * KEYS, tl.cdiv(end, KEYS) * KEYS)
    right = tl.maximum((first_position + 1) // KEYS * KEYS, middle)
    for part in tl.static_range(0 if HAS_LOWER else 1, 3):
        first_key = left if part == 0 else (middle if part == 1 else right)
        end_key = middle if part == 0 else (right if part == 1 else end)
        blocks = blocks_of(table, first_key + tl.arange(0, KEYS), end, BLOCK_SIZE, PAGED)
        attended, attended_odd, total, highest = attend(
            attended, attended_odd, total, highest, q_low, q_high, lower_key, positions, first_key, end_key, end,
            k_head, v_head, k_scale, v_scale, table, blocks, row_factor, cap_factor, k_strides, v_strides,
            scale_strides, KEYS, BLOCK_SIZE, HEAD_DIM, LOW, HIGH, V_NUMBERS, V_LOADS, HAS_LOWER,
            HAS_SOFT_CAP, HAS_SCALES, ALIKE, NATIVE, PAGED, part != 1,
        )  # fmt: skip
    if HAS_SCALES:
        attended = tl.interleave(attended, attended_odd)
    attended = attended / total[:, None]
    columns = tl.arange(0, V_WIDTH)
    out_start = out + start.to(tl.int64) * out_strides[0] + head * out_strides[1]
    places = out_start + tokens.to(tl.int64)[:, None] * out_strides[0] + columns[None, :]
    tl.store(places, attended.to(out.dtype.element_ty), mask=is_token[:, None] & (columns < V_HEAD_DIM)[None, :])
