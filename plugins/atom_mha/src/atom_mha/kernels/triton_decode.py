# mypy: disallow-untyped-decorators=False
"""`mha.decode` in Triton: paged attention of few query tokens, split over the context.

A program takes one key head of one row and a stretch of its keys. The query heads of that key head, times the row's
tokens, are the rows of its matrix products, so that every key is read once. Where a row's keys are cut into several
stretches, each program leaves its part in memory, and the last to arrive adds the parts up (flash-decoding, and the
fix-up of stream-k, arXiv 2301.03598), so that no second launch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from atom_mha.kernels.triton_attend import attend, unit_queries
from atom_mha.kernels.triton_early import can_start_early
from atom_mha.kernels.triton_parts import add_parts, leave_part, parts_at_a_time
from atom_mha.kernels.triton_schedule import make_schedule, read_item
from atom_mha.kernels.triton_tiles import (
    LOG2E,
    MASKED_SCORE,
    blocks_of,
    first_visible,
    load_rows,
    num_multiprocessors,
    padded,
    score_factors,
    split_width,
    unit_inner_stride,
)

__all__ = ["DecodeTiles", "choose_tiles", "decode"]

_MAX_TILE_ROWS = 64
"""Most query heads times tokens of a program; more are spread over several."""
_MANY_KEYS = 65536


@dataclass(frozen=True)
class DecodeTiles:
    """How the work is cut.

    Attributes:
        keys: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight, and one.
        programs: programs per multiprocessor that long rows are cut into.
        max_registers: bound of registers per thread; none when `None`.
        part_numbers: numbers of other programs' parts that are added at a time. Their memory also bounds how many
            programs a multiprocessor holds, and with that how unevenly they may be spread.
    """

    keys: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 8
    max_registers: int | None = None
    part_numbers: int = 2048


def decode(
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
    """Rows of few query tokens attend over the paged cache; see `reference.decode`."""
    num_rows, num_kv_heads = seq_lens.shape[0], k_cache.shape[2]
    if num_rows == 0 or max_query_len == 0:
        return
    query = unit_inner_stride(query)
    head_dim, v_head_dim = k_cache.shape[3], v_cache.shape[3]
    group = query.shape[1] // num_kv_heads
    rows = group * max_query_len
    tile_rows = min(padded(rows), _MAX_TILE_ROWS)
    head_tiles = num_kv_heads * triton.cdiv(rows, tile_rows)
    multiprocessors = num_multiprocessors(query.device)
    few = num_rows * head_tiles <= multiprocessors
    keys = num_rows * max_seq_len
    tiles = choose_tiles(query.dtype, k_cache.dtype, head_dim + v_head_dim, few, keys)
    known = len(scratch)
    schedule = make_schedule(
        scratch,
        query_start_loc,
        seq_lens,
        window,
        chunk,
        keys=tiles.keys,
        block_size=k_cache.shape[1],
        few=few,
        few_items=max(1, multiprocessors // head_tiles),
        most_items=max(1, multiprocessors * tiles.programs // head_tiles),
        counters=head_tiles,
    )
    # Not right behind the launch that makes the schedule: a program reads its item before it waits.
    early = len(scratch) == known and can_start_early(query.device)
    num_items = schedule.num_items
    kept_rows = min(rows, tile_rows)
    parts = head_tiles * num_items * kept_rows
    partial = query.new_empty(parts * (v_head_dim + 1), dtype=torch.float32)
    low, high = split_width(head_dim)
    score_factor, cap_factor = score_factors(scaling, soft_cap)
    v_width = padded(v_head_dim) if v_scale is None else 2 * padded(v_head_dim // 2)
    if v_scale is not None:
        v_cache = v_cache.view(torch.int16)
    kept_width = triton.next_power_of_2(kept_rows)
    _decode[(head_tiles, num_items)](
        query,
        k_cache,
        v_cache,
        k_scale if k_scale is not None else partial,
        v_scale if v_scale is not None else partial,
        out,
        partial,
        partial[parts * v_head_dim :],
        schedule.arrived,
        schedule.items,
        num_items,
        block_tables,
        sinks if sinks is not None else partial,
        score_factor,
        cap_factor,
        query.stride()[:2],
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        k_scale.transpose(1, 2).stride() if k_scale is not None else (0, 0, 0),
        out.stride()[:2],
        block_tables.stride(0),
        GROUP=group,
        HEAD_TILES=head_tiles // num_kv_heads,
        TILE_ROWS=tile_rows,
        KEPT_ROWS=kept_rows,
        KEPT_WIDTH=kept_width,
        KEYS=tiles.keys,
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_DIM=head_dim,
        LOW=low,
        HIGH=high,
        V_HEAD_DIM=v_head_dim,
        V_WIDTH=v_width,
        WINDOW=window or 0,
        CHUNK=chunk or 0,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=k_scale is not None,
        ALIKE=k_scale is None and k_cache.stride() == v_cache.stride(),
        NATIVE=query.device.type == "cuda",
        PARTS=parts_at_a_time(tiles.part_numbers, kept_width, v_width),
        EARLY=early,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
        **({"launch_pdl": True} if early else {}),
    )


def choose_tiles(query_dtype: torch.dtype, cache_dtype: torch.dtype, widths: int, few: bool, keys: int) -> DecodeTiles:
    """Choose by measured shapes.

    Args:
        query_dtype: of queries.
        cache_dtype: of keys and values.
        widths: sum of the two head sizes.
        few: whether the rows alone do not give every multiprocessor a program.
        keys: most keys of all rows.
    """
    # A second program per multiprocessor costs 2 us, which it regains where there are many keys.
    own_round = 1 if keys <= _MANY_KEYS else 2
    if query_dtype == torch.float32 or cache_dtype == torch.float32:
        return DecodeTiles(keys=32, num_stages=2, programs=own_round if few else 8)
    if cache_dtype.itemsize == 1:
        if widths > 384 or (few and own_round == 1):
            return DecodeTiles(programs=own_round if few else 6, part_numbers=1024)
        keys = 64 if widths > 128 else 128
        return DecodeTiles(keys=keys, num_warps=2, programs=4 if few else 6, part_numbers=1024)
    if widths < 256:
        return DecodeTiles(num_warps=2, num_stages=4, programs=own_round if few else 8)
    if widths > 256:
        return DecodeTiles(keys=32, programs=own_round if few else 8)
    if few:
        return DecodeTiles(programs=own_round, part_numbers=1024 if own_round == 1 else 4096)
    return DecodeTiles(keys=32, num_warps=2, num_stages=4)


@triton.jit(do_not_specialize=["num_items", "table_stride"])
def _decode(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    arrived: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    block_tables: tl.tensor,
    sinks: tl.tensor,
    score_factor: tl.tensor,
    cap_factor: tl.tensor,
    query_strides: tl.tensor,
    k_strides: tl.tensor,
    v_strides: tl.tensor,
    scale_strides: tl.tensor,
    out_strides: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEPT_ROWS: tl.constexpr,
    KEPT_WIDTH: tl.constexpr,
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
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    item = tl.program_id(1)
    row, begin, end, own_splits, first_item, start, num_tokens, first_position = read_item(items, item, num_items)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) // HEAD_TILES
    first_row = tl.program_id(0) % HEAD_TILES * TILE_ROWS
    if (own_splits == 0) | (first_row >= num_tokens * GROUP):
        return

    # Before the queries: nobody waits for the table and for them one after the other.
    table = block_tables + row.to(tl.int64) * table_stride
    blocks = blocks_of(table, begin + tl.arange(0, KEYS), end, BLOCK_SIZE, True)
    rows = first_row + tl.arange(0, TILE_ROWS)
    tokens = rows // GROUP
    heads = head * GROUP + rows % GROUP
    is_row = tokens < num_tokens
    last_key = tl.minimum(first_position + tokens, end - 1)
    lower_key = first_visible(first_position + tokens, WINDOW, CHUNK)
    query_rows = tokens * query_strides[0] + heads * query_strides[1]
    query_start = query + start.to(tl.int64) * query_strides[0]
    q_low = load_rows(query_start, query_rows, is_row, 0, LOW, HEAD_DIM, True)
    q_high = q_low
    if HIGH > 0:
        q_high = load_rows(query_start, query_rows, is_row, LOW, HIGH, HEAD_DIM, True)
    V_NUMBERS: tl.constexpr = V_HEAD_DIM // 2 if HAS_SCALES else V_HEAD_DIM
    V_LOADS: tl.constexpr = V_WIDTH // 2 if HAS_SCALES else V_WIDTH
    row_factor = score_factor
    if HAS_SCALES and q_low.dtype != tl.float32:
        q_low, q_high, query_scale = unit_queries(q_low, q_high, HIGH)
        row_factor = (query_scale * score_factor)[:, None]

    highest = tl.full([TILE_ROWS], MASKED_SCORE, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS:
        if item == first_item:
            highest = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    attended = tl.zeros([TILE_ROWS, V_LOADS], tl.float32)
    attended_odd = attended
    k_head = k_cache + head * k_strides[2]
    v_head = v_cache + head * v_strides[2]
    k_scale += head * scale_strides[2]
    v_scale += head * scale_strides[2]

    attended, attended_odd, total, highest = attend(
        attended, attended_odd, total, highest, q_low, q_high, lower_key, last_key, begin, end, end,
        k_head, v_head, k_scale, v_scale, table, blocks, row_factor, cap_factor, k_strides, v_strides, scale_strides,
        KEYS, BLOCK_SIZE, HEAD_DIM, LOW, HIGH, V_NUMBERS, V_LOADS, WINDOW > 0 or CHUNK > 0,
        HAS_SOFT_CAP, HAS_SCALES, ALIKE, NATIVE, True, True,
    )  # fmt: skip
    if HAS_SCALES:
        attended = tl.interleave(attended, attended_odd)
    attended = attended / total[:, None]
    out_head = out + start.to(tl.int64) * out_strides[0] + head * GROUP * out_strides[1]
    if own_splits == 1:
        _store(out_head, out_strides, attended, rows, is_row, GROUP, V_HEAD_DIM, V_WIDTH)
        return
    # Parts of a row and head tile lie next to each other.
    first_part = tl.program_id(0).to(tl.int64) * num_items + first_item
    leave_part(
        partial, partial_lse, first_part + item - first_item, attended, highest + tl.log2(total), is_row,
        KEPT_ROWS, TILE_ROWS, V_HEAD_DIM, V_WIDTH,
    )  # fmt: skip
    # All of the program's stores come before its arrival, which one thread makes known.
    tl.debug_barrier()
    counter = arrived + row * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem="acq_rel") == own_splits - 1:
        tl.store(counter, 0)
        kept_rows = tl.arange(0, KEPT_WIDTH)
        is_kept = (kept_rows < KEPT_ROWS) & (first_row + kept_rows < num_tokens * GROUP)
        summed = add_parts(
            partial + first_part * KEPT_ROWS * V_HEAD_DIM, partial_lse + first_part * KEPT_ROWS, own_splits, is_kept,
            KEPT_ROWS, KEPT_WIDTH, V_HEAD_DIM, V_WIDTH, PARTS,
        )  # fmt: skip
        _store(out_head, out_strides, summed, first_row + kept_rows, is_kept, GROUP, V_HEAD_DIM, V_WIDTH)


@triton.jit
def _store(
    out_head: tl.tensor,
    strides: tl.tensor,
    attended: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
) -> None:
    """Store [rows, V_WIDTH]; row r is query head r % GROUP of the key head, of token r // GROUP."""
    columns = tl.arange(0, V_WIDTH)
    places = out_head + (rows // GROUP * strides[0] + rows % GROUP * strides[1])[:, None] + columns[None, :]
    tl.store(places, attended.to(out_head.dtype.element_ty), mask=is_row[:, None] & (columns < V_HEAD_DIM)[None, :])
