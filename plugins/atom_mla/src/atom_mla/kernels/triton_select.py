# mypy: disallow-untyped-decorators=False
"""`mla.select_tokens` in Triton: index scores of some query tokens, then each one's best, in bounded memory.

Scores (DeepSeek-V3.2, arXiv 2512.02556, equation 1) are written as integers that order like them, for as many query
tokens at a time as the scratch memory holds. The best are then found without sorting: a search over the integers, two
bits at a time, finds the least one that is selected, and one more pass in order of position keeps what is above it and
the earliest of its equals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from atom_mla.kernels import LARGEST_PIECE_BYTES
from atom_mla.kernels.triton_tiles import load_columns, padded, unit_inner_stride

__all__ = ["select_tokens"]

Host = np.ndarray[Any, Any]

_LOWEST = tl.constexpr(-(2**31))
_PROGRAMS = 1024
"""Programs that score, when there are enough keys for so many."""
_SEARCHED = 4096
"""Scores of a query token that its program looks at in one go."""


def select_tokens(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc_host: Host,
    seq_lens_host: Host,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
    top_k: int,
) -> torch.Tensor:
    """Score every visible token and select the best for each query token; see `reference.select_tokens`."""
    num_tokens, heads, dim = query.shape
    num_rows = seq_lens.shape[0]
    selected = torch.full((num_tokens, top_k), -1, dtype=torch.int32, device=query.device)
    if num_tokens == 0 or num_rows == 0 or max_query_len == 0:
        return selected
    query, head_weights = unit_inner_stride(query), unit_inner_stride(head_weights)
    width = triton.cdiv(max_seq_len, 128) * 128
    step = min(num_tokens, max(1, LARGEST_PIECE_BYTES // (4 * width)))
    scores = torch.empty(step, width, dtype=torch.int32, device=query.device)
    narrow = query.dtype == torch.float32
    keys = 32 if narrow else 128
    queries = 1 if max_query_len == 1 else min(16, triton.next_power_of_2(max_query_len))
    tiles = triton.cdiv(max_seq_len, keys)
    groups = triton.cdiv(max_query_len, queries)
    # Groups of query tokens that have work in one launch.
    busy = min(num_rows * groups, num_rows + triton.cdiv(step, queries))
    stretches = max(1, min(tiles, _PROGRAMS // busy))
    searched = min(_SEARCHED, triton.next_power_of_2(width))
    rows_width = triton.next_power_of_2(num_rows)
    for first in range(0, num_tokens, step):
        last = min(first + step, num_tokens)
        _score[(stretches, groups, num_rows)](
            query,
            head_weights,
            cache,
            scores if scale is None else scale,
            scores,
            block_tables,
            query_start_loc,
            seq_lens,
            first,
            last,
            scaling,
            query.stride()[:2],
            head_weights.stride(0),
            cache.stride()[:2],
            1 if scale is None else scale.stride(0),
            width,
            block_tables.stride(0),
            QUERIES=queries,
            KEYS=keys,
            BLOCK_SIZE=cache.shape[1],
            HEADS=heads,
            HEADS_WIDTH=padded(heads),
            DIM=dim,
            DIM_WIDTH=padded(dim),
            HAS_SCALE=scale is not None,
            num_warps=4,
            num_stages=1 if narrow else (3 if queries == 1 else 2),
        )
        _best[(last - first,)](
            scores,
            selected,
            query_start_loc,
            seq_lens,
            num_rows,
            first,
            width,
            top_k,
            ROWS=rows_width,
            SEARCHED=searched,
            num_warps=8,
        )
    return selected


@triton.jit(do_not_specialize=["first_token", "last_token", "table_stride", "width"])
def _score(
    query: tl.tensor,
    head_weights: tl.tensor,
    cache: tl.tensor,
    scale: tl.tensor,
    scores: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    first_token: tl.tensor,
    last_token: tl.tensor,
    scaling: tl.tensor,
    query_strides: tl.tensor,
    weights_stride: tl.tensor,
    cache_strides: tl.tensor,
    scale_stride: tl.tensor,
    width: tl.tensor,
    table_stride: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    """Score a stretch of a row's keys for QUERIES of its tokens, those from `first_token` to `last_token`."""
    row = tl.program_id(2)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    start -= tl.load(query_start_loc)
    seq_len = tl.load(seq_lens + row)
    first_query = tl.maximum(tl.program_id(1) * QUERIES, first_token - start)
    last_query = tl.minimum(tl.minimum((tl.program_id(1) + 1) * QUERIES, num_tokens), last_token - start)
    if first_query >= last_query:
        return
    num_keys = seq_len - num_tokens + last_query
    stretch = tl.cdiv(tl.cdiv(num_keys, tl.num_programs(0)), KEYS) * KEYS
    begin = tl.program_id(0) * stretch
    end = tl.minimum(begin + stretch, num_keys)
    table = block_tables + row.to(tl.int64) * table_stride
    heads = tl.arange(0, HEADS_WIDTH)
    is_head = heads < HEADS
    query_heads = heads * query_strides[1]
    first = (start + first_query).to(tl.int64)
    if QUERIES == 1:
        # Keys stream past one query token.
        own = load_columns(query + first * query_strides[0], query_heads, is_head, 0, DIM, DIM_WIDTH)
        weights = tl.load(head_weights + first * weights_stride + heads, mask=is_head, other=0.0)
        for tile in tl.range(begin, end, KEYS):
            keys = tile + tl.arange(0, KEYS)
            key, factors = _load_keys(
                cache, scale, table, keys, keys < end, cache_strides, scale_stride, own.dtype, BLOCK_SIZE, DIM,
                DIM_WIDTH, HAS_SCALE,
            )  # fmt: skip
            places = scores + (first - first_token) * width + keys
            tl.store(places, _index_score(key, own, weights, factors * scaling), mask=keys < end)
    else:
        # Query tokens stream past a tile of keys.
        for tile in range(begin, end, KEYS):
            keys = tile + tl.arange(0, KEYS)
            key, factors = _load_keys(
                cache, scale, table, keys, keys < end, cache_strides, scale_stride, query.dtype.element_ty, BLOCK_SIZE,
                DIM, DIM_WIDTH, HAS_SCALE,
            )  # fmt: skip
            for number in range(first_query, last_query):
                token = (start + number).to(tl.int64)
                own = load_columns(query + token * query_strides[0], query_heads, is_head, 0, DIM, DIM_WIDTH)
                weights = tl.load(head_weights + token * weights_stride + heads, mask=is_head, other=0.0)
                places = scores + (token - first_token) * width + keys
                tl.store(places, _index_score(key, own, weights, factors * scaling), mask=keys < end)


