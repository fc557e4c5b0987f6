# mypy: disallow-untyped-decorators=False
"""The root-mean-square norm of a single row, and the sum in front of it, as one launch that begins early.

What it saves is not its own time but that of the product behind it, which loads its weights meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_linear.kernels.early import can_start_early

__all__ = ["rms_norm"]


@torch.library.custom_op(
    "atom_linear::rms_norm",
    mutates_args=(),
    schema="(Tensor states, Tensor? other, Tensor weight, Tensor? eps_of, float eps) -> (Tensor, Tensor)",
)
def rms_norm(
    states: torch.Tensor, other: torch.Tensor | None, weight: torch.Tensor, eps_of: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `states + other` and its norm `weight * (x / sqrt(mean(x ** 2) + eps))`, rounded as in plain torch.

    Args:
        states: [..., size], one row.
        other: of the same shape and dtype.
        weight: [size].
        eps_of: on the CPU, the eps, where it is known when the step is captured only.
        eps: where it is known before.

    Returns:
        The sum, empty without `other`, and the norm, both in the dtype of `states`.
    """
    states = states.contiguous()
    other = None if other is None else other.contiguous()
    size = weight.shape[0]
    width = triton.next_power_of_2(size)
    normed = torch.empty_like(states)
    summed = states.new_empty(0) if other is None else torch.empty_like(states)
    early = can_start_early(states.device)
    _rms_norm[(1,)](
        states,
        states if other is None else other,
        weight,
        summed,
        normed,
        eps if eps_of is None else eps_of.item(),
        SIZE=size,
        WIDTH=width,
        HAS_OTHER=other is not None,
        EARLY=early,
        num_warps=min(16, max(4, width // 512)),
        **({"launch_pdl": True} if early else {}),
    )
    return summed, normed


@rms_norm.register_fake
def _fake_norm(
    states: torch.Tensor, other: torch.Tensor | None, weight: torch.Tensor, eps_of: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out, without computing it."""
    return states.new_empty(0) if other is None else torch.empty_like(states), torch.empty_like(states)


@triton.jit
def _rms_norm(
    states: tl.tensor,
    other: tl.tensor,
    weight: tl.tensor,
    summed: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    columns = tl.arange(0, WIDTH)
    inside = columns < SIZE
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(states + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_OTHER:
        row += tl.load(other + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(summed.dtype.element_ty)
        tl.store(summed + columns, rounded, mask=inside)
        row = rounded.to(tl.float32)
    units = row * tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps)
    units = units.to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + columns, (units * factors).to(normed.dtype.element_ty), mask=inside)
