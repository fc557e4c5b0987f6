# mypy: disallow-untyped-decorators=False
"""Which program of `triton_decode` attends to which keys: a list made on the device, once per step and mask.

The rows' lengths are known on the device only, and a captured graph sees new ones in every replay. So the number of
programs depends on the number of rows alone, and a small kernel cuts the rows' keys into about equal stretches for
them: short rows stay whole, a long row among short ones is shared by many programs, padding rows get none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from atom_mha.kernels.triton_tiles import first_visible

__all__ = ["Schedule", "make_schedule", "read_item"]

_ITEMS_PER_PROGRAM = 16
_FRACTIONS = tl.constexpr(32)
_FEW_KEYS, _MANY_KEYS = 256, 1024
"""Keys of a stretch below which more programs than multiprocessors do not pay, for few rows and for many."""


@dataclass(frozen=True)
class Schedule:
    """Items that cover every key of every row once; see `read_item`.

    Attributes:
        items: [8, num_items] int32.
        arrived: [num_rows * counters] int32, counters that are 0 between launches.
    """

    items: torch.Tensor
    arrived: torch.Tensor

    @property
    def num_items(self) -> int:
        """Length of the list, unused items at its end included."""
        return self.items.shape[1]


def make_schedule(
    scratch: dict[Any, Any],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int | None,
    chunk: int | None,
    *,
    keys: int,
    block_size: int,
    few: bool,
    few_items: int,
    most_items: int,
    counters: int,
) -> Schedule:
    """Return the step's schedule, made by the first layer that asks.

    Args:
        scratch: where the step keeps it. A capture makes its own, which every replay then makes anew.
        query_start_loc: [rows + 1] int32, first token of each row and the end of the last.
        seq_lens: [rows] int32, keys of each row.
        window: as in `reference.decode`.
        chunk: as in `reference.decode`.
        keys: keys of a tile; stretches are whole tiles.
        block_size: tokens per block; stretches start at blocks.
        few: there are fewer rows than `few_items`: their items run in one round, so their number is kept below
            `most_items`. Items of many rows run in several, whose later ones even out the first; each row may have one
            more.
        few_items: items that give every multiprocessor a program; more do not pay for stretches of few keys.
        most_items: items that long rows are cut into.
        counters: counters per row.
    """
    num_rows = seq_lens.shape[0]
    capturing = query_start_loc.is_cuda and torch.cuda.is_current_stream_capturing()
    key = ("schedule", capturing, window, chunk, keys, block_size, few_items, most_items, counters)
    found = scratch.get(key)
    if found is None:
        num_items = max(num_rows, most_items) if few else num_rows + most_items
        found = Schedule(
            torch.empty(8, num_items, dtype=torch.int32, device=seq_lens.device),
            torch.empty(num_rows * counters, dtype=torch.int32, device=seq_lens.device),
        )
        _schedule[(triton.cdiv(num_items, _ITEMS_PER_PROGRAM),)](
            found.items,
            found.arrived,
            query_start_loc,
            seq_lens,
            num_rows,
            num_items,
            few_items,
            most_items,
            counters,
            KEYS=keys,
            BLOCK_SIZE=block_size,
            WINDOW=window or 0,
            CHUNK=chunk or 0,
            ROWS=triton.next_power_of_2(num_rows),
            ITEMS=_ITEMS_PER_PROGRAM,
            WORTHWHILE=max(1, (_FEW_KEYS if few else _MANY_KEYS) // keys),
            ONE_ROUND=few,
            num_warps=4,
        )
        scratch[key] = found
    schedule: Schedule = found
    return schedule


@triton.jit
def read_item(items: tl.tensor, item: tl.tensor, num_items: tl.tensor) -> tl.tensor:
    """Read an item, all of it at once: every load that waits for another one takes most of a microsecond.

    Returns:
        Its row, its first key, the key after its last, into how many items the row's keys are cut (0 in unused
        items), the first of these items; and the row's first token, number of tokens and first position.
    """
    row = tl.load(items + item)
    begin = tl.load(items + num_items + item)
    end = tl.load(items + 2 * num_items + item)
    splits = tl.load(items + 3 * num_items + item)
    first_item = tl.load(items + 4 * num_items + item)
    start = tl.load(items + 5 * num_items + item)
    num_tokens = tl.load(items + 6 * num_items + item)
    position = tl.load(items + 7 * num_items + item)
    return row, begin, end, splits, first_item, start, num_tokens, position


@triton.jit
def _keys_of(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """First key that each row sees, at a block's start, the number of its keys from there on, and its tokens."""
    is_row = rows < num_rows
    start = tl.load(query_start_loc + rows, mask=is_row, other=0)
    num_tokens = tl.load(query_start_loc + rows + 1, mask=is_row, other=0) - start
    seq_len = tl.load(seq_lens + rows, mask=is_row, other=0)
    first_key = first_visible(seq_len - num_tokens, WINDOW, CHUNK) // BLOCK_SIZE * BLOCK_SIZE
    return first_key, tl.where(num_tokens > 0, seq_len - first_key, 0), start, num_tokens


