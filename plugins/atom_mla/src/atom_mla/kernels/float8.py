"""Numbers of a float8 cache: e4m3 with a factor per token."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LARGEST", "LEAST_SCALE", "quantize"]

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
LEAST_SCALE = 1e-30
"""A token of zeros has this factor, so that nothing divides by 0."""


def quantize(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize tokens so that each one's largest value is the largest number.

    Args:
        tokens: [num_tokens, width].

    Returns:
        [num_tokens, width] float8_e4m3fn, and [num_tokens] float32 factors.
    """
    wide = tokens.float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp_(min=LEAST_SCALE)
    numbers = (wide / scale[:, None]).clamp_(-LARGEST, LARGEST)
    return numbers.to(torch.float8_e4m3fn), scale
