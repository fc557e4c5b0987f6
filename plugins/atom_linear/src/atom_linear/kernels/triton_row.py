# mypy: disallow-untyped-decorators=False
"""`core.linear_row` in Triton: a program sums the products of a few rows of the weight.

The weight is read once, in order, and by so many programs that enough loads are under way to keep the memory busy. In a
captured step programs start while the launch in front of them still runs, and load the first of their weights before
they wait for it: weights were there before the capture. As an operator of torch it stays whole where its callers are
compiled; there, `joins` makes a sum or a gate behind it part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom_linear.kernels.early import can_start_early

__all__ = ["RowTiles", "choose_tiles", "launch", "linear_row"]


@dataclass(frozen=True)
class RowTiles:
    """How the work is cut.

    Attributes:
        rows: of the weight, summed by a program.
        columns: of the weight, taken at a time; the first are loaded before the wait.
        num_warps: warps of a program.
    """

    rows: int
    columns: int
    num_warps: int = 4


def choose_tiles(in_features: int) -> RowTiles:
    """Choose by measured shapes."""
    if in_features <= 1024:
        return RowTiles(2, triton.next_power_of_2(in_features))
    return RowTiles(1, 1024 if in_features < 4096 else 4096)


@torch.library.custom_op(
    "atom_linear::row",
    mutates_args=(),
    schema="(Tensor states, Tensor weight, Tensor? bias, Tensor? residual=None, bool gated=False) -> Tensor",
)
def linear_row(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Return one row times a weight, accumulated in float32.

    Args:
        states: [..., in_features], one row.
        weight: [out_features, in_features]; rows contiguous.
        bias: [out_features].
        residual: added to what is returned; of its shape and dtype.
        gated: return `silu(first half) * second half` of the product.

    Returns:
        [..., out_features], or half as many where it is gated; in the dtype of `states`.
    """
    states = states.contiguous()
    early = weight.stride(1) == 1 and can_start_early(states.device)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = states.new_empty((*states.shape[:-1], weight.shape[0] // (2 if gated else 1)))
    residual = None if residual is None else residual.contiguous()
    launch(states, weight, bias, residual, gated, out, early, choose_tiles(weight.shape[1]))
    return out


def launch(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
    out: torch.Tensor,
    early: bool,
    tiles: RowTiles,
) -> None:
    """Fill `out`; arguments as of `linear_row`, contiguous.

    Args:
        states: as there.
        weight: as there.
        bias: as there.
        residual: as there.
        gated: as there.
        out: what is returned there.
        early: start while the launch in front still runs; the weight is not its output.
        tiles: how to cut the work.
    """
    in_features = weight.shape[1]
    out_features = out.shape[-1]
    _linear_row[(triton.cdiv(out_features, tiles.rows),)](
        states,
        weight,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        out_features,
        weight.stride(0),
        IN_FEATURES=in_features,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        EARLY=early,
        num_warps=tiles.num_warps,
        **({"launch_pdl": True} if early else {}),
    )


@linear_row.register_fake
def _fake_row(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """What comes out, without computing it."""
    return states.new_empty((*states.shape[:-1], weight.shape[0] // (2 if gated else 1)))


@triton.jit
def _linear_row(
    states: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    out_features: tl.tensor,
    weight_stride: tl.tensor,
    IN_FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < out_features
    starts = weight + rows.to(tl.int64) * weight_stride
    second_starts = weight + (rows + out_features).to(tl.int64) * weight_stride
    columns = tl.arange(0, COLUMNS)
    present = is_row[:, None] & (columns < IN_FEATURES)[None, :]
    factors = tl.load(starts[:, None] + columns[None, :], mask=present, other=0.0)
    second_factors = factors
    if GATED:
        second_factors = tl.load(second_starts[:, None] + columns[None, :], mask=present, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        # Not before the wait: what starts next may read what was written before the launch that this one waits for.
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(states + columns, mask=columns < IN_FEATURES, other=0.0).to(tl.float32)
    total = factors.to(tl.float32) * row[None, :]
    second_total = total
    if GATED:
        second_total = second_factors.to(tl.float32) * row[None, :]
    for first in tl.static_range(COLUMNS, IN_FEATURES, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        present = is_row[:, None] & (columns < IN_FEATURES)[None, :]
        row = tl.load(states + columns, mask=columns < IN_FEATURES, other=0.0).to(tl.float32)
        factors = tl.load(starts[:, None] + columns[None, :], mask=present, other=0.0)
        total += factors.to(tl.float32) * row[None, :]
        if GATED:
            second_factors = tl.load(second_starts[:, None] + columns[None, :], mask=present, other=0.0)
            second_total += second_factors.to(tl.float32) * row[None, :]
    sums = tl.sum(total, 1)
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        second_sums = tl.sum(second_total, 1)
        if HAS_BIAS:
            second_sums += tl.load(bias + out_features + rows, mask=is_row, other=0.0).to(tl.float32)
        sums = sums * tl.sigmoid(sums) * second_sums
    if HAS_RESIDUAL:
        sums += tl.load(residual + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, sums.to(out.dtype.element_ty), mask=is_row)
