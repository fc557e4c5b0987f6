"""Keys and values as float8_e4m3fn with one scale per token and head: what is kept is number times scale."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "COPY_BLOCK_SIZE",
    "COPY_BYTES",
    "COPY_ROWS",
    "LARGEST",
    "LEAST_SCALE",
    "SCALE_FACTOR",
    "copy_bytes",
    "dequantize",
    "quantize",
]

LARGEST = 448.0
"""Largest finite number of float8_e4m3fn."""
SCALE_FACTOR = 1.0 / LARGEST
LEAST_SCALE = 1.0e-12
"""Scale of a head that is all zeros."""
COPY_BYTES = 2**28
"""Most bytes of keys and values that a kernel holds as numbers of 16 bit; see `triton_dequantize`."""
COPY_ROWS = 64
"""Most rows whose keys and values these are."""
COPY_BLOCK_SIZE = 128
"""Tokens of their blocks."""


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


def copy_bytes(seq_len: int, head_dim: int, v_head_dim: int) -> int:
    """Bytes of one key head of a row of `seq_len` tokens, in 16 bit."""
    return -(-seq_len // COPY_BLOCK_SIZE) * COPY_BLOCK_SIZE * (head_dim + v_head_dim) * 2
