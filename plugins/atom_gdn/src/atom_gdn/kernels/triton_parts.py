# mypy: disallow-untyped-decorators=False
"""What the Triton kernels of this package share: gates, convolution of one token, rows cut into chunks.

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
    "EPSILON",
    "MIN_DOT",
    "convolve_token",
    "find_row",
    "gates",
    "keep_inputs",
    "num_multiprocessors",
    "num_places",
    "padded",
    "query_and_key",
    "silu",
    "suits_bulk",
    "unit_factor",
    "unit_inner_stride",
]

MIN_DOT = 16
"""Least size of a matrix product's operands."""
EPSILON = tl.constexpr(L2_EPSILON)


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
    return tl.rsqrt(tl.sum(x * x, AXIS) + EPSILON)


@triton.jit
def convolve_token(
    inputs: tl.tensor,
    stride: tl.tensor,
    past: tl.tensor,
    has_past: tl.tensor,
    weight: tl.tensor,
    channels: tl.tensor,
    present: tl.tensor,
    token: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Convolve some channels of the row's token number `token`, then SiLU; float32, rounded like the inputs.

    Args:
        inputs: the row's first token.
        stride: between tokens.
        past: [TAPS - 1, CHANNELS], the inputs before the first token.
        has_past: whether there are such; zeros if not.
        weight: [CHANNELS, TAPS].
        channels: which ones.
        present: which of them there are.
        token: number in the row.
        CHANNELS: of a token.
        TAPS: of the convolution.
    """
    total = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        index = token + tap - (TAPS - 1)
        factor = tl.load(weight + channels * TAPS + tap, mask=present, other=0.0).to(tl.float32)
        new = tl.load(inputs + index * stride + channels, mask=present & (index >= 0), other=0.0).to(tl.float32)
        if tap < TAPS - 1:
            old_row = past + (index + TAPS - 1) * CHANNELS
            new += tl.load(old_row + channels, mask=present & (index < 0) & has_past, other=0.0).to(tl.float32)
        total += factor * new
    return silu(total).to(inputs.dtype.element_ty).to(tl.float32)


@triton.jit
def query_and_key(
    inputs: tl.tensor,
    stride: tl.tensor,
    past: tl.tensor,
    has_past: tl.tensor,
    weight: tl.tensor,
    q_channels: tl.tensor,
    k_channels: tl.tensor,
    present: tl.tensor,
    token: tl.tensor,
    query_scale: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """A token's unit query times `query_scale`, its unit key, and the product of the two."""
    query = convolve_token(inputs, stride, past, has_past, weight, q_channels, present, token, CHANNELS, TAPS)
    key = convolve_token(inputs, stride, past, has_past, weight, k_channels, present, token, CHANNELS, TAPS)
    query = query * (unit_factor(query, 0) * query_scale)
    key = key * unit_factor(key, 0)
    return query, key, tl.sum(query * key, 0)


@triton.jit
def keep_inputs(
    inputs: tl.tensor,
    stride: tl.tensor,
    past: tl.tensor,
    has_past: tl.tensor,
    conv_state: tl.tensor,
    slot_stride: tl.tensor,
    targets: tl.tensor,
    num_tokens: tl.tensor,
    head: tl.tensor,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    CHANNELS: tl.constexpr,
    OWN_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    STATES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write the last TAPS - 1 inputs after every token to the token's slot, for all channels of the program.

    Only the first EARLY tokens have inputs from before the row among them. These are read before anything is written,
    because a token's slot may be the one that the row came from.
    """
    number = tl.arange(0, OWN_CHANNELS)
    own_v = number - 2 * HEAD_K
    k_part = (number % HEAD_K) + head * HEAD_K + number // HEAD_K * (K_HEADS * HEAD_K)
    channels = tl.where(own_v < 0, k_part, 2 * K_HEADS * HEAD_K + head * (GROUP * HEAD_V) + own_v)
    present = own_v < GROUP * HEAD_V
    places = tl.arange(0, STATES)
    is_place = (places < TAPS - 1)[:, None] & present[None, :]

    tokens = tl.arange(0, EARLY)
    index = tokens[:, None] + places[None, :] + 1
    kept = (tokens < num_tokens)[:, None, None] & is_place[None, :, :]
    is_new = (index >= TAPS - 1)[:, :, None]
    columns = channels[None, None, :]
    new = tl.load(inputs + (index - (TAPS - 1))[:, :, None] * stride + columns, mask=kept & is_new, other=0.0)
    is_old = kept & (index < TAPS - 1)[:, :, None] & has_past
    old = tl.load(past + index[:, :, None] * CHANNELS + columns, mask=is_old, other=0.0)
    values = tl.where(is_new, new.to(tl.float32), old.to(tl.float32)).to(conv_state.dtype.element_ty)
    slots = tl.load(targets + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    # Every read of the old inputs, by any thread and also for the convolutions, comes before the first write.
    tl.debug_barrier()
    into = tl.maximum(slots, 0)[:, None, None] * slot_stride + places[None, :, None] * CHANNELS + columns
    tl.store(conv_state + into, values, mask=kept & (slots >= 0)[:, None, None])
    for token in range(EARLY, num_tokens):
        rows = token + 1 + places - (TAPS - 1)
        later = tl.load(inputs + rows[:, None] * stride + channels[None, :], mask=is_place, other=0.0)
        target = tl.load(targets + token).to(tl.int64)
        own = conv_state + tl.maximum(target, 0) * slot_stride + places[:, None] * CHANNELS + channels[None, :]
        tl.store(own, later.to(conv_state.dtype.element_ty), mask=is_place & (target >= 0))


def suits_bulk(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can address the rows of a matrix: 16 bytes aligned, the last dimension contiguous."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.itemsize % 16 == 0
    return aligned and tensor.stride(-1) == 1