@triton.jit
def _load_keys(
    cache: tl.tensor,
    scale: tl.tensor,
    table: tl.tensor,
    keys: tl.tensor,
    present: tl.tensor,
    cache_strides: tl.tensor,
    scale_stride: tl.tensor,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> tl.tensor:
    """Index keys [KEYS, DIM_WIDTH] as DTYPE, and their factors [KEYS]."""
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=present, other=0)
    offsets = blocks.to(tl.int64) * cache_strides[0] + keys % BLOCK_SIZE * cache_strides[1]
    key = load_columns(cache, offsets, present, 0, DIM, DIM_WIDTH).to(DTYPE)
    factors = (keys * 0 + 1).to(tl.float32)
    if HAS_SCALE:
        offsets = blocks.to(tl.int64) * scale_stride + keys % BLOCK_SIZE
        factors = tl.load(scale + offsets, mask=present, other=0.0)
    return key, factors


@triton.jit
def _index_score(key: tl.tensor, own: tl.tensor, weights: tl.tensor, factors: tl.tensor) -> tl.tensor:
    """Scores of [KEYS] keys for one query token, as integers that order like them."""
    products = tl.dot(key, tl.trans(own), input_precision="ieee") * factors[:, None]
    return _ordered(tl.sum(tl.maximum(products, 0.0) * weights.to(tl.float32)[None, :], axis=1))


@triton.jit
def _ordered(score: tl.tensor) -> tl.tensor:
    """Integers that order like float32 numbers; both zeros are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["num_rows", "first_token", "width", "top_k"])
def _best(
    scores: tl.tensor,
    selected: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_rows: tl.tensor,
    first_token: tl.tensor,
    width: tl.tensor,
    top_k: tl.tensor,
    ROWS: tl.constexpr,
    SEARCHED: tl.constexpr,
) -> None:
    """Select for one query token."""
    token = first_token + tl.program_id(0)
    rows = tl.arange(0, ROWS)
    origin = tl.load(query_start_loc)
    ends = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=0x7FFFFFFF)
    row = tl.sum((ends <= token + origin).to(tl.int32), axis=0)
    if row >= num_rows:
        return
    visible = tl.load(seq_lens + row) - tl.load(query_start_loc + row + 1) + origin + token + 1
    own = scores + tl.program_id(0).to(tl.int64) * width
    out = selected + token.to(tl.int64) * top_k
    if visible <= top_k:
        for tile in range(0, visible, SEARCHED):
            positions = tile + tl.arange(0, SEARCHED)
            tl.store(out + positions, positions, mask=positions < visible)
        return
    # The largest integer that at least top_k scores reach, found from the highest bits down. The sign comes first:
    # `least` counts up from the lowest integer.
    least = tl.full([], _LOWEST, tl.int32)
    for pair in range(0, 16):
        shift = 30 - 2 * pair
        unit = tl.full([], 1, tl.int32) << shift
        counts_1 = tl.zeros([SEARCHED], tl.int32)
        counts_2 = tl.zeros([SEARCHED], tl.int32)
        counts_3 = tl.zeros([SEARCHED], tl.int32)
        for tile in range(0, visible, SEARCHED):
            positions = tile + tl.arange(0, SEARCHED)
            found = tl.load(own + positions, mask=positions < visible, other=_LOWEST)
            counts_1 += (found >= least + unit).to(tl.int32)
            counts_2 += (found >= least + 2 * unit).to(tl.int32)
            counts_3 += (found >= least + 3 * unit).to(tl.int32)
        steps = (tl.sum(counts_1, axis=0) >= top_k).to(tl.int32)
        steps += (tl.sum(counts_2, axis=0) >= top_k).to(tl.int32)
        steps += (tl.sum(counts_3, axis=0) >= top_k).to(tl.int32)
        least += steps * unit
    counts_above = tl.zeros([SEARCHED], tl.int32)
    for tile in range(0, visible, SEARCHED):
        positions = tile + tl.arange(0, SEARCHED)
        found = tl.load(own + positions, mask=positions < visible, other=_LOWEST)
        counts_above += (found > least).to(tl.int32)
    room = top_k - tl.sum(counts_above, axis=0)
    num_taken = tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    for tile in range(0, visible, SEARCHED):
        positions = tile + tl.arange(0, SEARCHED)
        present = positions < visible
        found = tl.load(own + positions, mask=present, other=_LOWEST)
        equal = present & (found == least)
        order = num_equal + tl.cumsum(equal.to(tl.int32), axis=0)
        taken = (present & (found > least)) | (equal & (order <= room))
        places = num_taken + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(out + places, positions, mask=taken)
        num_equal += tl.sum(equal.to(tl.int32), axis=0)
        num_taken += tl.sum(taken.to(tl.int32), axis=0)
