# mypy: disallow-untyped-decorators=False
"""The loop over keys that `triton_decode` and `triton_prefill` share: online softmax, tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from atom_mha.kernels.triton_tiles import MASKED_SCORE, blocks_of, key_offsets, load_rows

__all__ = ["attend", "unit_queries"]


@triton.jit
def attend(
    attended: tl.tensor,
    attended_odd: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    q_low: tl.tensor,
    q_high: tl.tensor,
    lower_key: tl.tensor,
    last_key: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    num_keys: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    score_factor: tl.tensor,
    cap_factor: tl.tensor,
    k_strides: tl.tensor,
    v_strides: tl.tensor,
    scale_strides: tl.tensor,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    V_NUMBERS: tl.constexpr,
    V_LOADS: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ALIKE: tl.constexpr,
    NATIVE: tl.constexpr,
    PAGED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Attend over the tiles from `first_key` to `end_key`.

    If MASKED, a query sees the keys `lower_key ... last_key` of its own, and keys exist up to `num_keys` only.

    Args:
        attended: [queries, V_LOADS] float32, sum of weighted values so far; with HAS_SCALES of the even columns.
        attended_odd: the same for the odd columns.
        total: [queries] float32, sum of the weights.
        highest: [queries] float32, what the weights are relative to: the highest exponent of 2.
        q_low: [queries, LOW], the first part of a head.
        q_high: [queries, HIGH], the rest if HIGH.
        lower_key: [queries], first key that each sees; used if HAS_LOWER.
        last_key: [queries], last key that each sees.
        first_key: start of a tile.
        end_key: where to stop.
        num_keys: no key from here on is read.
        k_head: the head's keys in block 0, or the row's first key if not PAGED.
        v_head: likewise, as int16 with HAS_SCALES.
        k_scale: the head's scales of keys in block 0; used if HAS_SCALES.
        v_scale: likewise.
        table: the row's blocks; used if PAGED.
        blocks: those of the first tile, as `blocks_of` says.
        score_factor: as `score_factors` says; [queries, 1] with HAS_SCALES if it differs.
        cap_factor: as `score_factors` says.
        k_strides: of blocks and slots, in elements.
        v_strides: likewise.
        scale_strides: likewise.
        KEYS: keys of a tile.
        BLOCK_SIZE: tokens per block.
        HEAD_DIM: columns of keys.
        LOW: see `q_low`.
        HIGH: see `q_high`.
        V_NUMBERS: columns of values as they are loaded.
        V_LOADS: a power of two that holds them.
        HAS_LOWER: whether window or chunk hide keys on the left.
        HAS_SOFT_CAP: whether scores are capped.
        HAS_SCALES: whether the cache is float8.
        ALIKE: whether keys and values have the same strides.
        NATIVE: whether this is compiled, not interpreted.
        PAGED: whether keys are in a paged cache.
        MASKED: whether not all queries see all keys.

    Returns:
        The first four arguments after the tiles.
    """
    for tile in tl.range(first_key, end_key, KEYS):
        keys = tile + tl.arange(0, KEYS)
        present = keys < num_keys
        next_blocks = blocks_of(table, keys + KEYS, num_keys, BLOCK_SIZE, PAGED)
        offsets = key_offsets(blocks, tile, k_strides, KEYS, BLOCK_SIZE, PAGED)
        products = _dot_queries(q_low, q_high, k_head, offsets, present, LOW, HIGH, HEAD_DIM, MASKED)
        value_scales = highest
        if HAS_SCALES:
            offsets = key_offsets(blocks, tile, scale_strides, KEYS, BLOCK_SIZE, PAGED)
            value_scales = _log2(tl.load(v_scale + offsets, mask=present, other=1.0), NATIVE)
            products = products * tl.load(k_scale + offsets, mask=present, other=0.0)[None, :]
        if MASKED or HAS_SOFT_CAP or HAS_SCALES:
            scores = _exponents(products, score_factor, cap_factor, HAS_SOFT_CAP)
            if HAS_SCALES:
                # Weights with the scales of their values in them.
                scores = scores + value_scales[None, :]
            if MASKED:
                visible = keys[None, :] <= last_key[:, None]
                if HAS_LOWER:
                    visible = visible & (keys[None, :] >= lower_key[:, None])
                scores = tl.where(visible, scores, MASKED_SCORE)
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - higher[:, None])
        else:
            # One multiply-add per score.
            higher = tl.maximum(highest, tl.max(products, axis=1) * score_factor)
            weights = tl.exp2(products * score_factor - higher[:, None])
        fade = tl.exp2(highest - higher)
        highest = higher
        attended = attended * fade[:, None]
        if HAS_SCALES:
            total = total * fade + tl.sum(weights * tl.exp2(-value_scales)[None, :], axis=1)
            attended_odd = attended_odd * fade[:, None]
        else:
            total = total * fade + tl.sum(weights, axis=1)
        if not ALIKE:
            offsets = key_offsets(blocks, tile, v_strides, KEYS, BLOCK_SIZE, PAGED)
        value = load_rows(v_head, offsets, present, 0, V_LOADS, V_NUMBERS, MASKED)
        attended, attended_odd = _add_values(attended, attended_odd, weights, value, q_low.dtype, HAS_SCALES, NATIVE)
        blocks = next_blocks
    return attended, attended_odd, total, highest


