# mypy: disallow-untyped-decorators=False
"""The parts of a row's attention that several programs of `triton_decode` leave in memory, and their sum."""

from __future__ import annotations

import triton
import triton.language as tl

from atom_mha.kernels.triton_tiles import MASKED_SCORE

__all__ = ["add_parts", "leave_part", "parts_at_a_time"]

_PARTS = 8
"""Most parts that it takes at a time."""
_STAGES = tl.constexpr(6)
"""Times that it has in flight, and one."""


def parts_at_a_time(numbers: int, rows_width: int, v_width: int) -> int:
    """Parts of [rows_width, v_width] numbers that are added at a time, `numbers` in all."""
    return max(1, min(_PARTS, numbers // (rows_width * v_width)))


@triton.jit
def leave_part(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    part: tl.tensor,
    attended: tl.tensor,
    lse: tl.tensor,
    is_row: tl.tensor,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
) -> None:
    """Store a part, normalized, and the logarithm to base 2 of its weight."""
    rows = part * ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, V_WIDTH)
    places = partial + rows[:, None] * V_HEAD_DIM + columns[None, :]
    tl.store(places, attended, mask=is_row[:, None] & (columns < V_HEAD_DIM)[None, :])
    tl.store(partial_lse + rows, lse, mask=is_row)


@triton.jit
def add_parts(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    num_parts: tl.tensor,
    is_row: tl.tensor,
    ROWS: tl.constexpr,
    ROWS_WIDTH: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Add what other programs stored: [parts, ROWS, V_HEAD_DIM] weighted by [parts, ROWS]; [ROWS_WIDTH, V_WIDTH].

    The loads go past the level of cache that is not kept coherent between multiprocessors.
    """
    rows = tl.arange(0, ROWS_WIDTH)
    columns = tl.arange(0, V_WIDTH)
    # Every PARTS-th part has its own sum, so that nothing crosses threads before the end.
    highest = tl.full([PARTS, ROWS_WIDTH], MASKED_SCORE, tl.float32)
    total = tl.zeros([PARTS, ROWS_WIDTH], tl.float32)
    summed = tl.zeros([PARTS, ROWS_WIDTH, V_WIDTH], tl.float32)
    for first in tl.range(0, num_parts, PARTS, num_stages=_STAGES):
        parts = first + tl.arange(0, PARTS)[:, None]
        is_part = (parts < num_parts) & is_row[None, :]
        kept = parts * ROWS + rows[None, :]
        lse = tl.load(partial_lse + kept, mask=is_part, other=MASKED_SCORE, cache_modifier=".cg")
        numbers = tl.load(
            partial + kept[:, :, None] * V_HEAD_DIM + columns[None, None, :],
            mask=is_part[:, :, None] & (columns < V_HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(highest, lse)
        weights = tl.exp2(lse - higher)
        fade = tl.exp2(highest - higher)
        total = total * fade + weights
        summed = summed * fade[:, :, None] + weights[:, :, None] * numbers
        highest = higher
    fade = tl.exp2(highest - tl.max(highest, axis=0)[None, :])
    summed = tl.sum(summed * fade[:, :, None], axis=0)
    return summed / tl.sum(total * fade, axis=0)[:, None]
