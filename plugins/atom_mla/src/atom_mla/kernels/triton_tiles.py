# mypy: disallow-untyped-decorators=False
"""What the Triton kernels of this package share: widths, masks, places in the cache.

Scores are exponents of 2, so that the softmax is `exp2`. Inside the kernels a masked score is a large negative number
instead of minus infinity: a query that saw only masked keys so far holds garbage, which the first visible key wipes
out with a factor of exactly 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["LOG2E", "MASKED_SCORE", "load_columns", "num_multiprocessors", "padded", "unit_inner_stride"]

LOG2E = tl.constexpr(1.4426950408889634)
MASKED_SCORE = tl.constexpr(-1.0e30)

_MIN_DOT = 16
"""Least size of a matrix product's operands."""


def padded(size: int) -> int:
    """Return the least power of two that holds `size` and suits a matrix product."""
    power: int = triton.next_power_of_2(size)
    return max(_MIN_DOT, power)


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter's CPU counts as four."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def unit_inner_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy where the last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit
def load_columns(
    base: tl.tensor,
    offsets: tl.tensor,
    present: tl.tensor,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Load columns FIRST ... FIRST + SIZE of the rows at `offsets`, [rows, WIDTH]; the rest and rows not present are 0.

    Rows that are not present are not read: memory that nothing wrote may hold NaN, which no weight of 0 removes.
    """
    columns = tl.arange(0, WIDTH)
    pointers = base + offsets[:, None] + (FIRST + columns)[None, :]
    if SIZE == WIDTH:
        tile = tl.load(pointers, mask=present[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=present[:, None] & (columns < SIZE)[None, :], other=0.0)
    return tile
