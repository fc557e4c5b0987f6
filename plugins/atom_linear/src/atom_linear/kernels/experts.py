"""`core.expert_rows`; importable where Triton is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["expert_rows"]


def expert_rows(states: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Return rows times the weights of their experts; see the op's reference.

    Args:
        states: [rows, in_features].
        weight: [num_experts, out_features, in_features].
        experts: [pairs].

    Returns:
        [pairs, out_features]
    """
    from atom_linear.kernels import triton_experts

    product: Tensor = triton_experts.expert_rows(states, weight, experts)
    return product
