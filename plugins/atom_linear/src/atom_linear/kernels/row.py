"""`core.linear_row`; importable where Triton is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["linear_row"]


def linear_row(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return one row times a weight; see the op's reference.

    Args:
        states: [..., in_features], one row.
        weight: [out_features, in_features].
        bias: [out_features].

    Returns:
        [..., out_features]
    """
    from atom_linear.kernels import triton_row

    row: Tensor = triton_row.linear_row(states, weight, bias)
    return row
