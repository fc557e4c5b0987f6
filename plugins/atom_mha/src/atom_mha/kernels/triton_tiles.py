# mypy: disallow-untyped-decorators=False
"""What the Triton kernels of this package share: widths, masks, tiles of the cache.

Scores are exponents of 2, so that the softmax is `exp2`. Inside the kernels a masked score is a large negative number
instead of minus infinity: a row that saw only masked keys so far holds garbage, which the first visible key wipes out
with a factor of exactly 0. Every row sees a key in the end, its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "LOG2E",
    "MASKED_SCORE",
    "blocks_of",
    "first_visible",
    "key_offsets",
    "load_rows",
    "num_multiprocessors",
    "padded",
    "score_factors",
    "split_width",
    "unit_inner_stride",
]

LOG2E = tl.constexpr(1.4426950408889634)
MASKED_SCORE = tl.constexpr(-1.0e30)

_MIN_DOT = 16
"""Least size of a matrix product's operands."""


def padded(size: int) -> int:
    """Return the least power of two that holds `size` and suits a matrix product."""
    power: int = triton.next_power_of_2(size)
    return max(_MIN_DOT, power)


def split_width(size: int) -> tuple[int, int]:
    """Cut a head's size into two powers of two: 192 becomes 128 and 64, where padding would give 256.

    Returns:
        Two widths that hold `size` together; the second is 0 where one is enough.
    """
    first = max(_MIN_DOT, 1 << (size.bit_length() - 1))
    return first, padded(size - first) if size > first else 0


def score_factors(scaling: float, soft_cap: float | None) -> tuple[float, float]:
    """Return what products of queries and keys are multiplied by, before the soft-cap and after it."""
    if soft_cap is None:
        return scaling * LOG2E.value, 0.0
    return scaling * 2.0 * LOG2E.value / soft_cap, soft_cap * LOG2E.value


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter's CPU counts as two."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def unit_inner_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy where the last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit
def first_visible(positions: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """First key that the token at each position sees; WINDOW and CHUNK are 0 for none."""
    first = positions * 0
    if WINDOW > 0:
        first = tl.maximum(first, positions - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, positions // CHUNK * CHUNK)
    return first


@triton.jit
def blocks_of(
    table: tl.tensor, keys: tl.tensor, num_keys: tl.tensor, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr
) -> tl.tensor:
    """Blocks that hold the keys below `num_keys`, 0 for others.

    Loops ask for the next tile's blocks before they use this tile's, so that nobody waits for the table.
    """
    blocks = keys
    if PAGED:
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < num_keys, other=0)
    return blocks


@triton.jit
def key_offsets(
    blocks: tl.tensor,
    tile: tl.tensor,
    strides: tl.tensor,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
) -> tl.tensor:
    """Where the keys of a tile are, int64 elements from the start of the cache, or of the row's first key.

    `strides` are those of blocks and slots. Tiles of whole blocks begin where a block does.
    """
    if PAGED:
        slots = tl.arange(0, KEYS) % BLOCK_SIZE
        if KEYS % BLOCK_SIZE != 0:
            slots = (tile + tl.arange(0, KEYS)) % BLOCK_SIZE
        offsets = blocks.to(tl.int64) * strides[0] + slots * strides[1]
    else:
        offsets = (tile + tl.arange(0, KEYS)).to(tl.int64) * strides[1]
    return offsets


@triton.jit
def load_rows(
    base: tl.tensor,
    offsets: tl.tensor,
    present: tl.tensor,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Load columns FIRST ... FIRST + WIDTH of rows at `offsets`; columns past SIZE and rows not present are 0.

    Rows that are not present are not read if MASKED: memory that nothing wrote may hold NaN, which a weight of 0 would
    not remove.
    """
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + offsets[:, None] + columns[None, :]
    if FIRST + WIDTH > SIZE:
        if MASKED:
            tile = tl.load(pointers, mask=present[:, None] & (columns < SIZE)[None, :], other=0.0)
        else:
            tile = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        if MASKED:
            tile = tl.load(pointers, mask=present[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile
