"""Ops that the core itself defines; any plugin may bring kernels for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_core.plugin.ops import Op

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CORE", "CORE_OPS", "linear_row", "sample_rows"]

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
