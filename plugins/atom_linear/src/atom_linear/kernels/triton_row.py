# mypy: disallow-untyped-decorators=False
"""`core.linear_row` in Triton: a program sums the products of one or two rows of the weight.

The weight is read once, in order, and by as many programs as it has rows: enough loads are under way to keep the memory
busy, and no program has to wait for another. As an operator of torch it stays whole where its callers are compiled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["linear_row"]

_COLUMNS = 1024


@torch.library.custom_op(
    "atom_linear::row", mutates_args=(), schema="(Tensor states, Tensor weight, Tensor? bias) -> Tensor"
)
def linear_row(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return one row times a weight, accumulated in float32.

    Args:
        states: [..., in_features], one row.
        weight: [out_features, in_features]; rows contiguous.
        bias: [out_features].

    Returns:
        [..., out_features], in the dtype of `states`.
    """
    out_features, in_features = weight.shape
    states = states.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = states.new_empty((*states.shape[:-1], out_features))
    rows = 1 if in_features > _COLUMNS else 2
    _linear_row[(triton.cdiv(out_features, rows),)](
        states,
        weight,
        out if bias is None else bias,
        out,
        out_features,
        weight.stride(0),
        IN_FEATURES=in_features,
        ROWS=rows,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(in_features)),
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=3,
    )
    return out


@linear_row.register_fake
def _fake_row(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What comes out, without computing it."""
    return states.new_empty((*states.shape[:-1], weight.shape[0]))


@triton.jit
def _linear_row(
    states: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    out_features: tl.tensor,
    weight_stride: tl.tensor,
    IN_FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < out_features
    starts = weight + rows.to(tl.int64) * weight_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, IN_FEATURES, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        if IN_FEATURES % COLUMNS == 0:
            row = tl.load(states + columns).to(tl.float32)
            factors = tl.load(starts[:, None] + columns[None, :], mask=is_row[:, None], other=0.0)
        else:
            inside = columns < IN_FEATURES
            row = tl.load(states + columns, mask=inside, other=0.0).to(tl.float32)
            factors = tl.load(starts[:, None] + columns[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        total += factors.to(tl.float32) * row[None, :]
    sums = tl.sum(total, 1)
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, sums.to(out.dtype.element_ty), mask=is_row)
