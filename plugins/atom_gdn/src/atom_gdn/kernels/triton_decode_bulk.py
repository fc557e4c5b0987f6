# mypy: disallow-untyped-decorators=False
"""Rows of at most a few tokens, with the copy engine moving the recurrent states; see `triton_decode`.

Everything but the states is done up front, for all tokens: convolution, norms and gates. The results wait in scratch
memory until a tile of the state comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from atom_gdn.kernels.triton_parts import convolve_token, gates, keep_inputs, padded, query_and_key

__all__ = ["MOST_TOKENS", "BulkTiles", "decode_bulk"]

MOST_TOKENS = 8
"""Most tokens of a row; the passes over a tile are unrolled."""


@dataclass(frozen=True)
class BulkTiles:
    """How the work is cut.

    Attributes:
        rows: of a head's state at a time.
        num_warps: of a program.
        num_stages: tiles in flight.
        max_registers: of a thread; `None` for no bound.
    """

    rows: int = 32
    num_warps: int = 2
    num_stages: int = 3
    max_registers: int | None = None

    @classmethod
    def choose(cls, num_programs: int, max_query_len: int, num_multiprocessors: int) -> BulkTiles:
        """Choose by how much there is to do: few programs must be quick, many must keep the memory busy."""
        if max_query_len > 1:
            return cls(num_warps=4, num_stages=1)
        return cls() if num_programs >= 2 * num_multiprocessors else cls(rows=64, num_warps=4)


def decode_bulk(
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
    tiles: BulkTiles,
) -> None:
    """Decode rows of at most `MOST_TOKENS` tokens; arguments as in `reference.decode`, last dimensions contiguous."""
    num_slots, v_heads, head_v, head_k = recurrent_state.shape
    channels, taps = weight.shape
    k_heads = (channels - v_heads * head_v) // (2 * head_k)
    group = v_heads // k_heads
    rows = min(tiles.rows, head_v)
    flat = recurrent_state.view(-1, head_k)
    staged = qkv.new_empty((qkv.shape[0], channels + 2 * v_heads + k_heads), dtype=torch.float32)
    _decode_bulk[(k_heads, query_start_loc.shape[0] - 1)](
        qkv,
        a,
        b,
        weight,
        a_log,
        dt_bias,
        conv_state,
        TensorDescriptor.from_tensor(flat, [rows, head_k]),
        out,
        staged,
        query_start_loc,
        state_read,
        state_write,
        num_slots,
        beta_scale,
        head_k**-0.5,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        conv_state.stride(0),
        out.stride(0),
        K_HEADS=k_heads,
        GROUP=group,
        GROUPS=padded(group),
        HEAD_K=head_k,
        HEAD_V=head_v,
        TILE_ROWS=rows,
        TILES=head_v // rows,
        CHANNELS=channels,
        OWN_VALUES=padded(group * head_v),
        OWN_CHANNELS=padded(2 * head_k + group * head_v),
        TAPS=taps,
        STATES=padded(taps - 1),
        EARLY=1 if max_query_len == 1 else padded(max(1, taps - 2)),
        TOKENS=max_query_len,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
    )


@triton.jit(do_not_specialize=["num_slots"])
def _decode_bulk(
    qkv: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    weight: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    conv_state: tl.tensor,
    recurrent_state: tl.tensor,
    out: tl.tensor,
    staged: tl.tensor,
    query_start_loc: tl.tensor,
    state_read: tl.tensor,
    state_write: tl.tensor,
    num_slots: tl.tensor,
    beta_scale: tl.tensor,
    query_scale: tl.tensor,
    qkv_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    conv_slot_stride: tl.tensor,
    out_stride: tl.tensor,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    OWN_VALUES: tl.constexpr,
    OWN_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    STATES: tl.constexpr,
    EARLY: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    row = tl.program_id(1)
    start = tl.load(query_start_loc + row).to(tl.int64)
    num_tokens = (tl.load(query_start_loc + row + 1) - start).to(tl.int32)
    slot = tl.load(state_read + row).to(tl.int64)
    if num_tokens <= 0:
        return
    has_past = slot >= 0
    inputs = qkv + start * qkv_stride
    past = conv_state + tl.maximum(slot, 0) * conv_slot_stride
    keys = tl.arange(0, HEAD_K)
    q_channels = head * HEAD_K + keys
    k_channels = q_channels + K_HEADS * HEAD_K
    is_key = keys < HEAD_K
    own = tl.arange(0, OWN_VALUES)
    is_own = own < GROUP * HEAD_V
    v_channels = 2 * K_HEADS * HEAD_K + head * (GROUP * HEAD_V) + own
    number = tl.arange(0, GROUPS)
    is_head = number < GROUP
    heads = head * GROUP + number
    head_log = tl.load(a_log + heads, mask=is_head, other=0.0).to(tl.float32)
    head_bias = tl.load(dt_bias + heads, mask=is_head, other=0.0).to(tl.float32)
    WIDTH: tl.constexpr = CHANNELS + 2 * K_HEADS * GROUP + K_HEADS
    for index in range(0, 1 if TOKENS == 1 else num_tokens):
        all_values = convolve_token(
            inputs, qkv_stride, past, has_past, weight, v_channels, is_own, index, CHANNELS, TAPS
        )
        own_query, own_key, own_product = query_and_key(
            inputs, qkv_stride, past, has_past, weight, q_channels, k_channels, is_key, index, query_scale, CHANNELS,
            TAPS,
        )  # fmt: skip
        head_a = tl.load(a + (start + index) * a_stride + heads, mask=is_head, other=0.0).to(tl.float32)
        head_b = tl.load(b + (start + index) * b_stride + heads, mask=is_head, other=0.0).to(tl.float32)
        log_decays, betas = gates(head_a, head_b, head_log, head_bias, beta_scale)
        stage = staged + (start + index) * WIDTH
        tl.store(stage + q_channels, own_query)
        tl.store(stage + k_channels, own_key)
        tl.store(stage + v_channels, all_values, mask=is_own)
        tl.store(stage + CHANNELS + heads, tl.exp(log_decays), mask=is_head)
        tl.store(stage + CHANNELS + K_HEADS * GROUP + heads, betas, mask=is_head)
        tl.store(stage + CHANNELS + 2 * K_HEADS * GROUP + head, own_product)
    tl.debug_barrier()
    # The copy engine reads zeros past the last slot, and writes nothing there.
    SLOT_ROWS: tl.constexpr = K_HEADS * GROUP * HEAD_V
    read_row = (tl.where(has_past, slot, num_slots) * SLOT_ROWS).to(tl.int32) + head * (GROUP * HEAD_V)
    only = staged + start * WIDTH
    query = tl.load(only + q_channels)
    key = tl.load(only + k_channels)
    for tile in tl.range(0, GROUP * TILES, num_stages=STAGES):
        rows = head * (GROUP * HEAD_V) + tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        v_head = head * GROUP + tile // TILES
        state = recurrent_state.load([read_row + tile * TILE_ROWS, 0]).to(tl.float32)
        for token in tl.static_range(TOKENS):
            is_token = token < num_tokens
            spot = staged + (start + token) * WIDTH
            if TOKENS > 1:
                query = tl.load(spot + q_channels, mask=is_key & is_token, other=0.0)
                key = tl.load(spot + k_channels, mask=is_key & is_token, other=0.0)
            value = tl.load(spot + 2 * K_HEADS * HEAD_K + rows, mask=(rows >= 0) & is_token, other=0.0)
            decay = tl.load(spot + CHANNELS + v_head, mask=is_token, other=0.0)
            beta = tl.load(spot + CHANNELS + K_HEADS * GROUP + v_head, mask=is_token, other=0.0)
            product = tl.load(spot + CHANNELS + 2 * K_HEADS * GROUP + head, mask=is_token, other=0.0)
            target = tl.load(state_write + start + token, mask=is_token, other=-1)
            remembered = tl.sum(state * key[None, :], 1) * decay
            attended = tl.sum(state * query[None, :], 1) * decay
            update = beta * (value - remembered)
            attended += update * product
            state = state * decay + update[:, None] * key[None, :]
            results = out + (start + token) * out_stride + rows
            tl.store(results, attended.to(out.dtype.element_ty), mask=(rows >= 0) & is_token)
            rounded = state.to(recurrent_state.dtype)
            write_row = (tl.where(target >= 0, target, num_slots) * SLOT_ROWS).to(tl.int32) + head * (GROUP * HEAD_V)
            recurrent_state.store([write_row + tile * TILE_ROWS, 0], rounded)
            state = rounded.to(tl.float32)
    keep_inputs(
        inputs, qkv_stride, past, has_past, conv_state, conv_slot_stride, state_write + start, num_tokens, head,
        K_HEADS, GROUP, HEAD_K, HEAD_V, CHANNELS, OWN_CHANNELS, TAPS, STATES, EARLY,
    )  # fmt: skip
