# mypy: disallow-untyped-decorators=False
"""`gdn.causal_conv` in Triton: a program takes a stretch of a row's tokens and some channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from atom_gdn.kernels.triton_parts import find_row, num_places, padded, silu, unit_inner_stride

__all__ = ["ConvTiles", "causal_conv"]


@dataclass(frozen=True)
class ConvTiles:
    """How the work is cut.

    Attributes:
        tokens: of a program.
        channels: of a program.
        num_warps: of a program.
    """

    tokens: int = 32
    channels: int = 128
    num_warps: int = 4


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_start_loc_host: np.ndarray[Any, Any],
    state_read: torch.Tensor,
    state_write: torch.Tensor,
    max_query_len: int,
    tiles: ConvTiles | None = None,
) -> None:
    """See `reference.causal_conv`.

    Args:
        x: as there.
        weight: as there.
        conv_state: as there.
        out: as there.
        query_start_loc: as there.
        query_start_loc_host: as there.
        state_read: as there.
        state_write: as there.
        max_query_len: as there.
        tiles: how to cut the work; the default when `None`.
    """
    num_rows, num_tokens = len(query_start_loc_host) - 1, int(query_start_loc_host[-1] - query_start_loc_host[0])
    if num_tokens == 0:
        return
    tiles = tiles or ConvTiles()
    x = unit_inner_stride(x)
    channels, taps = weight.shape
    grid = (triton.cdiv(channels, tiles.channels), num_places(num_tokens, num_rows, tiles.tokens))
    _convolve_rows[grid](
        x,
        weight.contiguous(),
        conv_state,
        out,
        query_start_loc,
        state_read,
        state_write,
        num_rows,
        x.stride(0),
        out.stride(0),
        conv_state.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        STATES=padded(taps - 1),
        ROWS=padded(num_rows, 16),
        TOKENS=tiles.tokens,
        WIDTH=tiles.channels,
        num_warps=tiles.num_warps,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _convolve_rows(
    x: tl.tensor,
    weight: tl.tensor,
    conv_state: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    state_read: tl.tensor,
    state_write: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    slot_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    STATES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row, start, end, stretch = find_row(query_start_loc, tl.program_id(1), num_rows, TOKENS, ROWS)
    num_tokens = end - start
    if stretch * TOKENS >= num_tokens:
        return
    channels = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    present = channels < CHANNELS
    tokens = stretch * TOKENS + tl.arange(0, TOKENS)
    inputs = x + start.to(tl.int64) * x_stride
    total = tl.zeros([TOKENS, WIDTH], tl.float32)
    for tap in tl.static_range(TAPS):
        index = tokens + tap - (TAPS - 1)
        factor = tl.load(weight + channels * TAPS + tap, mask=present, other=0.0).to(tl.float32)
        there = ((index >= 0) & (index < num_tokens))[:, None] & present[None, :]
        new = tl.load(inputs + index[:, None].to(tl.int64) * x_stride + channels[None, :], mask=there, other=0.0)
        total += factor[None, :] * new.to(tl.float32)
    slot = tl.load(state_read + row)
    past = conv_state + tl.maximum(slot, 0) * slot_stride
    if stretch == 0:
        for tap in tl.static_range(TAPS - 1):
            old_index = tokens + tap
            old_factor = tl.load(weight + channels * TAPS + tap, mask=present, other=0.0).to(tl.float32)
            is_old = ((old_index < TAPS - 1) & (slot >= 0))[:, None] & present[None, :]
            old = tl.load(past + old_index[:, None] * CHANNELS + channels[None, :], mask=is_old, other=0.0)
            total += old_factor[None, :] * old.to(tl.float32)
    results = out + (start + tokens)[:, None].to(tl.int64) * out_stride + channels[None, :]
    written = (tokens < num_tokens)[:, None] & present[None, :]
    tl.store(results, silu(total).to(out.dtype.element_ty), mask=written)
    if stretch == 0:
        # The program that reads a row's state is also the one that writes it: they may be one slot.
        places = tl.arange(0, STATES)
        kept_index = num_tokens - (TAPS - 1) + places
        kept = (places < TAPS - 1)[:, None] & present[None, :]
        is_last = (kept_index >= 0)[:, None]
        last = tl.load(
            inputs + kept_index[:, None].to(tl.int64) * x_stride + channels[None, :], mask=kept & is_last, other=0.0
        )
        old_rows = past + (num_tokens + places)[:, None].to(tl.int64) * CHANNELS + channels[None, :]
        older = tl.load(old_rows, mask=kept & (slot >= 0) & (kept_index < 0)[:, None], other=0.0)
        values = tl.where(is_last, last.to(tl.float32), older.to(tl.float32)).to(conv_state.dtype.element_ty)
        target = tl.load(state_write + end - 1)
        tl.debug_barrier()
        places_out = conv_state + tl.maximum(target, 0) * slot_stride + places[:, None] * CHANNELS + channels[None, :]
        tl.store(places_out, values, mask=kept & (target >= 0))