@triton.jit(do_not_specialize=["num_rows", "num_items", "few_items", "most_items", "counters"])
def _schedule(
    items: tl.tensor,
    arrived: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_rows: tl.tensor,
    num_items: tl.tensor,
    few_items: tl.tensor,
    most_items: tl.tensor,
    counters: tl.tensor,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    WORTHWHILE: tl.constexpr,
    ONE_ROUND: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    _, num_keys, _, _ = _keys_of(query_start_loc, seq_lens, rows, num_rows, BLOCK_SIZE, WINDOW, CHUNK)
    # The longest stretch is counted in fractions of a tile: items of a row differ by a tile, and nobody waits for more.
    tiles = tl.cdiv(num_keys, KEYS) * _FRACTIONS
    total = tl.sum(tiles, axis=0)
    longest = tl.maximum(tl.cdiv(total, most_items), tl.minimum(tl.cdiv(total, few_items), WORTHWHILE * _FRACTIONS))
    longest = tl.maximum(longest, _FRACTIONS)
    if ONE_ROUND:
        whole = tl.max(tiles, axis=0)
        while (longest < whole) & (tl.sum(tl.cdiv(tiles, longest), axis=0) > most_items):
            longest += tl.cdiv(longest, 32)
    splits = tl.cdiv(tiles, longest)
    ends = tl.cumsum(splits, axis=0)

    own = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    before = ends[None, :] <= own[:, None]
    row = tl.sum(before.to(tl.int32), axis=1)
    first_item = tl.sum(tl.where(before, splits[None, :], 0), axis=1)
    first_key, num_keys, start, num_tokens = _keys_of(
        query_start_loc, seq_lens, row, num_rows, BLOCK_SIZE, WINDOW, CHUNK
    )
    tiles = tl.cdiv(num_keys, KEYS)
    splits = tl.cdiv(tiles * _FRACTIONS, longest)
    some = tl.maximum(splits, 1)
    begin = first_key + (own - first_item) * tiles // some * KEYS
    end = tl.minimum(first_key + (own - first_item + 1) * tiles // some * KEYS, first_key + num_keys)
    is_item = own < num_items
    tl.store(items + own, row, mask=is_item)
    tl.store(items + num_items + own, begin, mask=is_item)
    tl.store(items + 2 * num_items + own, end, mask=is_item)
    tl.store(items + 3 * num_items + own, splits, mask=is_item)
    tl.store(items + 4 * num_items + own, first_item, mask=is_item)
    tl.store(items + 5 * num_items + own, start, mask=is_item)
    tl.store(items + 6 * num_items + own, num_tokens, mask=is_item)
    tl.store(items + 7 * num_items + own, first_key + num_keys - num_tokens, mask=is_item)

    for counter in range(counters):
        tl.store(arrived + own * counters + counter, tl.zeros([ITEMS], tl.int32), mask=own < num_rows)
