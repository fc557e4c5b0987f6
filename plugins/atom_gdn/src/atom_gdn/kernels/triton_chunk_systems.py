# mypy: disallow-untyped-decorators=False
"""What can be computed of chunks before the states in front of them are known; see `triton_chunks`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom_gdn.kernels.triton_parts import MIN_DOT, find_row, gates, padded, unit_factor

__all__ = ["CHUNK_TOKENS", "Solved", "SystemTiles", "solve"]

CHUNK_TOKENS = 64
LEAST_LOG_DECAY = tl.constexpr(-88.0)


@dataclass(frozen=True)
class SystemTiles:
    """How the work is cut.

    Attributes:
        num_warps: of a program.
        max_registers: of a thread; `None` for no bound.
    """

    num_warps: int = 4
    max_registers: int | None = 168


@dataclass(frozen=True)
class Solved:
    """What the scan needs of every chunk, by its place.

    Attributes:
        squares: [places, v_heads, 2, tokens, tokens], T and decayed, causal products of queries and keys, in the
            inputs' dtype.
        factors: [places, v_heads, 4, tokens] float32, by token: decay since the chunk's start times the key's norm
            factor; decay until its end times the same; decay since the start times the query's norm factor and scale;
            decay of the whole chunk.
        num_k_heads: heads of queries and keys.
    """

    squares: torch.Tensor
    factors: torch.Tensor
    num_k_heads: int

    @classmethod
    def empty(cls, qkv: torch.Tensor, places: int, v_heads: int, num_k_heads: int) -> Solved:
        """Make tensors for `places` chunks, with no particular content."""
        squares = qkv.new_empty((places, v_heads, 2, CHUNK_TOKENS, CHUNK_TOKENS))
        factors = qkv.new_empty((places, v_heads, 4, CHUNK_TOKENS), dtype=torch.float32)
        return cls(squares, factors, num_k_heads)


def solve(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    beta_scale: float,
    solved: Solved,
    head_k: int,
    query_start_loc: torch.Tensor,
    num_rows: int,
    places: range,
    tiles: SystemTiles,
) -> None:
    """Solve the triangular systems of some chunks.

    Args:
        qkv: [num_tokens, channels], the last dimension contiguous.
        a: [num_tokens, v_heads], decay before softplus.
        b: [num_tokens, v_heads], update strength before sigmoid.
        a_log: [v_heads].
        dt_bias: [v_heads].
        beta_scale: factor of the update strength.
        solved: of all chunks, written at the places.
        head_k: dimension of a key.
        query_start_loc: [num_rows + 1] int32.
        num_rows: rows.
        places: of the chunks, see `triton_parts`.
        tiles: how to cut the work.
    """
    v_heads = a.shape[1]
    k_heads = solved.num_k_heads
    _solve_chunks[(v_heads, len(places))](
        qkv,
        a,
        b,
        a_log,
        dt_bias,
        solved.squares,
        solved.factors,
        query_start_loc,
        num_rows,
        places.start,
        beta_scale,
        head_k**-0.5,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        K_HEADS=k_heads,
        GROUP=v_heads // k_heads,
        HEAD_K=head_k,
        K_WIDTH=padded(head_k, MIN_DOT),
        ROWS=padded(num_rows, 16),
        CHUNK=CHUNK_TOKENS,
        LEVELS=CHUNK_TOKENS.bit_length() - 1,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
    )


@triton.jit(do_not_specialize=["num_rows", "first_place"])
def _solve_chunks(
    qkv: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    squares: tl.tensor,
    factors: tl.tensor,
    query_start_loc: tl.tensor,
    num_rows: tl.tensor,
    first_place: tl.tensor,
    beta_scale: tl.tensor,
    query_scale: tl.tensor,
    qkv_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_K: tl.constexpr,
    K_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    v_head = tl.program_id(0)
    place = first_place + tl.program_id(1)
    _, start, end, chunk = find_row(query_start_loc, place, num_rows, CHUNK, ROWS)
    begin = start + chunk * CHUNK
    if begin >= end:
        return
    number = tl.arange(0, CHUNK)
    valid = number < end - begin
    first = begin.to(tl.int64)
    own_a = tl.load(a + first * a_stride + number * a_stride + v_head, mask=valid, other=0.0).to(tl.float32)
    own_b = tl.load(b + first * b_stride + number * b_stride + v_head, mask=valid, other=0.0).to(tl.float32)
    head_log = tl.load(a_log + v_head).to(tl.float32)
    head_bias = tl.load(dt_bias + v_head).to(tl.float32)
    head = v_head // GROUP
    keys = tl.arange(0, K_WIDTH)
    present = valid[:, None] & (keys < HEAD_K)[None, :]
    q_places = qkv + first * qkv_stride + (number * qkv_stride)[:, None] + (head * HEAD_K + keys)[None, :]
    key = tl.load(q_places + K_HEADS * HEAD_K, mask=present, other=0.0)
    query = tl.load(q_places, mask=present, other=0.0)
    log_decay, beta = gates(own_a, own_b, head_log, head_bias, beta_scale)
    beta = tl.where(valid, beta, 0.0)
    log_decay = tl.where(valid, log_decay, 0.0)
    if PRECISION == "ieee":
        # Differences of long sums lose digits in float32: the sum is kept in two parts.
        total = tl.cumsum(log_decay.to(tl.float64), 0)
        high = total.to(tl.float32)
        low = (total - high.to(tl.float64)).to(tl.float32)
    else:
        # Nothing is left after a decay of e^-88; the bound keeps the sums short, and so their differences exact enough.
        high = tl.cumsum(tl.maximum(log_decay, LEAST_LOG_DECAY), 0)
        low = high * 0.0

    columns = tl.trans(key)
    gram = tl.dot(key, columns, input_precision=PRECISION)
    k_factor = unit_factor(key.to(tl.float32), 1)
    causal = number[:, None] >= number[None, :]
    # Starting from what came out of a product keeps the registers' layout of products.
    between = tl.where(causal, 0.0, gram) + high[:, None]
    between = between - high[None, :]
    if PRECISION == "ieee":
        between += low[:, None] - low[None, :]
    between = tl.where(causal, tl.exp(between), 0.0)
    q_factor = unit_factor(query.to(tl.float32), 1) * query_scale
    reads = tl.dot(query, columns, input_precision=PRECISION) * q_factor[:, None] * k_factor[None, :]
    reads *= between
    spot = (place.to(tl.int64) * (K_HEADS * GROUP) + v_head) * CHUNK
    square = squares + spot * (2 * CHUNK) + number[:, None] * CHUNK + number[None, :]
    tl.store(square + CHUNK * CHUNK, reads.to(squares.dtype.element_ty))

    last = number == CHUNK - 1
    last_high = tl.sum(tl.where(last, high, 0.0), 0)
    last_low = tl.sum(tl.where(last, low, 0.0), 0)
    since = tl.exp(high)
    until = tl.exp((last_high - high) + (last_low - low))
    own_factors = factors + spot * 4 + number
    tl.store(own_factors, since * k_factor)
    tl.store(own_factors + CHUNK, until * k_factor)
    tl.store(own_factors + 2 * CHUNK, since * q_factor)
    tl.store(own_factors + 3 * CHUNK, tl.exp(last_high) + tl.zeros([CHUNK], tl.float32))

    gram *= (k_factor * -beta)[:, None] * k_factor[None, :]
    system = tl.where(number[:, None] > number[None, :], gram * between, 0.0)
    inverse = _inverse(system, CHUNK, LEVELS, PRECISION) * beta[None, :]
    tl.store(square, inverse.to(squares.dtype.element_ty))


@triton.jit
def _inverse(system: tl.tensor, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Inverse of I - `system`, which is strictly lower triangular, by blocks of the diagonal that double in size.

    With X the inverse of two neighbouring blocks and B the system's block below them, all three have X + X B X.
    Powers of the system, which would be a shorter way, grow without bound where keys are alike; these inverses hold
    products of contractions, and no entry exceeds the largest beta. So float16, whose digits are those of tf32, is
    safe for the factors.
    """
    number = tl.arange(0, CHUNK)
    unit = (number[:, None] == number[None, :]).to(tl.float32)
    inverse = unit + tl.where((number[:, None] ^ number[None, :]) == 1, system, 0.0)
    for level in tl.static_range(1, LEVELS):
        # The highest bit in which the two numbers differ tells the blocks apart.
        block = number >> level
        below = (block[:, None] ^ block[None, :]) == 1
        part = tl.where(below, system, 0.0)
        if PRECISION == "ieee":
            product = tl.dot(part, inverse, input_precision="ieee")
            inverse = tl.dot(inverse, product, acc=inverse, input_precision="ieee")
        else:
            rounded = inverse.to(tl.float16)
            product = tl.dot(part.to(tl.float16), rounded)
            inverse = tl.dot(rounded, product.to(tl.float16), acc=inverse)
    return inverse
