"""Keys and values as float8_e4m3fn with one scale per token and head: what is kept is number times scale."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LARGEST", "LEAST_SCALE", "SCALE_FACTOR", "dequantize", "quantize"]

LARGEST = 448.0
"""Largest finite number of float8_e4m3fn."""
SCALE_FACTOR = 1.0 / LARGEST
LEAST_SCALE = 1.0e-12
"""Scale of a head that is all zeros."""


def quantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return [..., dim] as float8_e4m3fn, and the scales [...] float32 that make each head's largest number 448.

    Products and quotients of float32 alone, so that every device gives the same bits.
    """
    wide = numbers.float()
    scale = (wide.abs().amax(dim=-1) * SCALE_FACTOR).clamp_min(LEAST_SCALE)
    return (wide / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def dequantize(numbers: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return cached [..., dim] in `dtype`; `scale` [...] is `None` for a cache that is not quantized."""
    if scale is None:
        return numbers.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (numbers.to(wide) * scale.unsqueeze(-1)).to(dtype)
