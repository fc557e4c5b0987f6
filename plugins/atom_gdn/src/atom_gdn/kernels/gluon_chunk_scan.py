# mypy: disallow-untyped-decorators=False
"""`triton_chunk_scan` on Hopper, in Gluon, the layer of Triton below its scheduler: one warp copies, others compute.

Products that do not wait for each other are issued together, and all that stands between two chunks is the chain from
one state to the next. Triton's interpreter does not run Gluon; on the CPU the tests run `triton_chunk_scan`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_gdn.kernels.triton_chunk_systems import CHUNK_TOKENS, Solved

__all__ = ["scan"]

_COPY_REGISTERS = 24
"""Of a thread that copies; those that compute get what it leaves."""


def scan(
    qkv: torch.Tensor,
    solved: Solved,
    recurrent_state: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_read: torch.Tensor,
    state_write: torch.Tensor,
    num_rows: int,
    chunks: range,
    carried: torch.Tensor,
    rows: int,
) -> None:
    """Carry the states over chunks of every row; for heads of whole tiles that the copy engine can address.

    Args:
        qkv: as in `triton_chunk_scan.scan`, of 16 bit.
        solved: as there.
        recurrent_state: as there.
        out: as there.
        query_start_loc: as there.
        state_read: as there.
        state_write: as there.
        num_rows: as there.
        chunks: as there.
        carried: as there.
        rows: of a head's state in a program, 64 or 128.
    """
    v_heads, head_v, head_k = recurrent_state.shape[1:]
    flat_out = out.view(-1, v_heads * head_v)
    dtype = gl.bfloat16 if qkv.dtype == torch.bfloat16 else gl.float16
    _scan_rows[(head_v // rows * v_heads, num_rows)](
        qkv,
        out,
        # Few descriptors, which cost the host more than the rest of a launch.
        _tiles(qkv, [CHUNK_TOKENS, min(head_k, rows)], dtype),
        _tiles(solved.squares.view(-1, CHUNK_TOKENS), [CHUNK_TOKENS, CHUNK_TOKENS], dtype),
        _tiles(flat_out, [CHUNK_TOKENS, rows], dtype),
        TensorDescriptor.from_tensor(
            solved.factors.view(-1, 4 * CHUNK_TOKENS), [1, 4 * CHUNK_TOKENS], gl.NVMMASharedLayout(0, 32, 2)
        ),
        recurrent_state,
        carried,
        query_start_loc,
        state_read,
        state_write,
        chunks.start,
        chunks.stop,
        qkv.stride(0),
        recurrent_state.stride(0),
        out.stride(0),
        K_HEADS=solved.num_k_heads,
        V_HEADS=v_heads,
        HEAD_K=head_k,
        HEAD_V=head_v,
        ROWS=rows,
        CHUNK=CHUNK_TOKENS,
        # As many as fit into the memory of a multiprocessor.
        STAGES=3 if rows == 64 else 2,
        COPY_REGISTERS=_COPY_REGISTERS,
        num_warps=rows // 16,
    )


def _tiles(tensor: torch.Tensor, shape: list[int], dtype: gl.dtype) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))


@gluon.jit(do_not_specialize=["first_chunk", "last_chunk"])
def _scan_rows(
    qkv: tl.tensor,
    out: tl.tensor,
    qkv_tiles: tl.tensor,
    squares: tl.tensor,
    out_tiles: tl.tensor,
    factors: tl.tensor,
    recurrent_state: tl.tensor,
    carried: tl.tensor,
    query_start_loc: tl.tensor,
    state_read: tl.tensor,
    state_write: tl.tensor,
    first_chunk: tl.tensor,
    last_chunk: tl.tensor,
    qkv_stride: tl.tensor,
    slot_stride: tl.tensor,
    out_stride: tl.tensor,
    K_HEADS: gl.constexpr,
    V_HEADS: gl.constexpr,
    HEAD_K: gl.constexpr,
    HEAD_V: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
) -> None:
    row = gl.program_id(1)
    first = gl.load(query_start_loc)
    start = gl.load(query_start_loc + row)
    num_tokens = gl.load(query_start_loc + row + 1) - start
    if num_tokens <= 0:
        return
    TILES: gl.constexpr = HEAD_V // ROWS
    DTYPE: gl.constexpr = qkv.dtype.element_ty
    v_head = gl.program_id(0) // TILES
    first_row = gl.program_id(0) % TILES * ROWS
    head = v_head // (V_HEADS // K_HEADS)
    spot = ((start - first) // CHUNK + row) * V_HEADS + v_head
    # Chunks, the last of which may be no whole one.
    stop = gl.minimum(gl.cdiv(num_tokens, CHUNK), last_chunk)

    queries = gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, HEAD_K], qkv_tiles.layout)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, HEAD_K], qkv_tiles.layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, ROWS], qkv_tiles.layout)
    systems = gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, CHUNK], squares.layout)
    scores = gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, CHUNK], squares.layout)
    own_factors = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 4 * CHUNK], factors.layout)
    results = gl.allocate_shared_memory(DTYPE, [2, CHUNK, ROWS], out_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    q_column = head * HEAD_K
    v_column = 2 * K_HEADS * HEAD_K + v_head * HEAD_V + first_row
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    queries, keys, values, systems, scores, own_factors, results, full, empty, out, out_tiles,
                    recurrent_state, carried, state_read, state_write, row, start, num_tokens, first_chunk, stop,
                    last_chunk, v_head, first_row, slot_stride, out_stride, V_HEADS, HEAD_K, HEAD_V, ROWS, CHUNK,
                    STAGES,
                ),
            ),
            (
                _copy,
                (
                    queries, keys, values, systems, scores, own_factors, full, empty, qkv_tiles, squares, factors,
                    start, spot, first_chunk, stop, q_column, v_column, K_HEADS, V_HEADS, HEAD_K, ROWS, CHUNK, STAGES,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    systems: tl.tensor,
    scores: tl.tensor,
    own_factors: tl.tensor,
    full: tl.tensor,
    empty: tl.tensor,
    qkv_tiles: tl.tensor,
    squares: tl.tensor,
    factors: tl.tensor,
    start: tl.tensor,
    spot: tl.tensor,
    first_chunk: tl.tensor,
    stop: tl.tensor,
    q_column: tl.tensor,
    v_column: tl.tensor,
    K_HEADS: gl.constexpr,
    V_HEADS: gl.constexpr,
    HEAD_K: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    NUMBERS: gl.constexpr = CHUNK * (2 * HEAD_K + ROWS + 2 * CHUNK)
    WIDTH: gl.constexpr = queries.dtype.primitive_bitwidth // 8
    stage = first_chunk * 0
    phase = first_chunk * 0
    for chunk in range(first_chunk, stop):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        token = start + chunk * CHUNK
        own = spot + chunk * V_HEADS
        mbarrier.expect(ready, NUMBERS * WIDTH + 4 * CHUNK * 4)
        _copy_tiles(qkv_tiles, token, q_column + K_HEADS * HEAD_K, ready, keys.index(stage), HEAD_K)
        _copy_tiles(qkv_tiles, token, v_column, ready, values.index(stage), ROWS)
        tma.async_copy_global_to_shared(squares, [2 * own * CHUNK, 0], ready, systems.index(stage))
        tma.async_copy_global_to_shared(factors, [own, 0], ready, own_factors.index(stage))
        _copy_tiles(qkv_tiles, token, q_column, ready, queries.index(stage), HEAD_K)
        tma.async_copy_global_to_shared(squares, [(2 * own + 1) * CHUNK, 0], ready, scores.index(stage))
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def _copy_tiles(
    tiles: tl.tensor, row: tl.tensor, column: tl.tensor, ready: tl.tensor, target: tl.tensor, WIDTH: gl.constexpr
) -> None:
    """Copy WIDTH columns, a tile at a time."""
    SIZE: gl.constexpr = tiles.block_type.shape[1]
    for n in gl.static_range(WIDTH // SIZE):
        part = target.slice(n * SIZE, SIZE, dim=1)
        tma.async_copy_global_to_shared(tiles, [row, column + n * SIZE], ready, part)


@gluon.jit
def _compute(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    systems: tl.tensor,
    scores: tl.tensor,
    own_factors: tl.tensor,
    results: tl.tensor,
    full: tl.tensor,
    empty: tl.tensor,
    out: tl.tensor,
    out_tiles: tl.tensor,
    recurrent_state: tl.tensor,
    carried: tl.tensor,
    state_read: tl.tensor,
    state_write: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    num_tokens: tl.tensor,
    first_chunk: tl.tensor,
    stop: tl.tensor,
    last_chunk: tl.tensor,
    v_head: tl.tensor,
    first_row: tl.tensor,
    slot_stride: tl.tensor,
    out_stride: tl.tensor,
    V_HEADS: gl.constexpr,
    HEAD_K: gl.constexpr,
    HEAD_V: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    WARPS: gl.constexpr = ROWS // 16
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_K, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BY_TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    DTYPE: gl.constexpr = queries.dtype

    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, STATE))
    columns = gl.arange(0, HEAD_K, gl.SliceLayout(0, STATE))
    offsets = (v_head * HEAD_V + rows)[:, None] * HEAD_K + columns[None, :]
    handed = carried + row.to(gl.int64) * (V_HEADS * HEAD_V * HEAD_K)
    slot = gl.load(state_read + row).to(gl.int64)
    state = gl.full([ROWS, HEAD_K], 0.0, gl.float32, STATE)
    if first_chunk > 0:
        state = gl.load(handed + offsets)
    elif slot >= 0:
        state = gl.load(recurrent_state + slot * slot_stride + offsets).to(gl.float32)
    nothing = gl.full([ROWS, CHUNK], 0.0, gl.float32, TOKENS)
    stage = first_chunk * 0
    phase = first_chunk * 0
    place = first_chunk * 0
    for chunk in range(first_chunk, stop):
        mbarrier.wait(full.index(stage), phase)
        key = keys.index(stage)
        system = systems.index(stage).permute((1, 0))
        if (chunk + 1) * CHUNK > num_tokens:
            # What follows the row's tokens are others, or nothing that counts.
            _clear(values.index(stage), num_tokens - chunk * CHUNK, CHUNK, ROWS, WARPS)
            _clear(key, num_tokens - chunk * CHUNK, CHUNK, HEAD_K, WARPS)
            _clear(queries.index(stage), num_tokens - chunk * CHUNK, CHUNK, HEAD_K, WARPS)
            fence_async_shared()
            gl.thread_barrier()
        known = gl.convert_layout(state.to(DTYPE), LEFT)
        # The product of what was converted comes first: behind another one, the assembler would wait for that.
        remembered = warpgroup_mma(known, key.permute((1, 0)), nothing, use_acc=False, is_async=True)
        update = warpgroup_mma(values.index(stage).permute((1, 0)), system, nothing, use_acc=False, is_async=True)
        read = warpgroup_mma(known, queries.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        factor = own_factors.index(stage)._reinterpret(gl.float32, [4 * CHUNK], FLAT)
        k_since = factor.slice(0, CHUNK).load(BY_TOKEN)
        k_until = factor.slice(CHUNK, CHUNK).load(BY_TOKEN)
        q_since = factor.slice(2 * CHUNK, CHUNK).load(BY_TOKEN)
        decay = factor.slice(3 * CHUNK, 1).load(gl.SliceLayout(0, STATE))
        state = state * decay[None, :]
        remembered, update = warpgroup_mma_wait(1, deps=(remembered, update))
        lost = gl.convert_layout((remembered * -k_since[None, :]).to(DTYPE), LEFT)
        update = warpgroup_mma(lost, system, update, is_async=True)
        update, read = warpgroup_mma_wait(0, deps=(update, read))
        added = gl.convert_layout((update * k_until[None, :]).to(DTYPE), LEFT_OF_STATE)
        own = gl.convert_layout(update.to(DTYPE), LEFT)
        state = warpgroup_mma(added, key, state, is_async=True)
        attended = warpgroup_mma(own, scores.index(stage).permute((1, 0)), read * q_since[None, :], is_async=True)
        state, attended = warpgroup_mma_wait(0, deps=(state, attended))
        mbarrier.arrive(empty.index(stage), count=1)
        result = results.index(place)
        result.permute((1, 0)).store(attended.to(DTYPE))
        if (chunk + 1) * CHUNK > num_tokens:
            gl.thread_barrier()
            SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // ROWS, ROWS // 8], [WARPS, 1], [1, 0])
            tokens = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, SPREAD))
            v_columns = v_head * HEAD_V + first_row + gl.arange(0, ROWS, gl.SliceLayout(0, SPREAD))
            places = (start + tokens).to(gl.int64)[:, None] * out_stride + v_columns[None, :]
            gl.store(out + places, result.load(SPREAD), mask=(tokens < num_tokens)[:, None])
        else:
            fence_async_shared()
            tma.store_wait(0)
            gl.thread_barrier()
            tma.async_copy_shared_to_global(out_tiles, [start + chunk * CHUNK, v_head * HEAD_V + first_row], result)
        place = 1 - place
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    tma.store_wait(0)
    num_chunks = gl.cdiv(num_tokens, CHUNK)
    if last_chunk < num_chunks:
        gl.store(handed + offsets, state)
    elif first_chunk < num_chunks:
        target = gl.load(state_write + start + num_tokens - 1).to(gl.int64)
        new = recurrent_state + gl.maximum(target, 0) * slot_stride + offsets
        gl.store(new, state.to(recurrent_state.dtype.element_ty), mask=(target >= 0) & (columns >= 0)[None, :])


@gluon.jit
def _clear(tile: tl.tensor, first: tl.tensor, SIZE: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr) -> None:
    """Make the rows of a tile zero from `first` on."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, SIZE, gl.SliceLayout(1, SPREAD))
    numbers = tile.load(SPREAD)
    tile.store(gl.where((rows < first)[:, None], numbers, 0.0))
