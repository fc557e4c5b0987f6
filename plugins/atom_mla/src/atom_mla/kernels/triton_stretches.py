# mypy: disallow-untyped-decorators=False
"""How `triton_latent` cuts rows into stretches of keys, found on the device, and the sum of a row's parts.

About as many stretches as fit the device at a time, all about as long: short rows have one, long ones several (the
fixed grid of stream-k, arXiv 2301.03598). The launch depends on the number of rows alone. Where a row has several, each
program leaves a part, and a second launch adds the parts up (flash-decoding).
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom_mla.kernels.triton_tiles import MASKED_SCORE

__all__ = ["LEAST_TILES", "add_parts", "find_work", "leave_part"]

LEAST_TILES = 4
"""Least tiles of keys in a stretch where the longest row has many; fewer where it has few, down to one."""
_LEAST = tl.constexpr(LEAST_TILES)
_TILES_OF_ONE = tl.constexpr(32)
"""Tiles of the longest row for each tile of the least stretch: many parts take longer to add than they save."""
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_LEAST_TOTAL = tl.constexpr(1e-37)


@triton.jit
def _cut(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_rows: tl.tensor,
    target: tl.tensor,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Cut all rows into about `target` stretches; [ROWS] numbers of stretches."""
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    starts = tl.load(query_start_loc + rows, mask=is_row, other=0)
    ends = tl.load(query_start_loc + rows + 1, mask=is_row, other=0)
    lens = tl.load(seq_lens + rows, mask=is_row & (ends > starts), other=0)
    tiles = tl.cdiv(lens, KEYS)
    least = tl.minimum(tl.maximum(tl.max(tiles, axis=0) // _TILES_OF_ONE, 1), _LEAST)
    stretch = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), target), least)
    # A quarter of a stretch goes with the one before it.
    return tl.where(tiles > 0, tl.maximum((4 * tiles + 3 * stretch) // (4 * stretch), 1), 0)


@triton.jit
def _first_part(splits: tl.tensor, row: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Number of the row's first part among those of all rows that are cut."""
    return tl.sum(tl.where((tl.arange(0, ROWS) < row) & (splits > 1), splits, 0), axis=0)


@triton.jit
def _row_of(token: tl.tensor, query_start_loc: tl.tensor, num_rows: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """The row that a token, counted from the first row's first, belongs to; `num_rows` or more if none."""
    rows = tl.arange(0, ROWS)
    ends = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=_NO_TOKEN)
    return tl.sum((ends <= token + tl.load(query_start_loc)).to(tl.int32), axis=0)


@triton.jit
def _of(values: tl.tensor, row: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """`values[row]`, 0 where there is no such row."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == row, values, 0), axis=0)


@triton.jit
def find_work(
    item: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_rows: tl.tensor,
    target: tl.tensor,
    top_k: tl.tensor,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SELECTED: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
) -> tl.tensor:
    """Find what an item of the launch is.

    Args:
        item: its number.
        query_start_loc: [rows + 1] int32.
        seq_lens: [rows] int32.
        num_rows: rows.
        target: stretches wanted of all rows together; if SELECTED, of each token.
        top_k: most tokens of a selection; used if SELECTED.
        ROWS: a power of two that holds the rows.
        KEYS: keys of a tile.
        SELECTED: whether each token attends to keys of its own, so that an item is a stretch of a token.
        MAY_SPLIT: whether rows are cut at all.

    Returns:
        Row, its or the token's first token, number of tokens (0: nothing to do), number of keys, the stretch, how many
        the row has, and the number of the part that it leaves if it has several.
    """
    origin = tl.load(query_start_loc)
    if SELECTED:
        token = item // target
        split = item % target
        own_splits = target
        part = item
        row = _row_of(token, query_start_loc, num_rows, ROWS)
        is_row = row < num_rows
        num_tokens = is_row.to(tl.int32)
        after = tl.load(query_start_loc + row + 1, mask=is_row, other=0) - origin - token
        num_keys = tl.minimum(tl.load(seq_lens + row, mask=is_row, other=0) - after + 1, top_k)
    else:
        row = item
        split = 0
        own_splits = 1
        part = 0
        if MAY_SPLIT:
            splits = _cut(query_start_loc, seq_lens, num_rows, target, ROWS, KEYS)
            ends = tl.cumsum(splits, axis=0)
            row = tl.sum((ends <= item).to(tl.int32), axis=0)
            own_splits = _of(splits, row, ROWS)
            split = item - _of(ends - splits, row, ROWS)
            part = _first_part(splits, row, ROWS) + split
        is_row = row < num_rows
        start = tl.load(query_start_loc + row, mask=is_row, other=0)
        num_tokens = tl.load(query_start_loc + row + 1, mask=is_row, other=0) - start
        token = start - origin
        num_keys = tl.load(seq_lens + row, mask=is_row, other=0)
    return row, token, num_tokens, num_keys, split, own_splits, part


@triton.jit
def leave_part(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    first_row: tl.tensor,
    attended: tl.tensor,
    lse: tl.tensor,
    is_row: tl.tensor,
    TILE_ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
) -> None:
    """Store a part, normalized, and the logarithm to base 2 of its weight."""
    kept = first_row.to(tl.int64) + tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, LATENT_WIDTH)
    places = partial + kept[:, None] * LATENT + columns[None, :]
    tl.store(places, attended, mask=is_row[:, None] & (columns < LATENT)[None, :])
    tl.store(partial_lse + kept, lse, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "target", "top_k", "row_tiles"])
def add_parts(
    output: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_rows: tl.tensor,
    target: tl.tensor,
    row_tiles: tl.tensor,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    SELECTED: tl.constexpr,
) -> None:
    """Add the parts of one query head of one token, where there are several."""
    number = tl.program_id(0)
    if SELECTED:
        token = tl.program_id(1)
        num_tokens = (_row_of(token, query_start_loc, num_rows, ROWS) < num_rows).to(tl.int32)
        num_parts = target
        first = token * target
    else:
        row = tl.program_id(1)
        splits = _cut(query_start_loc, seq_lens, num_rows, target, ROWS, KEYS)
        num_parts = _of(splits, row, ROWS)
        first = _first_part(splits, row, ROWS)
        start = tl.load(query_start_loc + row)
        num_tokens = tl.load(query_start_loc + row + 1) - start
        token = start - tl.load(query_start_loc)
    if number >= num_tokens * HEADS or num_parts <= 1:
        return
    columns = tl.arange(0, LATENT_WIDTH)
    highest = MASKED_SCORE
    total = 0.0
    summed = tl.zeros([LATENT_WIDTH], tl.float32)
    for part in tl.range(0, num_parts):
        tile = (first + part) * row_tiles + number // TILE_ROWS
        kept = tile.to(tl.int64) * TILE_ROWS + number % TILE_ROWS
        lse = tl.load(partial_lse + kept)
        numbers = tl.load(partial + kept * LATENT + columns, mask=columns < LATENT, other=0.0)
        higher = tl.maximum(highest, lse)
        weight = tl.exp2(lse - higher)
        fade = tl.exp2(highest - higher)
        total = total * fade + weight
        summed = summed * fade + weight * numbers
        highest = higher
    places = output + (token.to(tl.int64) * HEADS + number) * LATENT + columns
    tl.store(places, (summed / tl.maximum(total, _LEAST_TOTAL)).to(output.dtype.element_ty), mask=columns < LATENT)
