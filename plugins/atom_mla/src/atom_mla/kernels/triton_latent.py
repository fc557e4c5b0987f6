# mypy: disallow-untyped-decorators=False
"""Absorbed queries over cached latents in Triton: `mla.decode` and `mla.attend_selected`.

How the work is cut and launched; `triton_latent_program` is what a program does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from atom_mla.kernels.triton_latent_program import attend
from atom_mla.kernels.triton_stretches import LEAST_TILES, add_parts
from atom_mla.kernels.triton_tiles import LOG2E, num_multiprocessors, padded, unit_inner_stride

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
    attend[(items * row_tiles,)](
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
