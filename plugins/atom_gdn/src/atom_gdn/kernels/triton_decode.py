# mypy: disallow-untyped-decorators=False
"""`gdn.decode` in Triton: convolution, gates, norms and delta rule of few tokens a row, in two launches.

The first, small one (`triton_decode_inputs`) does all that is done once per key head, and moves the convolution states
on. In the second, a program takes a tile of one head's recurrent state, reads it once and writes it once per token.
Small programs, each with one tile, keep the memory busier than programs that pass over all tiles of a key head, which
one launch for everything would need so that a convolution state is not written before all have read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom_gdn.kernels.triton_decode_inputs import stage
from atom_gdn.kernels.triton_parts import padded, unit_inner_stride

__all__ = ["DecodeTiles", "decode"]


@dataclass(frozen=True)
class DecodeTiles:
    """How the work is cut.

    Attributes:
        rows: of a head's state.
        num_warps: of a program.
        early: start the second launch beside the first one, with loading the states, which do not depend on it.
    """

    rows: int = 64
    num_warps: int = 4
    early: bool = False


def decode(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    beta_scale: float,
    conv_state: torch.Tensor,
    recurrent_state: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_read: torch.Tensor,
    state_write: torch.Tensor,
    max_query_len: int,
    tiles: DecodeTiles | None = None,
) -> None:
    """See `reference.decode`; no host synchronization, and the launches depend on shapes and `max_query_len` only.

    Args:
        qkv: as there.
        a: as there.
        b: as there.
        weight: as there.
        a_log: as there.
        dt_bias: as there.
        beta_scale: as there.
        conv_state: as there.
        recurrent_state: as there.
        out: as there.
        query_start_loc: as there.
        state_read: as there.
        state_write: as there.
        max_query_len: as there.
        tiles: how to cut the work; the default when `None`.
    """
    num_rows = query_start_loc.shape[0] - 1
    if num_rows == 0 or max_query_len == 0:
        return
    tiles = tiles or DecodeTiles(early=_can_start_early(qkv.device))
    v_heads, head_v, head_k = recurrent_state.shape[1:]
    channels = weight.shape[0]
    k_heads = (channels - v_heads * head_v) // (2 * head_k)
    staged = stage(
        unit_inner_stride(qkv),
        unit_inner_stride(a),
        unit_inner_stride(b),
        weight.contiguous(),
        *(a_log, dt_bias, beta_scale, conv_state, query_start_loc, state_read, state_write),
        (v_heads, head_v, head_k),
        max_query_len,
        tiles.early,
    )
    rows = min(tiles.rows, padded(head_v))
    row_tiles = triton.cdiv(head_v, rows)
    _update[(v_heads * row_tiles, num_rows)](
        staged,
        recurrent_state,
        out,
        query_start_loc,
        state_read,
        state_write,
        recurrent_state.stride(0),
        out.stride(0),
        K_HEADS=k_heads,
        GROUP=v_heads // k_heads,
        HEAD_K=head_k,
        HEAD_V=head_v,
        K_WIDTH=padded(head_k),
        TILE_ROWS=rows,
        TILES=row_tiles,
        CHANNELS=channels,
        SINGLE=max_query_len == 1,
        EARLY=tiles.early,
        num_warps=tiles.num_warps,
        **({"launch_pdl": True} if tiles.early else {}),
    )


def _can_start_early(device: torch.device) -> bool:
    """Whether a launch can begin before the one in front of it is done: on NVIDIA's devices from Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _update(
    staged: tl.tensor,
    recurrent_state: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    state_read: tl.tensor,
    state_write: tl.tensor,
    slot_stride: tl.tensor,
    out_stride: tl.tensor,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    K_WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    SINGLE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    v_head = tl.program_id(0) // TILES
    row = tl.program_id(1)
    start = tl.load(query_start_loc + row).to(tl.int64)
    num_tokens = (tl.load(query_start_loc + row + 1) - start).to(tl.int32)
    slot = tl.load(state_read + row).to(tl.int64)
    if num_tokens <= 0:
        return
    keys = tl.arange(0, K_WIDTH)
    is_key = keys < HEAD_K
    rows = tl.program_id(0) % TILES * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = rows < HEAD_V
    v_rows = v_head * HEAD_V + rows
    offsets = v_rows[:, None] * HEAD_K + keys[None, :]
    present = is_row[:, None] & is_key[None, :]
    old = recurrent_state + tl.maximum(slot, 0) * slot_stride + offsets
    state = tl.load(old, mask=present & (slot >= 0), other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    WIDTH: tl.constexpr = CHANNELS + 2 * K_HEADS * GROUP + K_HEADS
    head = v_head // GROUP
    for token in range(0, 1 if SINGLE else num_tokens):
        spot = staged + (start + token) * WIDTH
        query = tl.load(spot + head * HEAD_K + keys, mask=is_key, other=0.0)
        key = tl.load(spot + (K_HEADS + head) * HEAD_K + keys, mask=is_key, other=0.0)
        value = tl.load(spot + 2 * K_HEADS * HEAD_K + v_rows, mask=is_row, other=0.0)
        decay = tl.load(spot + CHANNELS + v_head)
        beta = tl.load(spot + CHANNELS + K_HEADS * GROUP + v_head)
        product = tl.load(spot + CHANNELS + 2 * K_HEADS * GROUP + head)
        target = tl.load(state_write + start + token).to(tl.int64)
        # The old state meets key and query at once; the update's share of the output is added by hand.
        remembered = tl.sum(state * key[None, :], 1) * decay
        attended = tl.sum(state * query[None, :], 1) * decay
        update = beta * (value - remembered)
        attended += update * product
        tl.store(out + (start + token) * out_stride + v_rows, attended.to(out.dtype.element_ty), mask=is_row)
        rounded = (state * decay + update[:, None] * key[None, :]).to(recurrent_state.dtype.element_ty)
        new = recurrent_state + tl.maximum(target, 0) * slot_stride + offsets
        tl.store(new, rounded, mask=present & (target >= 0))
        state = rounded.to(tl.float32)
