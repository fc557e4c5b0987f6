# mypy: disallow-untyped-decorators=False
"""Absorbed queries over cached latents in Triton: `mla.decode` and `mla.attend_selected`.

A program takes a tile of query heads (times tokens) of one row and a stretch of its keys. A latent is loaded once and
serves as key and as value (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from atom_mla.kernels.triton_stretches import LEAST_TILES, add_parts, find_work, leave_part
from atom_mla.kernels.triton_tiles import (
    LOG2E,
    MASKED_SCORE,
    load_columns,
    num_multiprocessors,
    padded,
    unit_inner_stride,
)

__all__ = ["LatentTiles", "attend_all", "attend_selected", "attend_some", "choose_tiles", "decode"]

Host = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LatentTiles:
    """How the work is cut.

    Attributes:
        rows: query heads times tokens of a program.
        keys: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight, and one.
        resident: programs that a multiprocessor holds at a time.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    resident: int = 1


def choose_tiles(dtype: torch.dtype, rows: int, batch: int) -> LatentTiles:
    """Choose by measured shapes: of query heads times tokens, of a batch of so many."""
    if dtype == torch.float32:
        return LatentTiles(rows=16, keys=32, num_warps=4, num_stages=1)
    if rows <= 16 and batch >= 16:
        return LatentTiles(rows=16, keys=32, num_warps=4, num_stages=3, resident=2)
    if rows <= 32:
        return LatentTiles(rows=padded(rows), keys=64, num_warps=8, num_stages=3)
    return LatentTiles(rows=64, keys=64, num_warps=8, num_stages=2)


def decode(
    query: torch.Tensor,
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
    value_dim: int,
) -> torch.Tensor:
    """Attend to all of a row's latents; see `reference.decode`."""
    return attend_all(
        query, cache, scale, block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len, scaling, value_dim
    )


def attend_selected(
    query: torch.Tensor,
    selected: torch.Tensor,
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
    value_dim: int,
) -> torch.Tensor:
    """Attend to each token's own selection of latents; see `reference.attend_selected`."""
    return attend_some(query, selected, cache, scale, block_tables, query_start_loc, seq_lens, scaling, value_dim)


