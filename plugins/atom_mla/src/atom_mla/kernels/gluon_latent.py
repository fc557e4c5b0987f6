# mypy: disallow-untyped-decorators=False
"""`mla.decode` and `mla.attend_selected` of many heads on Hopper, in Gluon, the layer of Triton below its scheduler.

The same walk as `triton_latent`, with copies and products in an order that Triton's own pipeline does not find: the
next tile is copied as soon as the product of weights and values has let go of its memory, part by part between the
parts of the product that gives the scores. Triton's interpreter does not run Gluon; on the CPU the tests run
`triton_latent`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from atom_mla.kernels.triton_stretches import LEAST_TILES, add_parts, find_work
from atom_mla.kernels.triton_tiles import LOG2E, num_multiprocessors, unit_inner_stride

__all__ = ["attend_selected", "decode"]

Host = np.ndarray[Any, Any]

_ROWS = 64
"""Query heads times tokens of a program."""
_KEYS = 64
"""Keys of a tile."""
_WORK = 8
"""Numbers that describe an item of work."""


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
    heads = query.shape[1]
    output = query.new_zeros(query.shape[0], heads, value_dim)
    num_rows = seq_lens.shape[0]
    if num_rows == 0 or query.shape[0] == 0 or max_query_len == 0:
        return output
    row_tiles = triton.cdiv(heads * max_query_len, _ROWS)
    target = max(1, num_multiprocessors(query.device) // row_tiles)
    may_split = max_seq_len > LEAST_TILES * _KEYS and target > 1
    items = num_rows + target if may_split else num_rows
    # As in `triton_latent`.
    parts = 8 * target // 5 + 1 if may_split else 0
    _launch(
        query, query_start_loc, cache, block_tables, query_start_loc, seq_lens, output, scaling, row_tiles, items,
        target, max_query_len, parts, selected=False,
    )  # fmt: skip
    return output


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
    num_tokens, heads = query.shape[:2]
    output = query.new_zeros(num_tokens, heads, value_dim)
    if num_tokens == 0 or seq_lens.shape[0] == 0:
        return output
    row_tiles = triton.cdiv(heads, _ROWS)
    free = num_multiprocessors(query.device) // (row_tiles * num_tokens)
    splits = max(1, min(free, selected.shape[1] // (LEAST_TILES * _KEYS)))
    _launch(
        query, unit_inner_stride(selected), cache, block_tables, query_start_loc, seq_lens, output, scaling, row_tiles,
        num_tokens * splits, splits, 1, num_tokens * splits if splits > 1 else 0, selected=True,
    )  # fmt: skip
    return output


def _launch(
    query: torch.Tensor,
    chosen: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    scaling: float,
    row_tiles: int,
    items: int,
    target: int,
    max_query_len: int,
    num_parts: int,
    selected: bool,
) -> None:
    heads, latent = query.shape[1], output.shape[2]
    may_split = num_parts > 0
    part_rows = num_parts * row_tiles * _ROWS
    partial = torch.empty(part_rows * (latent + 1), dtype=torch.float32, device=query.device)
    partial_lse = partial[part_rows * latent :]
    query = unit_inner_stride(query)
    work = torch.empty(items, _WORK, dtype=torch.int32, device=query.device)
    num_rows = seq_lens.shape[0]
    rows_width = triton.next_power_of_2(num_rows)
    top_k = chosen.shape[1] if selected else 0
    _list_work[(items,)](
        work, query_start_loc, seq_lens, num_rows, target, top_k,
        ROWS=rows_width, KEYS=_KEYS, SELECTED=selected, MAY_SPLIT=may_split, num_warps=1,
    )  # fmt: skip
    # Programs that share latents are neighbours.
    _attend[(items * row_tiles,)](
        query,
        chosen,
        cache,
        output,
        partial,
        partial_lse,
        block_tables,
        work,
        scaling * LOG2E.value,
        row_tiles,
        query.stride()[:2],
        chosen.stride(0),
        block_tables.stride(0),
        HEADS=heads,
        BLOCK_SIZE=cache.shape[1],
        STRIDE=cache.stride(1),
        LATENT=latent,
        ROPE=cache.shape[2] - latent,
        SELECTED=selected,
        num_warps=8,
    )
    if may_split:
        jobs = query.shape[0] if selected else num_rows
        add_parts[(heads * max_query_len, jobs)](
            output, partial, partial_lse, query_start_loc, seq_lens, num_rows, target, row_tiles, ROWS=rows_width,
            HEADS=heads, TILE_ROWS=_ROWS, KEYS=_KEYS, LATENT=latent, LATENT_WIDTH=latent, SELECTED=selected,
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "target", "top_k"])
def _list_work(
    work: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_rows: tl.tensor,
    target: tl.tensor,
    top_k: tl.tensor,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SELECTED: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
) -> None:
    """Write what `find_work` says of every item."""
    item = tl.program_id(0)
    row, token, num_tokens, num_keys, split, own_splits, part = find_work(
        item, query_start_loc, seq_lens, num_rows, target, top_k, ROWS, KEYS, SELECTED, MAY_SPLIT
    )
    num_tiles = tl.cdiv(num_keys, KEYS)
    splits = tl.maximum(own_splits, 1)
    work += item * 8
    tl.store(work, row)
    tl.store(work + 1, token)
    tl.store(work + 2, num_tokens)
    tl.store(work + 3, num_keys)
    tl.store(work + 4, split * num_tiles // splits * KEYS)
    tl.store(work + 5, tl.minimum((split + 1) * num_tiles // splits * KEYS, num_keys))
    tl.store(work + 6, own_splits)
    tl.store(work + 7, part)


@gluon.jit(do_not_specialize=["row_tiles", "table_stride"])
def _attend(
    query: tl.tensor,
    chosen: tl.tensor,
    cache: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    block_tables: tl.tensor,
    work: tl.tensor,
    score_factor: tl.tensor,
    row_tiles: tl.tensor,
    query_strides: tl.tensor,
    chosen_stride: tl.tensor,
    table_stride: tl.tensor,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STRIDE: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    SELECTED: gl.constexpr,
) -> None:
    ROWS: gl.constexpr = 64
    KEYS: gl.constexpr = 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PART: gl.constexpr = 64
    # A warp copies 64 numbers of eight keys.
    COPIES: gl.constexpr = gl.BlockedLayout([2, 8], [4, 8], [8, 1], [1, 0])
    DTYPE: gl.constexpr = query.dtype.element_ty

    item = gl.program_id(0) // row_tiles
    row_tile = gl.program_id(0) % row_tiles
    first_row = row_tile * ROWS
    work += item * 8
    num_tokens = gl.load(work + 2)
    if first_row >= num_tokens * HEADS:
        return
    row = gl.load(work)
    token = gl.load(work + 1)
    num_keys = gl.load(work + 3)
    begin = gl.load(work + 4)
    end = gl.load(work + 5)
    own_splits = gl.load(work + 6)
    part = gl.load(work + 7)

    q_latent = gl.allocate_shared_memory(DTYPE, [ROWS, LATENT], SHARED)
    q_rope = gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], SHARED)
    latents = gl.allocate_shared_memory(DTYPE, [2, KEYS, LATENT], SHARED)
    ropes = gl.allocate_shared_memory(DTYPE, [2, KEYS, ROPE], SHARED)
    weights_shared = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], SHARED)

    query += token.to(gl.int64) * query_strides[0]
    _copy_queries(q_latent, query, query_strides, first_row, num_tokens, 0, ROWS, LATENT, HEADS, COPIES)
    _copy_queries(q_rope, query, query_strides, first_row, num_tokens, LATENT, ROWS, ROPE, HEADS, COPIES)

    table = block_tables + row.to(gl.int64) * table_stride
    chosen += token.to(gl.int64) * chosen_stride
    slots = _slots(chosen, table, begin, end, KEYS, BLOCK_SIZE, SELECTED, COPIES)
    _copy_keys(latents.index(0), cache, slots, 0, LATENT, STRIDE, COPIES)
    _copy_keys(ropes.index(0), cache, slots, LATENT, ROPE, STRIDE, COPIES)
    async_copy.commit_group()
    slots = _slots(chosen, table, begin + KEYS, end, KEYS, BLOCK_SIZE, SELECTED, COPIES)

    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    last_key = end - 1 + rows * 0
    if not SELECTED:
        last_key = gl.minimum(num_keys - num_tokens + rows // HEADS, end - 1)
    highest = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
    totals = gl.full([ROWS, KEYS], 0.0, gl.float32, SCORES)
    no_scores = gl.full([ROWS, KEYS], 0.0, gl.float32, SCORES)
    attended = warpgroup_mma_init(gl.full([ROWS, LATENT], 0.0, gl.float32, VALUES))
    number = begin * 0
    # At least one tile, if of nothing: a loop that may not run keeps the assembler from overlapping its products.
    stop = gl.maximum(end, begin + 1)
    gl.assume(begin < stop)
    for tile in range(begin, stop, KEYS):
        # When these waits are over everywhere, this tile is there, and the values of the one before are done with: the
        # next one takes their place while scores are computed.
        async_copy.wait_group(0)
        values = warpgroup_mma_wait(0, deps=(attended,))
        fence_async_shared()
        gl.thread_barrier()
        latent = latents.index(number)
        next_latent = latents.index(1 - number)
        scores = warpgroup_mma(q_rope, ropes.index(number).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        _copy_keys(ropes.index(1 - number), cache, slots, LATENT, ROPE, STRIDE, COPIES)
        # Copies between parts of the product: those behind all of it would wait until it is nearly done.
        for n in gl.static_range(LATENT // PART):
            query_part = q_latent.slice(n * PART, PART, dim=1)
            latent_part = latent.slice(n * PART, PART, dim=1).permute((1, 0))
            scores = warpgroup_mma(query_part, latent_part, scores, is_async=True)
            _copy_keys(next_latent.slice(n * PART, PART, dim=1), cache, slots, n * PART, PART, STRIDE, COPIES)
        async_copy.commit_group()
        slots = _slots(chosen, table, tile + 2 * KEYS, end, KEYS, BLOCK_SIZE, SELECTED, COPIES)

        keys = tile + columns
        visible = keys[None, :] <= last_key[:, None]
        if SELECTED:
            visible = visible & (gl.load(chosen + keys, mask=keys < end, other=-1) >= 0)[None, :]
        products = warpgroup_mma_wait(0, deps=(scores,))
        products = gl.where(visible, products * score_factor, -1.0e30)
        higher = gl.maximum(highest, gl.max(products, axis=1))
        weights = gl.exp2(products - higher[:, None])
        fade = gl.exp2(highest - higher)
        highest = higher
        totals = totals * fade[:, None] + weights
        weights_shared.store(weights.to(DTYPE))
        fence_async_shared()
        gl.thread_barrier()
        values = values * gl.convert_layout(fade, gl.SliceLayout(1, VALUES))[:, None]
        attended = warpgroup_mma(weights_shared, latent, values, is_async=True)
        number = 1 - number
    values = warpgroup_mma_wait(0, deps=(attended,))
    async_copy.wait_group(0)

    total = gl.maximum(gl.sum(totals, axis=1), 1e-37)
    values = values / gl.convert_layout(total, gl.SliceLayout(1, VALUES))[:, None]
    value_rows = gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
    value_columns = gl.arange(0, LATENT, gl.SliceLayout(0, VALUES))
    is_row = (first_row + value_rows < num_tokens * HEADS)[:, None]
    if own_splits > 1:
        first_place = ((part * row_tiles + row_tile) * ROWS).to(gl.int64)
        places = (first_place + value_rows)[:, None] * LATENT + value_columns[None, :]
        gl.store(partial + places, values, mask=is_row)
        lse_places = first_place + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        gl.store(partial_lse + lse_places, highest + gl.log2(total), mask=rows < num_tokens * HEADS)
    else:
        # Rows of the output are query heads of tokens.
        places = (token.to(gl.int64) * HEADS + first_row + value_rows)[:, None] * LATENT + value_columns[None, :]
        gl.store(output + places, values.to(DTYPE), mask=is_row)


@gluon.jit
def _copy_queries(
    target: tl.tensor,
    query: tl.tensor,
    strides: tl.tensor,
    first_row: tl.tensor,
    num_tokens: tl.tensor,
    FIRST: gl.constexpr,
    ROWS: gl.constexpr,
    SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:
    """Copy columns FIRST ... FIRST + SIZE of ROWS query heads of tokens; zeros where there are none."""
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = FIRST + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
    offsets = rows // HEADS * strides[0] + rows % HEADS * strides[1]
    present = (rows < num_tokens * HEADS)[:, None]
    async_copy.async_copy_global_to_shared(target, query + offsets[:, None] + columns[None, :], mask=present)


@gluon.jit
def _copy_keys(
    target: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
    STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:
    """Copy columns FIRST ... FIRST + SIZE of the keys at `slots`; zeros for slots of -1."""
    columns = FIRST + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
    pointers = cache + (slots.to(gl.int64) * STRIDE)[:, None] + columns[None, :]
    async_copy.async_copy_global_to_shared(target, pointers, mask=(slots >= 0)[:, None])


@gluon.jit
def _slots(
    chosen: tl.tensor,
    table: tl.tensor,
    tile: tl.tensor,
    end: tl.tensor,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    SELECTED: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> tl.tensor:
    """Slots of the KEYS keys from `tile` on, or of the selected tokens with these numbers; -1 from `end` on."""
    positions = tile + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    present = positions < end
    if SELECTED:
        positions = gl.load(chosen + positions, mask=present, other=-1)
        present = positions >= 0
    blocks = gl.load(table + positions // BLOCK_SIZE, mask=present, other=0)
    return gl.where(present, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
