# mypy: disallow-untyped-decorators=False
"""What the Triton kernels of this package share: gates, rows cut into chunks, sizes.

Rows of any length are cut into chunks without a table from the host: the chunks of row r, whose first token is s tokens
behind the first row's, take the places from s // chunk + r on. Rows cannot overlap there, because a row has at most one
chunk more than the places that its tokens fill; a few places stay empty.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_gdn.kernels.reference import L2_EPSILON

__all__ = [
    "MIN_DOT",
    "find_row",
    "gates",
    "num_multiprocessors",
    "num_places",
    "on_hopper",
    "padded",
    "silu",
    "suits_bulk",
    "unit_factor",
    "unit_inner_stride",
]

MIN_DOT = 16
"""Least size of a matrix product's operands."""
_EPSILON = tl.constexpr(L2_EPSILON)


def padded(size: int, least: int = 1) -> int:
    """Return the least power of two that holds `size`, not below `least`."""
    power: int = triton.next_power_of_2(size)
    return max(least, power)


def num_places(num_tokens: int, num_rows: int, chunk_tokens: int) -> int:
    """Return how many places the chunks of `num_rows` rows with `num_tokens` tokens take."""
    return num_tokens // chunk_tokens + num_rows


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter's CPU counts as one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_hopper(device: torch.device) -> bool:
    """Whether a device has the matrix units of compute capability 9."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def unit_inner_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy where the last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit
def find_row(
    query_start_loc: tl.tensor, place: tl.tensor, num_rows: tl.tensor, CHUNK: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """Find the row of a place.

    Returns:
        Its number, first token and end, and the number of the place's chunk in it, which may be past the end.
    """
    rows = tl.arange(0, ROWS)
    first = tl.load(query_start_loc)
    starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
    ends = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=0)
    before = (rows < num_rows) & ((starts - first) // CHUNK + rows <= place)
    row = tl.sum(before.to(tl.int32), 0) - 1
    start = tl.sum(tl.where(rows == row, starts, 0), 0)
    end = tl.sum(tl.where(rows == row, ends, 0), 0)
    return row, start, end, place - (start - first) // CHUNK - row


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """Give x sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gates(a: tl.tensor, b: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor, beta_scale: tl.tensor) -> tl.tensor:
    """Logarithm of the decay, and update strength, of numbers in float32.

    The softplus is exact also where it is small: a slow decay adds up over many tokens. There log(1 + y) is
    2 artanh(y / (2 + y)) by its series.
    """
    x = a + dt_bias
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    series = 2.0 * s * (1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0))))
    softplus = tl.maximum(x, 0.0) + tl.where(y < 0.25, series, tl.log(1.0 + y))
    return -tl.exp(a_log) * softplus, beta_scale / (1.0 + tl.exp(-b))


@triton.jit
def unit_factor(x: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """What makes vectors along AXIS, in float32, unit vectors."""
    return tl.rsqrt(tl.sum(x * x, AXIS) + _EPSILON)


def suits_bulk(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can address the rows of a matrix: 16 bytes aligned, the last dimension contiguous."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.itemsize % 16 == 0
    return aligned and tensor.stride(-1) == 1
