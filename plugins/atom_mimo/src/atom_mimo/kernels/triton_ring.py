# mypy: disallow-untyped-decorators=False
"""`mimo.ring_decode` and `mimo.ring_prefill` in Triton: attention over ring and new tokens.

A program takes one key head of one row and a tile of its tokens. The query heads of that key head, times the tile's
tokens, are the rows of its matrix products, so that every key is read once per tile. It walks over the positions of
the ring that its first token sees, then over the row's own tokens. What is launched depends on shapes and maxima
alone; lengths, positions and slots are read on the device, so that a captured graph sees those of its replay.

Scores are exponents of 2. A masked score is a large negative number instead of minus infinity: a token that saw only
masked keys so far holds garbage, which its first visible key wipes out with a factor of exactly 0. Every token sees
itself in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["RingTiles", "choose_tiles", "ring_decode", "ring_prefill", "unit_inner_stride"]

_LOG2E = tl.constexpr(1.4426950408889634)
_MASKED_SCORE = tl.constexpr(-1.0e30)
_MIN_DOT = 16
"""Least size of a matrix product's operands."""


@dataclass(frozen=True)
class RingTiles:
    """How the work is cut.

    Attributes:
        rows: most query heads times tokens of a program.
        keys: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight, and one.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def ring_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Array,
    num_computed: Tensor,
    num_computed_host: Array,
    slots: Tensor,
    slots_host: Array,
    max_query_len: int,
    scaling: float,
    window: int,
    sinks: Tensor | None,
    scratch: dict[Any, Any],
) -> None:
    """Rows of few tokens attend over their ring and themselves; see `reference.ring_decode`."""
    num_rows, num_kv_heads, head_dim = slots.shape[0], ring_k.shape[2], ring_k.shape[3]
    if num_rows == 0 or max_query_len == 0:
        return
    query, key, value = unit_inner_stride(query), unit_inner_stride(key), unit_inner_stride(value)
    v_head_dim, group = ring_v.shape[3], query.shape[1] // num_kv_heads
    tiles = choose_tiles(group * max_query_len, query.dtype, ring_k.dtype)
    tile_tokens = max(1, tiles.rows // group)
    low, high = _split_width(head_dim)
    _ring_attend[(num_kv_heads, triton.cdiv(max_query_len, tile_tokens), num_rows)](
        query,
        key,
        value,
        ring_k,
        ring_v,
        out,
        query_start_loc,
        num_computed,
        slots,
        sinks if sinks is not None else query,
        scaling * _LOG2E.value,
        query.stride()[:2],
        key.stride()[:2],
        value.stride()[:2],
        ring_k.stride()[:3],
        ring_v.stride()[:3],
        out.stride()[:2],
        GROUP=group,
        TILE_TOKENS=tile_tokens,
        TILE_ROWS=_padded(group * tile_tokens),
        KEYS=tiles.keys,
        RING_ROWS=ring_k.shape[1],
        WINDOW=window,
        HEAD_DIM=head_dim,
        LOW=low,
        HIGH=high,
        V_HEAD_DIM=v_head_dim,
        V_WIDTH=_padded(v_head_dim),
        HAS_SINKS=sinks is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def ring_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Array,
    num_computed: Tensor,
    num_computed_host: Array,
    slots: Tensor,
    slots_host: Array,
    max_query_len: int,
    scaling: float,
    window: int,
    sinks: Tensor | None,
    scratch: dict[Any, Any],
) -> None:
    """Chunks of many tokens attend over their ring and themselves; see `reference.ring_prefill`."""
    ring_decode(
        query,
        key,
        value,
        ring_k,
        ring_v,
        out,
        query_start_loc,
        query_start_loc_host,
        num_computed,
        num_computed_host,
        slots,
        slots_host,
        max_query_len,
        scaling,
        window,
        sinks,
        scratch,
    )


def choose_tiles(rows: int, query_dtype: torch.dtype, ring_dtype: torch.dtype) -> RingTiles:
    """Choose by measured shapes; `rows` are the query heads of a key head times the tokens of the longest row."""
    wide = torch.float32 in (query_dtype, ring_dtype)
    tile_rows = min(_padded(rows), 64)
    return RingTiles(tile_rows, keys=32, num_warps=2 if tile_rows == 32 else 4, num_stages=2 if wide else 3)


def _padded(size: int) -> int:
    """Return the least power of two that holds `size` and suits a matrix product."""
    power: int = triton.next_power_of_2(size)
    return max(_MIN_DOT, power)


def _split_width(size: int) -> tuple[int, int]:
    """Cut a head's size into two powers of two: 192 becomes 128 and 64; the second is 0 where one is enough."""
    first = max(_MIN_DOT, 1 << (size.bit_length() - 1))
    return first, _padded(size - first) if size > first else 0


