# mypy: disallow-untyped-decorators=False
"""`mla.prefill` in Triton, and the kernel that it shares with `triton_prefix`: expanded keys and values, many tokens.

A program takes one head and a tile of a row's tokens and walks over a segment of the row's keys (FlashAttention-2,
arXiv 2307.08691). A row whose keys come in several segments, one after another, keeps sums, maxima and accumulators
between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_mla.kernels.triton_tiles import LOG2E, MASKED_SCORE, load_columns, padded, unit_inner_stride

__all__ = ["Keys", "PrefillTiles", "State", "attend_chunks", "launch", "prefill"]

Host = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PrefillTiles:
    """How the work is cut.

    Attributes:
        tokens: query tokens of a program.
        keys: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight, and one.
    """

    tokens: int = 128
    keys: int = 64
    num_warps: int = 8
    num_stages: int = 3


def _choose_tiles(dtype: torch.dtype, widths: int, max_query_len: int) -> PrefillTiles:
    """Choose by measured shapes; `widths` is the sum of the padded head sizes."""
    if dtype == torch.float32:
        return PrefillTiles(tokens=16, keys=32, num_warps=4, num_stages=1)
    if widths > 384:
        return PrefillTiles(keys=32, num_stages=2)
    return PrefillTiles(tokens=256, num_warps=16) if max_query_len >= 1024 else PrefillTiles()


@dataclass(frozen=True)
class Keys:
    """Where keys and values of a launch are; rows are keys.

    Attributes:
        low: [keys, heads, low_dim], the first part of each head's keys.
        high: [keys, heads, high_dim], the rest; strides of heads may be 0.
        value: [keys, heads, value_dim].
    """

    low: Tensor
    high: Tensor
    value: Tensor


@dataclass(frozen=True)
class State:
    """What rows keep between pieces: for each token and head, float32.

    Attributes:
        attended: [num_tokens, heads, value_dim].
        sums: [num_tokens, heads, 2], the highest score and the sum of weights.
    """

    attended: Tensor
    sums: Tensor


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Host,
    max_query_len: int,
    scaling: float,
) -> Tensor:
    """Chunks attend causally to their own expanded keys and values; see `reference.prefill`."""
    return attend_chunks(query, key, value, query_start_loc, max_query_len, scaling)


def attend_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scaling: float,
    output: Tensor | None = None,
    first_token: int = 0,
    tiles: PrefillTiles | None = None,
) -> Tensor:
    """`reference.prefill` without what only the host reads.

    Args:
        query: as there.
        key: as there.
        value: as there.
        query_start_loc: as there.
        max_query_len: as there.
        scaling: as there.
        output: where to write; made when `None`.
        first_token: tokens at the start of each row that are left out as queries; somebody else attends for them.
        tiles: how to cut the work; chosen by shape when `None`.
    """
    output = torch.zeros_like(value, memory_format=torch.contiguous_format) if output is None else output
    num_rows = query_start_loc.shape[0] - 1
    if num_rows == 0 or max_query_len <= first_token:
        return output
    key = unit_inner_stride(key)
    low = min(key.shape[2], 1 << (key.shape[2].bit_length() - 1))
    # A segment per row: all of its keys, which lie where its tokens do.
    starts = query_start_loc[:-1] - query_start_loc[0]
    lens = query_start_loc[1:] - query_start_loc[:-1]
    rows = torch.arange(num_rows, dtype=torch.int32, device=query.device)
    segments = torch.stack((rows, torch.zeros_like(rows), lens, starts), 1)
    keys = Keys(key[..., :low], key[..., low:], unit_inner_stride(value))
    launch(query, keys, output, None, segments, query_start_loc, lens, max_query_len, first_token, scaling, tiles)
    return output


def launch(
    query: Tensor,
    keys: Keys,
    output: Tensor,
    state: State | None,
    segments: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    first_token: int,
    scaling: float,
    tiles: PrefillTiles | None,
) -> None:
    """Attend with a row's tokens over one segment of its keys, for each of some rows.

    Args:
        query: [num_tokens, heads, low_dim + high_dim].
        keys: the keys and values of all segments.
        output: [num_tokens, heads, value_dim], written for rows whose keys end with their segment.
        state: what rows keep between segments; `None` where every segment holds all of a row's keys.
        segments: [segments, 4] int32: the row, its first key, its number of keys, where they begin in `keys`. A row's
            segments come one after another, each in another launch.
        query_start_loc: [rows + 1] int32.
        seq_lens: [rows] int32.
        max_query_len: most tokens of a row.
        first_token: as `attend_chunks` says.
        scaling: factor of the scores.
        tiles: how to cut the work; chosen by shape when `None`.
    """
    query = unit_inner_stride(query)
    low, high, value = keys.low.shape[2], keys.high.shape[2], keys.value.shape[2]
    high_width = padded(high) if high else 0
    tiles = tiles or _choose_tiles(query.dtype, padded(low) + high_width + padded(value), max_query_len)
    grid = (query.shape[1], triton.cdiv(max_query_len - first_token, tiles.tokens), segments.shape[0])
    _attend[grid](
        query,
        keys.low,
        keys.high,
        keys.value,
        output,
        state.attended if state else output,
        state.sums if state else output,
        segments,
        query_start_loc,
        seq_lens,
        first_token,
        scaling * LOG2E.value,
        query.stride()[:2],
        keys.low.stride()[:2],
        keys.high.stride()[:2],
        keys.value.stride()[:2],
        output.stride()[:2],
        HEADS=query.shape[1],
        TOKENS=tiles.tokens,
        KEYS=tiles.keys,
        LOW=low,
        LOW_WIDTH=padded(low),
        HIGH=high,
        HIGH_WIDTH=high_width,
        VALUE=value,
        VALUE_WIDTH=padded(value),
        HAS_STATE=state is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@triton.jit(do_not_specialize=["first_token"])
def _attend(
    query: tl.tensor,
    low_keys: tl.tensor,
    high_keys: tl.tensor,
    values: tl.tensor,
    output: tl.tensor,
    state: tl.tensor,
    state_sums: tl.tensor,
    segments: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    first_token: tl.tensor,
    score_factor: tl.tensor,
    query_strides: tl.tensor,
    low_strides: tl.tensor,
    high_strides: tl.tensor,
    value_strides: tl.tensor,
    output_strides: tl.tensor,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    LOW: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    HIGH: tl.constexpr,
    HIGH_WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_STATE: tl.constexpr,
) -> None:
    """One head and TOKENS tokens of a row attend over a segment of its keys."""
    head = tl.program_id(0)
    segments += tl.program_id(2) * 4
    row = tl.load(segments)
    first_key = tl.load(segments + 1)
    num_keys = tl.load(segments + 2)
    place = tl.load(segments + 3).to(tl.int64)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    start = (start - tl.load(query_start_loc)).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    # Programs of the last tokens, which have the most keys, start first.
    first = first_token + (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    if first >= num_tokens:
        return
    tokens = first + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    first_position = seq_len - num_tokens + first
    # Positions are counted from the segment's first key from here on.
    positions = first_position - first_key + tl.arange(0, TOKENS)
    end = tl.minimum(tl.minimum(first_position + TOKENS, seq_len) - first_key, num_keys)

    query_rows = (start + tokens) * query_strides[0] + head * query_strides[1]
    q_low = load_columns(query, query_rows, is_token, 0, LOW, LOW_WIDTH)
    q_high = q_low
    if HIGH > 0:
        q_high = load_columns(query, query_rows, is_token, LOW, HIGH, HIGH_WIDTH)
    highest = tl.full([TOKENS], MASKED_SCORE, tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    attended = tl.zeros([TOKENS, VALUE_WIDTH], tl.float32)
    columns = tl.arange(0, VALUE_WIDTH)
    kept = (start + tokens) * HEADS + head
    is_kept = is_token[:, None] & (columns < VALUE)[None, :]
    if HAS_STATE:
        if first_key > 0:
            highest = tl.load(state_sums + kept * 2, mask=is_token, other=MASKED_SCORE)
            total = tl.load(state_sums + kept * 2 + 1, mask=is_token, other=0.0)
            attended = tl.load(state + kept[:, None] * VALUE + columns[None, :], mask=is_kept, other=0.0)

    low_keys += place * low_strides[0] + head.to(tl.int64) * low_strides[1]
    high_keys += place * high_strides[0] + head.to(tl.int64) * high_strides[1]
    values += place * value_strides[0] + head.to(tl.int64) * value_strides[1]
    # Tiles that all tokens see, then those at the diagonal and at the end.
    whole = tl.minimum(tl.maximum(first_position - first_key + 1, 0), num_keys) // KEYS * KEYS
    for part in tl.static_range(2):
        begin = 0 if part == 0 else whole
        stop = whole if part == 0 else end
        for tile in tl.range(begin, stop, KEYS):
            keys = tile + tl.arange(0, KEYS)
            rows = keys.to(tl.int64)
            key = _load(low_keys, rows * low_strides[0], keys < num_keys, LOW, LOW_WIDTH, part == 1)
            products = tl.dot(q_low, tl.trans(key), input_precision="ieee")
            if HIGH > 0:
                key = _load(high_keys, rows * high_strides[0], keys < num_keys, HIGH, HIGH_WIDTH, part == 1)
                products = tl.dot(q_high, tl.trans(key), products, input_precision="ieee")
            if part == 1:
                visible = keys[None, :] <= tl.minimum(positions, end - 1)[:, None]
                products = tl.where(visible, products, MASKED_SCORE)
            higher = tl.maximum(highest, tl.max(products, axis=1) * score_factor)
            weights = tl.exp2(products * score_factor - higher[:, None])
            fade = tl.exp2(highest - higher)
            total = total * fade + tl.sum(weights, axis=1)
            highest = higher
            attended = attended * fade[:, None]
            value = _load(values, rows * value_strides[0], keys < num_keys, VALUE, VALUE_WIDTH, part == 1)
            attended = tl.dot(weights.to(value.dtype), value, attended, input_precision="ieee")
    if first_key + num_keys >= seq_len:
        attended = attended / tl.maximum(total, 1e-37)[:, None]
        places = (start + tokens) * output_strides[0] + head * output_strides[1]
        tl.store(output + places[:, None] + columns[None, :], attended.to(output.dtype.element_ty), mask=is_kept)
    elif HAS_STATE:
        tl.store(state_sums + kept * 2, highest, mask=is_token)
        tl.store(state_sums + kept * 2 + 1, total, mask=is_token)
        tl.store(state + kept[:, None] * VALUE + columns[None, :], attended, mask=is_kept)


@triton.jit
def _load(
    base: tl.tensor,
    offsets: tl.tensor,
    present: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Load rows of SIZE columns; all of them are present unless MASKED."""
    columns = tl.arange(0, WIDTH)
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED:
        tile = load_columns(base, offsets, present, 0, SIZE, WIDTH)
    elif SIZE == WIDTH:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    return tile
