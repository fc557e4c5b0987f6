# mypy: disallow-untyped-decorators=False
"""States carried over the chunks of each row, and the outputs; see `triton_chunks`.

A program takes some rows of the state of one value head. Products have these rows first, so that the state and what is
computed from it are left operands, which the matrix units take from registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from atom_gdn.kernels.triton_chunk_systems import CHUNK_TOKENS, Solved
from atom_gdn.kernels.triton_parts import MIN_DOT, on_hopper, padded, suits_bulk

__all__ = ["ScanTiles", "scan"]


@dataclass(frozen=True)
class ScanTiles:
    """How the work is cut.

    Attributes:
        rows: of a head's state.
        num_warps: of a program.
        num_stages: chunks in flight.
        bulk: let the copy engine move whole chunks, where it can address them.
        hopper: take the kernel of `gluon_chunk_scan`, where that is possible and `bulk`.
    """

    rows: int = 64
    num_warps: int = 4
    num_stages: int = 3
    bulk: bool = True
    hopper: bool = True

    def cut(self, head_v: int) -> tuple[int, int]:
        """Rows of a program, and programs of a head."""
        rows = min(self.rows, padded(head_v, MIN_DOT))
        return rows, triton.cdiv(head_v, rows)

    @classmethod
    def choose(cls, dtype: torch.dtype, head_v: int, num_heads: int, num_multiprocessors: int) -> ScanTiles:
        """Choose by shape.

        Args:
            dtype: of the inputs.
            head_v: dimension of a value.
            num_heads: value heads of all rows together.
            num_multiprocessors: of the device.
        """
        if dtype == torch.float32:
            return cls(rows=32, num_warps=8, num_stages=1, bulk=False)
        # Whole heads share what they load, half heads are sooner done where there is room for all of them.
        crowded = 2 * num_heads > num_multiprocessors and head_v >= 128
        return cls(rows=128, num_warps=8) if crowded else cls()


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
    tiles: ScanTiles,
) -> None:
    """Carry the states over chunks of every row and write the outputs.

    Args:
        qkv: [num_tokens, channels], the last dimension contiguous.
        solved: of these chunks.
        recurrent_state: [num_slots, v_heads, head_v, head_k].
        out: [num_tokens, v_heads, head_v], written.
        query_start_loc: [num_rows + 1] int32.
        state_read: [num_rows] int64, -1 for zeros.
        state_write: [num_tokens] int64, the entry of a row's last token counts; -1 for none.
        num_rows: rows.
        chunks: of a row, by number; they may reach past its end.
        carried: [num_rows, v_heads, head_v, head_k] float32, the states in front of `chunks` if these are not the
            first, written behind them if these are not the last.
        tiles: how to cut the work.
    """
    v_heads, head_v, head_k = recurrent_state.shape[1:]
    rows, v_tiles = tiles.cut(head_v)
    k_width = padded(head_k, MIN_DOT)
    flat_out = out.view(-1, v_heads * head_v)
    bulk = tiles.bulk and k_width == head_k and v_tiles * rows == head_v and suits_bulk(qkv) and suits_bulk(flat_out)
    if bulk and tiles.hopper and on_hopper(qkv.device) and qkv.dtype.itemsize == 2 and head_k >= 64 and rows >= 64:
        from atom_gdn.kernels import gluon_chunk_scan

        gluon_chunk_scan.scan(
            *(qkv, solved, recurrent_state, out, query_start_loc, state_read, state_write, num_rows, chunks, carried),
            rows,
        )
        return
    _scan_rows[(v_tiles * v_heads, num_rows)](
        qkv,
        out,
        TensorDescriptor.from_tensor(qkv, [CHUNK_TOKENS, k_width]) if bulk else qkv,
        TensorDescriptor.from_tensor(qkv, [CHUNK_TOKENS, rows]) if bulk else qkv,
        TensorDescriptor.from_tensor(solved.squares.view(-1, CHUNK_TOKENS), [CHUNK_TOKENS, CHUNK_TOKENS]),
        TensorDescriptor.from_tensor(flat_out, [CHUNK_TOKENS, rows]) if bulk else out,
        TensorDescriptor.from_tensor(solved.factors.view(-1, CHUNK_TOKENS), [1, CHUNK_TOKENS]),
        solved.factors,
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
        K_WIDTH=k_width,
        TILE_ROWS=rows,
        TILES=v_tiles,
        CHUNK=CHUNK_TOKENS,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        BULK=bulk,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


@triton.jit(do_not_specialize=["first_chunk", "last_chunk"])
def _scan_rows(
    qkv: tl.tensor,
    out: tl.tensor,
    qk_tiles: tl.tensor,
    v_tiles: tl.tensor,
    squares: tl.tensor,
    out_tiles: tl.tensor,
    factors: tl.tensor,
    decays: tl.tensor,
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
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    K_WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    v_head = tl.program_id(0) // TILES
    row = tl.program_id(1)
    first = tl.load(query_start_loc)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    if num_tokens <= 0:
        return
    keys = tl.arange(0, K_WIDTH)
    is_key = keys < HEAD_K
    first_row = tl.program_id(0) % TILES * TILE_ROWS
    rows = first_row + tl.arange(0, TILE_ROWS)
    is_row = rows < HEAD_V
    in_state = is_row[:, None] & is_key[None, :]
    offsets = (v_head * HEAD_V + rows)[:, None] * HEAD_K + keys[None, :]
    slot = tl.load(state_read + row).to(tl.int64)
    old = recurrent_state + tl.maximum(slot, 0) * slot_stride + offsets
    state = tl.load(old, mask=in_state & (slot >= 0) & (first_chunk == 0), other=0.0).to(tl.float32)
    handed = carried + row.to(tl.int64) * (V_HEADS * HEAD_V * HEAD_K) + offsets
    state += tl.load(handed, mask=in_state & (first_chunk > 0), other=0.0)

    head = v_head // (V_HEADS // K_HEADS)
    v_column = 2 * K_HEADS * HEAD_K + v_head * HEAD_V
    spot = ((start - first) // CHUNK + row) * V_HEADS + v_head
    num_chunks = tl.cdiv(num_tokens, CHUNK)
    stop = tl.minimum(num_chunks, last_chunk)
    others = first_chunk
    if BULK:
        whole = tl.minimum(num_tokens // CHUNK, last_chunk)
        others = tl.maximum(whole, first_chunk)
        for chunk in tl.range(first_chunk, whole, num_stages=STAGES):
            token = start + chunk * CHUNK
            own = spot + chunk * V_HEADS
            query = qk_tiles.load([token, head * HEAD_K])
            key = qk_tiles.load([token, (K_HEADS + head) * HEAD_K])
            value = v_tiles.load([token, v_column + first_row])
            system = squares.load([2 * own * CHUNK, 0])
            score = squares.load([(2 * own + 1) * CHUNK, 0])
            state, attended = _advance(state, query, key, value, system, score, factors, decays, own, CHUNK, PRECISION)
            out_tiles.store([token, v_head * HEAD_V + first_row], tl.trans(attended).to(out.dtype.element_ty))
    # What is left is shorter than a chunk, or cannot be addressed by tiles.
    number = tl.arange(0, CHUNK)
    chunk_tokens = tl.full([], CHUNK, tl.int64)
    inputs = qkv + start.to(tl.int64) * qkv_stride
    results = out + start.to(tl.int64) * out_stride
    for chunk in tl.range(others, stop, num_stages=1):
        own = spot + chunk * V_HEADS
        valid = number < num_tokens - chunk * CHUNK
        moved = inputs + chunk * chunk_tokens * qkv_stride + (number * qkv_stride)[:, None]
        in_keys = valid[:, None] & is_key[None, :]
        in_values = valid[:, None] & is_row[None, :]
        query = tl.load(moved + (head * HEAD_K + keys)[None, :], mask=in_keys, other=0.0)
        key = tl.load(moved + ((K_HEADS + head) * HEAD_K + keys)[None, :], mask=in_keys, other=0.0)
        value = tl.load(moved + (v_column + rows)[None, :], mask=in_values, other=0.0)
        system = squares.load([2 * own * CHUNK, 0])
        score = squares.load([(2 * own + 1) * CHUNK, 0])
        state, attended = _advance(state, query, key, value, system, score, factors, decays, own, CHUNK, PRECISION)
        moved_out = results + chunk * chunk_tokens * out_stride + (number * out_stride)[:, None]
        places = moved_out + (v_head * HEAD_V + rows)[None, :]
        tl.store(places, tl.trans(attended).to(out.dtype.element_ty), mask=in_values)
    tl.store(handed, state, mask=in_state & (last_chunk < num_chunks))
    target = tl.load(state_write + start + num_tokens - 1).to(tl.int64)
    new = recurrent_state + tl.maximum(target, 0) * slot_stride + offsets
    written = in_state & (target >= 0) & (last_chunk >= num_chunks) & (first_chunk < num_chunks)
    tl.store(new, state.to(recurrent_state.dtype.element_ty), mask=written)


@triton.jit
def _advance(
    state: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    system: tl.tensor,
    score: tl.tensor,
    factors: tl.tensor,
    decays: tl.tensor,
    own: tl.tensor,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Take [rows, head_k] `state` over one chunk.

    Returns:
        The state behind it, and [rows, tokens] outputs.
    """
    k_since = factors.load([4 * own, 0])
    k_until = factors.load([4 * own + 1, 0])
    q_since = factors.load([4 * own + 2, 0])
    decay = tl.load(decays + own.to(tl.int64) * (4 * CHUNK) + 3 * CHUNK)
    right = tl.trans(system)
    update = tl.dot(tl.trans(value), right, input_precision=PRECISION)
    carried = state.to(key.dtype)
    remembered = tl.dot(carried, tl.trans(key), input_precision=PRECISION)
    remembered = (remembered * -k_since).to(key.dtype)
    update = tl.dot(remembered, right, acc=update, input_precision=PRECISION)
    added = (update * k_until).to(key.dtype)
    state = tl.dot(added, key, acc=state * decay, input_precision=PRECISION)
    read = tl.dot(carried, tl.trans(query), input_precision=PRECISION) * q_since
    attended = tl.dot(update.to(key.dtype), tl.trans(score), acc=read, input_precision=PRECISION)
    return state, attended