def unit_inner_stride(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where the last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit
def _load_rows(
    base: tl.tensor,
    offsets: tl.tensor,
    present: tl.tensor,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Load columns FIRST ... FIRST + WIDTH of rows at `offsets`; columns past SIZE and rows not present are 0.

    Rows that are not present are not read: they may hold NaN, which a weight of 0 would not remove.
    """
    columns = FIRST + tl.arange(0, WIDTH)
    mask = present[:, None]
    if FIRST + WIDTH > SIZE:
        mask = mask & (columns < SIZE)[None, :]
    return tl.load(base + offsets[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _attend_tile(
    attended: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    q_low: tl.tensor,
    q_high: tl.tensor,
    positions: tl.tensor,
    key_positions: tl.tensor,
    present: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    k_offsets: tl.tensor,
    v_offsets: tl.tensor,
    score_factor: tl.tensor,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
) -> tl.tensor:
    """One step of the online softmax; returns the first three arguments after it."""
    key = _load_rows(k_head, k_offsets, present, 0, LOW, HEAD_DIM)
    scores = tl.dot(q_low, tl.trans(key.to(q_low.dtype)), input_precision="ieee")
    if HIGH > 0:
        key = _load_rows(k_head, k_offsets, present, LOW, HIGH, HEAD_DIM)
        scores = tl.dot(q_high, tl.trans(key.to(q_low.dtype)), scores, input_precision="ieee")
    distance = positions[:, None] - key_positions[None, :]
    visible = (distance >= 0) & (distance < WINDOW) & present[None, :]
    scores = tl.where(visible, scores * score_factor, _MASKED_SCORE)
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(highest - higher)
    total = total * fade + tl.sum(weights, axis=1)
    value = _load_rows(v_head, v_offsets, present, 0, V_WIDTH, V_HEAD_DIM)
    attended = tl.dot(weights.to(q_low.dtype), value.to(q_low.dtype), attended * fade[:, None], input_precision="ieee")
    return attended, total, higher


@triton.jit
def _ring_attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    ring_k: tl.tensor,
    ring_v: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    num_computed: tl.tensor,
    slots: tl.tensor,
    sinks: tl.tensor,
    score_factor: tl.tensor,
    query_strides: tl.tensor,
    key_strides: tl.tensor,
    value_strides: tl.tensor,
    ring_k_strides: tl.tensor,
    ring_v_strides: tl.tensor,
    out_strides: tl.tensor,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    first_token = tl.program_id(1) * TILE_TOKENS
    row = tl.program_id(2)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    if first_token >= num_tokens:
        return
    first_new = tl.load(num_computed + row)
    slot = tl.load(slots + row).to(tl.int64)
    start = start.to(tl.int64)

    rows = tl.arange(0, TILE_ROWS)
    tokens = first_token + rows // GROUP
    heads = head * GROUP + rows % GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (tokens < num_tokens)
    positions = first_new + tokens
    query_rows = (start + tokens) * query_strides[0] + heads * query_strides[1]
    q_low = _load_rows(query, query_rows, is_row, 0, LOW, HEAD_DIM)
    q_high = q_low
    if HIGH > 0:
        q_high = _load_rows(query, query_rows, is_row, LOW, HIGH, HEAD_DIM)
    highest = tl.full([TILE_ROWS], _MASKED_SCORE, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
        total += 1.0
    attended = tl.zeros([TILE_ROWS, V_WIDTH], tl.float32)

    # Old positions that the first token sees, in the ring.
    oldest = tl.maximum(first_new + first_token - WINDOW + 1, 0)
    oldest = tl.where(slot < 0, first_new, oldest)
    k_head = ring_k + slot * ring_k_strides[0] + head * ring_k_strides[2]
    v_head = ring_v + slot * ring_v_strides[0] + head * ring_v_strides[2]
    for tile in tl.range(oldest, first_new, KEYS):
        key_positions = tile + tl.arange(0, KEYS)
        ring_rows = (key_positions % RING_ROWS).to(tl.int64)
        attended, total, highest = _attend_tile(
            attended, total, highest, q_low, q_high, positions, key_positions, key_positions < first_new, k_head,
            v_head, ring_rows * ring_k_strides[1], ring_rows * ring_v_strides[1], score_factor, WINDOW, HEAD_DIM, LOW,
            HIGH, V_HEAD_DIM, V_WIDTH,
        )  # fmt: skip

    # The row's own tokens, up to the last of the tile.
    end = tl.minimum(first_token + TILE_TOKENS, num_tokens)
    k_head = key + start * key_strides[0] + head * key_strides[1]
    v_head = value + start * value_strides[0] + head * value_strides[1]
    for tile in tl.range(tl.maximum(first_token - WINDOW + 1, 0), end, KEYS):
        own = tile + tl.arange(0, KEYS)
        own_rows = own.to(tl.int64)
        attended, total, highest = _attend_tile(
            attended, total, highest, q_low, q_high, positions, first_new + own, own < end, k_head, v_head,
            own_rows * key_strides[0], own_rows * value_strides[0], score_factor, WINDOW, HEAD_DIM, LOW, HIGH,
            V_HEAD_DIM, V_WIDTH,
        )  # fmt: skip

    attended = attended / total[:, None]
    columns = tl.arange(0, V_WIDTH)
    places = out + ((start + tokens) * out_strides[0] + heads * out_strides[1])[:, None] + columns[None, :]
    tl.store(places, attended.to(out.dtype.element_ty), mask=is_row[:, None] & (columns < V_HEAD_DIM)[None, :])
