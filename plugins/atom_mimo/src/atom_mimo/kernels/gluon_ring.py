# mypy: disallow-untyped-decorators=False
"""`mimo.ring_prefill` on Hopper, in Gluon, the layer of Triton below its scheduler: keys stay in shared memory.

A program takes one key head and a run of tokens of a row, 16 tokens times 8 query heads at a time. The newest 160 keys
are in shared memory, in 10 groups of 16 that are replaced in turn. So a key is read once per run, and since a window
fits, a softmax sees all its scores at once. Four warps copy, twice four compute for 8 tokens each, so that products of
the ones run beside exponentials of the others. Triton's interpreter does not run Gluon; on the CPU the tests run
`triton_ring`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom_mimo.kernels.triton_ring import unit_inner_stride

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["ring_prefill"]

_TOKENS = 16
"""Tokens of a tile, and keys of a group."""
_LOG2E = tl.constexpr(1.4426950408889634)
_MASKED_SCORE = tl.constexpr(-1.0e30)


def ring_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Array,
    num_computed: Tensor,
    num_computed_host: Array,
    slots: Tensor,
    slots_host: Array,
    max_query_len: int,
    scaling: float,
    window: int,
    sinks: Tensor | None,
    scratch: dict[Any, Any],
) -> None:
    """Chunks of many tokens attend over their ring and themselves; see `reference.ring_prefill`."""
    num_rows, num_kv_heads = slots.shape[0], ring_k.shape[2]
    if num_rows == 0 or max_query_len == 0:
        return
    query, key, value = unit_inner_stride(query), unit_inner_stride(key), unit_inner_stride(value)
    # One program per multiprocessor: a run reads a window of keys before its own.
    tiles = triton.cdiv(max_query_len, _TOKENS)
    multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    run_tiles = triton.cdiv(tiles, max(1, multiprocessors // (num_kv_heads * num_rows)))
    _ring_attend[(num_kv_heads, triton.cdiv(tiles, run_tiles), num_rows)](
        query,
        key,
        value,
        ring_k,
        ring_v,
        out,
        query_start_loc,
        num_computed,
        slots,
        sinks if sinks is not None else query,
        scaling * _LOG2E.value,
        run_tiles * _TOKENS,
        query.stride()[:2],
        key.stride()[:2],
        value.stride()[:2],
        ring_k.stride()[:3],
        ring_v.stride()[:3],
        out.stride()[:2],
        RING_ROWS=ring_k.shape[1],
        WINDOW=window,
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )


@gluon.jit(do_not_specialize=["run_tokens"])
def _ring_attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    ring_k: tl.tensor,
    ring_v: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    num_computed: tl.tensor,
    slots: tl.tensor,
    sinks: tl.tensor,
    score_factor: tl.tensor,
    run_tokens: tl.tensor,
    query_strides: tl.tensor,
    key_strides: tl.tensor,
    value_strides: tl.tensor,
    ring_k_strides: tl.tensor,
    ring_v_strides: tl.tensor,
    out_strides: tl.tensor,
    RING_ROWS: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
) -> None:
    DTYPE: gl.constexpr = query.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    head = gl.program_id(0)
    first = gl.program_id(1) * run_tokens
    row = gl.program_id(2)
    start = gl.load(query_start_loc + row)
    num_tokens = gl.load(query_start_loc + row + 1) - start
    if first >= num_tokens:
        return
    first_new = gl.load(num_computed + row)
    slot = gl.load(slots + row).to(gl.int64)
    num_tiles = gl.cdiv(gl.minimum(run_tokens, num_tokens - first), 16)
    num_old = gl.where(slot < 0, 0, first_new)
    start = start.to(gl.int64)

    # Rows of 64 numbers: two stages of 3 parts of queries; 10 groups for each of 3 parts of keys and 2 of values.
    queries = gl.allocate_shared_memory(DTYPE, [6, 128, 64], SHARED)
    keys = gl.allocate_shared_memory(DTYPE, [30, 16, 64], SHARED)
    values = gl.allocate_shared_memory(DTYPE, [20, 16, 64], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    query += start * query_strides[0] + head * 8 * query_strides[1]
    key += start * key_strides[0] + head * key_strides[1]
    value += start * value_strides[0] + head * value_strides[1]
    out += start * out_strides[0] + head * 8 * out_strides[1]
    ring_k += gl.maximum(slot, 0) * ring_k_strides[0] + head * ring_k_strides[2]
    ring_v += gl.maximum(slot, 0) * ring_v_strides[0] + head * ring_v_strides[2]
    sinks += head * 8
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    queries, keys, values, full, empty, out, sinks, score_factor, first, num_tokens, num_tiles, num_old,
                    out_strides, WINDOW, HAS_SINKS, SHARED, 0,
                ),
            ),
            (
                _compute,
                (
                    queries, keys, values, full, empty, out, sinks, score_factor, first, num_tokens, num_tiles, num_old,
                    out_strides, WINDOW, HAS_SINKS, SHARED, 1,
                ),
            ),
            (
                _copy,
                (
                    queries, keys, values, full, empty, query, key, value, ring_k, ring_v, first, first_new, num_tokens,
                    num_tiles, num_old, query_strides, key_strides, value_strides, ring_k_strides, ring_v_strides,
                    RING_ROWS, WINDOW,
                ),
            ),
        ],
        [4, 4],
        [208, 88],
    )  # fmt: skip


@gluon.jit
def _copy(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    full: tl.tensor,
    empty: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    ring_k: tl.tensor,
    ring_v: tl.tensor,
    first: tl.tensor,
    first_new: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    num_old: tl.tensor,
    query_strides: tl.tensor,
    key_strides: tl.tensor,
    value_strides: tl.tensor,
    ring_k_strides: tl.tensor,
    ring_v_strides: tl.tensor,
    RING_ROWS: gl.constexpr,
    WINDOW: gl.constexpr,
) -> None:
    QUERIES: gl.constexpr = gl.BlockedLayout([8, 8], [4, 8], [4, 1], [1, 0])
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    numbers = gl.arange(0, 16, gl.SliceLayout(1, KEYS))
    rows = gl.arange(0, 128, gl.SliceLayout(1, QUERIES))
    # Eight groups in front of the run, and an empty one: what nothing was written to may hold NaN, which a weight of 0
    # would not remove.
    for group in range(9):
        token = first - 128 + group * 16 + numbers
        present = (token > first - WINDOW) & (token >= -num_old) & (token < first)
        ring_rows = ((first_new + token + RING_ROWS) % RING_ROWS).to(gl.int64)
        k_rows = gl.where(token < 0, ring_k + ring_rows * ring_k_strides[1], key + token.to(gl.int64) * key_strides[0])
        v_rows = gl.where(
            token < 0, ring_v + ring_rows * ring_v_strides[1], value + token.to(gl.int64) * value_strides[0]
        )
        _copy_rows(keys, gl.where(group == 8, 9, group), 10, k_rows, present, 3, KEYS)
        _copy_rows(values, gl.where(group == 8, 9, group), 10, v_rows, present, 2, KEYS)
    place = 8 + first * 0
    phase = first * 0
    for tile in range(num_tiles):
        stage = tile % 2
        # The keys that are replaced are those that only the tile before the last one has seen.
        mbarrier.wait(empty.index(stage), phase ^ 1)
        token = first + tile * 16 + numbers
        _copy_rows(keys, place, 10, key + token.to(gl.int64) * key_strides[0], token < num_tokens, 3, KEYS)
        _copy_rows(values, place, 10, value + token.to(gl.int64) * value_strides[0], token < num_tokens, 2, KEYS)
        token = first + tile * 16 + rows // 8
        q_rows = query + token.to(gl.int64) * query_strides[0] + rows % 8 * query_strides[1]
        _copy_rows(queries, stage * 3, 1, q_rows, token < num_tokens, 3, QUERIES)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        phase = phase ^ stage
        place = gl.where(place == 9, 0, place + 1)


@gluon.jit
def _copy_rows(
    target: tl.tensor,
    place: tl.tensor,
    step: gl.constexpr,
    rows: tl.tensor,
    present: tl.tensor,
    PARTS: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:
    """Copy rows of PARTS times 64 numbers to `place`, `place` + `step`, ...; zeros where they are not present."""
    columns = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    for part in gl.static_range(PARTS):
        pointers = rows[:, None] + (part * 64 + columns)[None, :]
        async_copy.async_copy_global_to_shared(target.index(place + part * step), pointers, mask=present[:, None])


@gluon.jit
def _compute(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    full: tl.tensor,
    empty: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    score_factor: tl.tensor,
    first: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    num_old: tl.tensor,
    out_strides: tl.tensor,
    WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    SHARED: gl.constexpr,
    HALF: gl.constexpr,
) -> None:
    """Attend for one half of every tile; the keys are 128 and 32 of them, sizes that matrix products have."""
    DTYPE: gl.constexpr = queries.dtype
    MANY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    FEW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    STORES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, MANY))
    few_rows = gl.arange(0, 64, gl.SliceLayout(1, FEW))
    many_columns = gl.arange(0, 128, gl.SliceLayout(0, MANY))
    few_columns = 128 + gl.arange(0, 32, gl.SliceLayout(0, FEW))
    sink = gl.full([64], _MASKED_SCORE, gl.float32, gl.SliceLayout(1, MANY))
    if HAS_SINKS:
        sink = gl.load(sinks + rows % 8).to(gl.float32) * _LOG2E
    no_many = gl.full([64, 128], 0.0, gl.float32, MANY)
    no_few = gl.full([64, 32], 0.0, gl.float32, FEW)
    no_values = gl.full([64, 64], 0.0, gl.float32, VALUES)
    out_rows = gl.arange(0, 64, gl.SliceLayout(1, STORES))
    out_columns = gl.arange(0, 64, gl.SliceLayout(0, STORES))
    phase = first * 0
    place = 8 + first * 0
    for tile in range(num_tiles):
        stage = tile % 2
        newest = first + tile * 16
        own = newest + HALF * 8
        mbarrier.wait(full.index(stage), phase)
        many = no_many
        few = no_few
        for part in gl.static_range(3):
            own_queries = queries.index(stage * 3 + part).slice(HALF * 64, 64)
            many_keys = keys.index(part * 10)._reinterpret(DTYPE, [128, 64], SHARED)
            few_keys = keys.index(part * 10 + 8)._reinterpret(DTYPE, [32, 64], SHARED)
            many = warpgroup_mma(own_queries, many_keys.permute((1, 0)), many, use_acc=part > 0, is_async=True)
            few = warpgroup_mma(own_queries, few_keys.permute((1, 0)), few, use_acc=part > 0, is_async=True)
        many, few = warpgroup_mma_wait(0, deps=(many, few))
        many = _mask(many, own + rows // 8, many_columns, newest, place, num_old, WINDOW)
        few = _mask(few, own + few_rows // 8, few_columns, newest, place, num_old, WINDOW)
        highest = gl.maximum(gl.max(many, axis=1), gl.convert_layout(gl.max(few, axis=1), gl.SliceLayout(1, MANY)))
        highest = gl.maximum(highest * score_factor, sink)
        many = gl.exp2(many * score_factor - highest[:, None])
        few = gl.exp2(few * score_factor - gl.convert_layout(highest, gl.SliceLayout(1, FEW))[:, None])
        total = gl.sum(many, axis=1) + gl.convert_layout(gl.sum(few, axis=1), gl.SliceLayout(1, MANY))
        if HAS_SINKS:
            total += gl.exp2(sink - highest)
        many_weights = gl.convert_layout(many.to(DTYPE), LEFT)
        few_weights = gl.convert_layout(few.to(DTYPE), LEFT)
        low_many = values.index(0)._reinterpret(DTYPE, [128, 64], SHARED)
        low_few = values.index(8)._reinterpret(DTYPE, [32, 64], SHARED)
        high_many = values.index(10)._reinterpret(DTYPE, [128, 64], SHARED)
        high_few = values.index(18)._reinterpret(DTYPE, [32, 64], SHARED)
        low = warpgroup_mma(many_weights, low_many, no_values, use_acc=False, is_async=True)
        low = warpgroup_mma(few_weights, low_few, low, is_async=True)
        high = warpgroup_mma(many_weights, high_many, no_values, use_acc=False, is_async=True)
        high = warpgroup_mma(few_weights, high_few, high, is_async=True)
        low, high = warpgroup_mma_wait(0, deps=(low, high))
        factor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, VALUES))[:, None]
        # By way of the queries' memory, so that whole lines are stored.
        low_out = queries.index(stage * 3).slice(HALF * 64, 64)
        high_out = queries.index(stage * 3 + 1).slice(HALF * 64, 64)
        low_out.store((low * factor).to(DTYPE))
        high_out.store((high * factor).to(DTYPE))
        gl.thread_barrier()
        tokens = own + out_rows // 8
        places = (tokens.to(gl.int64) * out_strides[0] + out_rows % 8 * out_strides[1])[:, None] + out_columns[None, :]
        is_token = (tokens < num_tokens)[:, None]
        gl.store(out + places, low_out.load(STORES), mask=is_token)
        gl.store(out + places + 64, high_out.load(STORES), mask=is_token)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        phase = phase ^ stage
        place = gl.where(place == 9, 0, place + 1)


@gluon.jit
def _mask(
    products: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    newest: tl.tensor,
    place: tl.tensor,
    num_old: tl.tensor,
    WINDOW: gl.constexpr,
) -> tl.tensor:
    """Products of keys that the tokens do not see become `_MASKED_SCORE`.

    Args:
        products: [rows, columns].
        tokens: [rows], numbers of the tokens in their chunk; old ones have negative numbers.
        columns: [columns], places of keys, 16 to a group.
        newest: first token of the newest group.
        place: of the newest group; in front of it, and in front of the first one the last, are older ones.
        num_old: old tokens that there are.
        WINDOW: as in `reference.ring_prefill`.
    """
    age = place - columns // 16
    keys = newest - gl.where(age < 0, age + 10, age) * 16 + columns % 16
    lowest = gl.maximum(tokens - WINDOW + 1, -num_old)
    visible = (keys[None, :] <= tokens[:, None]) & (keys[None, :] >= lowest[:, None])
    return gl.where(visible, products, _MASKED_SCORE)
