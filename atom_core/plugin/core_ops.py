"""Ops that the core itself defines; any plugin may bring kernels for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_core.plugin.ops import Op

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CORE", "CORE_OPS", "expert_rows", "linear_row", "sample_expert_rows", "sample_rows"]

CORE = "core"
"""What the names of these ops begin with, where those of a plugin begin with its name."""

CORE_OPS = (
    Op(
        name="core.linear_row",
        reference="atom_core.plugin.core_ops:linear_row",
        tolerance={"float32": (2e-5, 2e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)},
        sample_inputs="atom_core.plugin.core_ops:sample_rows",
        summary="a linear layer of a single row, bound by reading the weight",
    ),
    Op(
        name="core.expert_rows",
        reference="atom_core.plugin.core_ops:expert_rows",
        tolerance={"float32": (2e-5, 2e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)},
        sample_inputs="atom_core.plugin.core_ops:sample_expert_rows",
        summary="few rows, each times the weight of its expert, bound by reading these weights",
    ),
)


def linear_row(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return one row times a weight.

    Args:
        states: [..., in_features], one row.
        weight: [out_features, in_features].
        bias: [out_features].

    Returns:
        [..., out_features], in the dtype of `states`.
    """
    from torch.nn import functional

    return functional.linear(states, weight, bias)


def sample_rows(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Make arguments of `linear_row` for tests: odd and even sizes, with and without bias."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    cases: list[dict[str, Any]] = []
    for out_features, in_features in ((5, 3), (1, 64), (300, 1024), (7, 1025), (64, 2048)):
        for bias in (None, draw(out_features)):
            weight = draw(out_features, in_features) / in_features**0.5
            cases.append({"states": draw(1, 1, in_features), "weight": weight, "bias": bias})
    return cases


def expert_rows(states: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Return rows times the weights of their experts.

    Args:
        states: [rows, in_features]; pairs that follow one another share a row where there are fewer rows than pairs.
        weight: [num_experts, out_features, in_features], of any strides.
        experts: [pairs], a multiple of the rows; a pair whose expert is not among the `num_experts` gets zeros.

    Returns:
        [pairs, out_features], in the dtype of `states`.
    """
    import torch

    rows = states.repeat_interleave(experts.shape[0] // states.shape[0], dim=0)
    chosen = weight[experts.clamp(0, weight.shape[0] - 1)]
    product = torch.bmm(chosen, rows.unsqueeze(2)).squeeze(2)
    present = (experts >= 0) & (experts < weight.shape[0])
    return torch.where(present.unsqueeze(1), product, 0)


def sample_expert_rows(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Make arguments of `expert_rows` for tests: shared and own rows, experts that many rows chose, absent experts."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    cases: list[dict[str, Any]] = []
    for num_rows, share, num_experts, out_features, in_features in (
        (1, 6, 64, 40, 64),
        (16, 1, 4, 33, 130),
        (5, 4, 3, 64, 257),
        (40, 2, 2, 8, 16),
    ):
        states = torch.randn(num_rows, in_features, generator=generator)
        weight = torch.randn(num_experts, out_features, in_features, generator=generator) / in_features**0.5
        experts = torch.randint(0, num_experts + 1, (num_rows * share,), generator=generator)
        transposed = weight.mT.contiguous().mT
        for laid_out in (weight, transposed):
            case = {"states": states.to(device, dtype), "weight": laid_out.to(device, dtype)}
            cases.append({**case, "experts": experts.to(device)})
    return cases