def attend_all(
    query: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
    value_dim: int,
    tiles: LatentTiles | None = None,
) -> torch.Tensor:
    """`reference.decode` without what only the host reads; `tiles` are chosen by shape when `None`."""
    heads = query.shape[1]
    output = query.new_zeros(query.shape[0], heads, value_dim)
    num_rows = seq_lens.shape[0]
    if num_rows == 0 or query.shape[0] == 0 or max_query_len == 0:
        return output
    tiles = tiles or choose_tiles(query.dtype, heads * max_query_len, num_rows)
    row_tiles = triton.cdiv(heads * max_query_len, tiles.rows)
    target = max(1, num_multiprocessors(query.device) * tiles.resident // row_tiles)
    may_split = max_seq_len > LEAST_TILES * tiles.keys and target > 1
    items = num_rows + target if may_split else num_rows
    # Rows that are cut have more than 5/4 of a stretch, so that their parts are at most 8/5 of all stretches.
    parts = 8 * target // 5 + 1 if may_split else 0
    _launch(
        query, query_start_loc, cache, scale, block_tables, query_start_loc, seq_lens, output, scaling, tiles,
        row_tiles, items, target, max_query_len, parts, selected=False,
    )  # fmt: skip
    return output


def attend_some(
    query: torch.Tensor,
    selected: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    value_dim: int,
    tiles: LatentTiles | None = None,
) -> torch.Tensor:
    """`reference.attend_selected` without what it does not read; `tiles` are chosen by shape when `None`."""
    num_tokens, heads = query.shape[:2]
    output = query.new_zeros(num_tokens, heads, value_dim)
    if num_tokens == 0 or seq_lens.shape[0] == 0:
        return output
    tiles = tiles or choose_tiles(query.dtype, heads, num_tokens)
    row_tiles = triton.cdiv(heads, tiles.rows)
    free = num_multiprocessors(query.device) * tiles.resident // (row_tiles * num_tokens)
    splits = max(1, min(free, selected.shape[1] // (LEAST_TILES * tiles.keys)))
    _launch(
        query, unit_inner_stride(selected), cache, scale, block_tables, query_start_loc, seq_lens, output, scaling,
        tiles, row_tiles, num_tokens * splits, splits, 1, num_tokens * splits if splits > 1 else 0, selected=True,
    )  # fmt: skip
    return output


def _launch(
    query: torch.Tensor,
    chosen: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    scaling: float,
    tiles: LatentTiles,
    row_tiles: int,
    items: int,
    target: int,
    max_query_len: int,
    num_parts: int,
    selected: bool,
) -> None:
    heads, latent = query.shape[1], output.shape[2]
    rope = cache.shape[2] - latent
    rows_width = triton.next_power_of_2(seq_lens.shape[0])
    may_split = num_parts > 0
    part_rows = num_parts * row_tiles * tiles.rows
    partial = torch.empty(part_rows * (latent + 1), dtype=torch.float32, device=query.device)
    partial_lse = partial[part_rows * latent :]
    query = unit_inner_stride(query)
    factors = None
    if scale is not None and query.dtype.itemsize == 2:
        query, factors = _unit_queries(query)
    shapes = {
        "ROWS": rows_width,
        "HEADS": heads,
        "TILE_ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "LATENT": latent,
        "LATENT_WIDTH": padded(latent),
        "SELECTED": selected,
    }
    top_k = chosen.shape[1] if selected else 0
    # Programs that share latents are neighbours.
    _attend[(items * row_tiles,)](
        query,
        partial if factors is None else factors,
        chosen,
        cache,
        partial if scale is None else scale,
        output,
        partial,
        partial_lse,
        query_start_loc,
        seq_lens,
        block_tables,
        scaling * LOG2E.value,
        seq_lens.shape[0],
        target,
        top_k,
        row_tiles,
        query.stride()[:2],
        chosen.stride(0),
        block_tables.stride(0),
        BLOCK_SIZE=cache.shape[1],
        CACHE_STRIDE=cache.stride(1),
        ROPE=rope,
        ROPE_WIDTH=padded(rope),
        MAY_SPLIT=may_split,
        HAS_SCALE=scale is not None,
        HAS_FACTORS=factors is not None,
        APART=tiles.rows == 64 and tiles.num_warps == 8,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **shapes,
    )
    if may_split:
        jobs = query.shape[0] if selected else seq_lens.shape[0]
        add_parts[(heads * max_query_len, jobs)](
            output, partial, partial_lse, query_start_loc, seq_lens, seq_lens.shape[0], target, row_tiles,
            num_warps=4, **shapes,
        )  # fmt: skip


def _unit_queries(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale queries to a largest number of 1, in float16, whose products with float8 keys are exact.

    Returns:
        [num_tokens, heads, width] float16, and [num_tokens, heads] float32 factors.
    """
    num_tokens, heads, width = query.shape
    units = torch.empty(num_tokens, heads, width, dtype=torch.float16, device=query.device)
    factors = torch.empty(num_tokens, heads, dtype=torch.float32, device=query.device)
    _scale_to_units[(num_tokens, heads)](
        query, units, factors, query.stride()[:2], SIZE=width, WIDTH=triton.next_power_of_2(width), num_warps=1
    )
    return units, factors


@triton.jit
def _scale_to_units(
    query: tl.tensor,
    units: tl.tensor,
    factors: tl.tensor,
    query_strides: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    place = query + token * query_strides[0] + head * query_strides[1] + columns
    numbers = tl.load(place, mask=columns < SIZE, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), axis=0)
    largest = tl.where(largest > 0, largest, 1.0)
    row = token * tl.num_programs(1) + head
    tl.store(units + row * SIZE + columns, (numbers / largest).to(tl.float16), mask=columns < SIZE)
    tl.store(factors + row, largest)


@triton.jit(do_not_specialize=["num_rows", "target", "top_k", "row_tiles", "table_stride"])
def _attend(
    query: tl.tensor,
    factors: tl.tensor,
    chosen: tl.tensor,
    cache: tl.tensor,
    scale: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    score_factor: tl.tensor,
    num_rows: tl.tensor,
    target: tl.tensor,
    top_k: tl.tensor,
    row_tiles: tl.tensor,
    query_strides: tl.tensor,
    chosen_stride: tl.tensor,
    table_stride: tl.tensor,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    SELECTED: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    APART: tl.constexpr,
) -> None:
    item = tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) % row_tiles
    first_row = row_tile * TILE_ROWS
    row, token, num_tokens, num_keys, split, own_splits, part = find_work(
        item, query_start_loc, seq_lens, num_rows, target, top_k, ROWS, KEYS, SELECTED, MAY_SPLIT
    )
    if first_row >= num_tokens * HEADS:
        return
    num_tiles = tl.cdiv(num_keys, KEYS)
    begin = split * num_tiles // own_splits * KEYS
    end = tl.minimum((split + 1) * num_tiles // own_splits * KEYS, num_keys)

    rows = first_row + tl.arange(0, TILE_ROWS)
    tokens = rows // HEADS
    is_row = tokens < num_tokens
    last_key = end - 1
    if not SELECTED:
        last_key = tl.minimum(num_keys - num_tokens + tokens, end - 1)[:, None]
    query_start = query + token.to(tl.int64) * query_strides[0]
    query_rows = tokens * query_strides[0] + rows % HEADS * query_strides[1]
    q_latent = load_columns(query_start, query_rows, is_row, 0, LATENT, LATENT_WIDTH)
    q_rope = load_columns(query_start, query_rows, is_row, LATENT, ROPE, ROPE_WIDTH)
    row_factor = score_factor
    if HAS_FACTORS:
        row_factor *= tl.load(factors + token.to(tl.int64) * HEADS + rows, mask=is_row, other=0.0)[:, None]

    highest = tl.full([TILE_ROWS], MASKED_SCORE, tl.float32)
    totals = tl.zeros([TILE_ROWS, KEYS], tl.float32)
    attended = tl.zeros([TILE_ROWS, LATENT_WIDTH], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    chosen += token.to(tl.int64) * chosen_stride
    # Where a tile lies within a block, one number says where it is.
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % KEYS == 0 and not SELECTED
    slots = _slots(chosen, table, begin, end, KEYS, BLOCK_SIZE, SELECTED, ONE_BLOCK)
    # At least one tile, if of nothing: a loop that may not run keeps the assembler from overlapping its products.
    stop = tl.maximum(end, begin + 1)
    tl.assume(begin < stop)
    for tile in tl.range(begin, stop, KEYS):
        keys = tile + tl.arange(0, KEYS)
        # The next tile's blocks are asked for before this tile is used, so that nobody waits for the table.
        next_slots = _slots(chosen, table, tile + KEYS, end, KEYS, BLOCK_SIZE, SELECTED, ONE_BLOCK)
        latent, rope, scales, present = _load_tile(
            cache, scale, slots, keys < end, q_latent.dtype, KEYS, CACHE_STRIDE, LATENT, LATENT_WIDTH, ROPE, ROPE_WIDTH,
            HAS_SCALE, ONE_BLOCK,
        )  # fmt: skip
        latent_products = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        rope_products = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        # Scaled one by one: as a sum of products it would become a chain of them.
        products = latent_products * row_factor + rope_products * row_factor
        if HAS_SCALE:
            # A weight contains its value's scale, so that it multiplies the cached numbers; sums of weights do not.
            products = products * scales[None, :] + tl.log2(scales)[None, :]
        visible = present[None, :]
        if not SELECTED:
            visible = visible & (keys[None, :] <= last_key)
        if APART:
            # Always so. A branch hides from the compiler that products follow on products, where it would let every
            # four warps compute all scores; alone, it divides the scores of 64 rows among eight warps.
            weights = products
            fade = highest
            if tile < stop:
                weights, fade, highest, totals = _weigh(products, visible, scales, highest, totals, HAS_SCALE)
        else:
            weights, fade, highest, totals = _weigh(products, visible, scales, highest, totals, HAS_SCALE)
        attended = attended * fade[:, None]
        attended = tl.dot(weights.to(latent.dtype), latent, attended, input_precision="ieee")
        slots = next_slots

    total = tl.maximum(tl.sum(totals, axis=1), 1e-37)
    attended = attended / total[:, None]
    if own_splits > 1:
        lse = highest + tl.log2(total)
        first_place = (part * row_tiles + row_tile) * TILE_ROWS
        leave_part(partial, partial_lse, first_place, attended, lse, is_row, TILE_ROWS, LATENT, LATENT_WIDTH)
    else:
        # Rows of the output are query heads of tokens.
        columns = tl.arange(0, LATENT_WIDTH)
        places = output + (token.to(tl.int64) * HEADS + rows)[:, None] * LATENT + columns[None, :]
        tl.store(places, attended.to(output.dtype.element_ty), mask=is_row[:, None] & (columns < LATENT)[None, :])


@triton.jit
def _load_tile(
    cache: tl.tensor,
    scale: tl.tensor,
    slots: tl.tensor,
    before_end: tl.tensor,
    DTYPE: tl.constexpr,
    KEYS: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Latents [KEYS, LATENT_WIDTH] and rotary keys [KEYS, ROPE_WIDTH] as DTYPE, scales [KEYS], which keys are present.

    `slots` and ONE_BLOCK are as `_slots` has them. A cache has rows of CACHE_STRIDE numbers and no gaps.
    """
    present = before_end
    first_slot = tl.full([], 0, tl.int64)
    numbers = tl.arange(0, KEYS)
    if ONE_BLOCK:
        first_slot += slots
    else:
        present = slots >= 0
        numbers = slots.to(tl.int64)
    tile = cache + first_slot * CACHE_STRIDE
    latent = load_columns(tile, numbers * CACHE_STRIDE, present, 0, LATENT, LATENT_WIDTH).to(DTYPE)
    rope = load_columns(tile, numbers * CACHE_STRIDE, present, LATENT, ROPE, ROPE_WIDTH).to(DTYPE)
    scales = present
    if HAS_SCALE:
        scales = tl.load(scale + first_slot + numbers, mask=present, other=1.0)
    return latent, rope, scales, present


@triton.jit
def _weigh(
    products: tl.tensor,
    visible: tl.tensor,
    scales: tl.tensor,
    highest: tl.tensor,
    totals: tl.tensor,
    HAS_SCALE: tl.constexpr,
) -> tl.tensor:
    """One step of the online softmax: weights, what fades earlier ones, the new maximum and sums of weights."""
    scores = tl.where(visible, products, MASKED_SCORE)
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(highest - higher)
    if HAS_SCALE:
        totals = totals * fade[:, None] + weights * (1.0 / scales)[None, :]
    else:
        totals = totals * fade[:, None] + weights
    return weights, fade, higher, totals


@triton.jit
def _slots(
    chosen: tl.tensor,
    table: tl.tensor,
    tile: tl.tensor,
    end: tl.tensor,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SELECTED: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Slots of the KEYS keys from `tile` on, or of the selected tokens with these numbers; -1 from `end` on.

    With ONE_BLOCK the slot of the first one alone. A slot is `block * BLOCK_SIZE + offset`, below 2^31.
    """
    if ONE_BLOCK:
        slots = tl.load(table + tile // BLOCK_SIZE, mask=tile < end, other=0) * BLOCK_SIZE + tile % BLOCK_SIZE
    else:
        positions = tile + tl.arange(0, KEYS)
        present = positions < end
        if SELECTED:
            positions = tl.load(chosen + positions, mask=present, other=-1)
            present = positions >= 0
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=present, other=0)
        slots = tl.where(present, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
    return slots