@triton.jit
def _exponents(
    products: tl.tensor, score_factor: tl.tensor, cap_factor: tl.tensor, HAS_SOFT_CAP: tl.constexpr
) -> tl.tensor:
    """Scale products of queries and keys, cap them, and turn them into exponents of 2; see `score_factors`."""
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both infinities.
        scores = cap_factor * (1.0 - 2.0 / (tl.exp2(products * score_factor) + 1.0))
    else:
        scores = products * score_factor
    return scores


@triton.jit
def unit_queries(q_low: tl.tensor, q_high: tl.tensor, HIGH: tl.constexpr) -> tl.tensor:
    """Scale queries to a largest number of 1 and turn them into float16, whose products with float8 keys are exact.

    Returns:
        Both parts, and the factor of each row's products.
    """
    largest = tl.max(tl.abs(q_low.to(tl.float32)), axis=1)
    if HIGH > 0:
        largest = tl.maximum(largest, tl.max(tl.abs(q_high.to(tl.float32)), axis=1))
    largest = tl.where(largest > 0, largest, 1.0)
    unit_low = (q_low.to(tl.float32) / largest[:, None]).to(tl.float16)
    unit_high = (q_high.to(tl.float32) / largest[:, None]).to(tl.float16)
    return unit_low, unit_high, largest


@triton.jit
def _dot_queries(
    q_low: tl.tensor,
    q_high: tl.tensor,
    k_head: tl.tensor,
    offsets: tl.tensor,
    present: tl.tensor,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Products of queries and the keys at `offsets`, [queries, keys] float32."""
    key = load_rows(k_head, offsets, present, 0, LOW, HEAD_DIM, MASKED)
    products = tl.dot(q_low, tl.trans(key.to(q_low.dtype)), input_precision="ieee")
    if HIGH > 0:
        key = load_rows(k_head, offsets, present, LOW, HIGH, HEAD_DIM, MASKED)
        products = tl.dot(q_high, tl.trans(key.to(q_low.dtype)), products, input_precision="ieee")
    return products


@triton.jit
def _log2(numbers: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Logarithm of positive float32 numbers that are not close to 0; a single instruction, right to 22 bits."""
    if NATIVE:
        exponents = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [numbers], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        exponents = tl.log2(numbers)
    return exponents


@triton.jit
def _unpack_float8(pairs: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Turn int16 of two float8 numbers each into the first ones and the second ones, float16."""
    if NATIVE:
        # Two pairs at a time: sort their bytes, widen either half.
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $2, $2, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return first, second


@triton.jit
def _add_values(
    attended: tl.tensor,
    attended_odd: tl.tensor,
    weights: tl.tensor,
    value: tl.tensor,
    DTYPE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Add weighted values: [queries, keys] times [keys, dim], as products of DTYPE.

    With HAS_SCALES a value is an int16 of two float8 numbers, which two accumulators keep apart: matrix units take
    16 bit columns, and single bytes would have to be gathered one by one.
    """
    weights = weights.to(DTYPE)
    if HAS_SCALES:
        even, odd = _unpack_float8(value, NATIVE)
        attended = tl.dot(weights, even.to(DTYPE), attended, input_precision="ieee")
        attended_odd = tl.dot(weights, odd.to(DTYPE), attended_odd, input_precision="ieee")
    else:
        attended = tl.dot(weights, value.to(DTYPE), attended, input_precision="ieee")
    return attended, attended_odd
