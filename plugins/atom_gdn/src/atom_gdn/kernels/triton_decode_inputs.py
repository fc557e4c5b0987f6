# mypy: disallow-untyped-decorators=False
"""What a decode step computes beside the recurrent states: convolution, norms, gates; see `triton_decode`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_gdn.kernels.triton_parts import convolve_token, gates, keep_inputs, padded, query_and_key

__all__ = ["stage", "staged_width"]


def staged_width(channels: int, v_heads: int, k_heads: int) -> int:
    """Numbers of a token: queries, keys and values, decays, update strengths, and products of query and key."""
    return channels + 2 * v_heads + k_heads


def stage(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    beta_scale: float,
    conv_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_read: torch.Tensor,
    state_write: torch.Tensor,
    head_shape: tuple[int, int, int],
    max_query_len: int,
    early: bool,
) -> torch.Tensor:
    """Convolve, normalize and gate, and move the convolution states on; arguments as in `reference.decode`.

    Returns:
        [num_tokens, `staged_width`] float32: unit queries with their scale, unit keys, values; by value head the decay
        and the update strength; by key head the product of query and key.
    """
    v_heads, head_v, head_k = head_shape
    channels, taps = weight.shape
    k_heads = (channels - v_heads * head_v) // (2 * head_k)
    group = v_heads // k_heads
    staged = qkv.new_empty((qkv.shape[0], staged_width(channels, v_heads, k_heads)), dtype=torch.float32)
    _stage[(k_heads, query_start_loc.shape[0] - 1)](
        qkv,
        a,
        b,
        weight,
        a_log,
        dt_bias,
        conv_state,
        staged,
        query_start_loc,
        state_read,
        state_write,
        beta_scale,
        head_k**-0.5,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        conv_state.stride(0),
        K_HEADS=k_heads,
        GROUP=group,
        GROUPS=padded(group),
        HEAD_K=head_k,
        HEAD_V=head_v,
        K_WIDTH=padded(head_k),
        CHANNELS=channels,
        OWN_VALUES=padded(group * head_v),
        OWN_CHANNELS=padded(2 * head_k + group * head_v),
        TAPS=taps,
        STATES=padded(taps - 1),
        EARLY=1 if max_query_len == 1 else padded(max(1, taps - 2)),
        SINGLE=max_query_len == 1,
        EARLY_NEXT=early,
        num_warps=4,
    )
    return staged


@triton.jit
def _stage(
    qkv: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    weight: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    conv_state: tl.tensor,
    staged: tl.tensor,
    query_start_loc: tl.tensor,
    state_read: tl.tensor,
    state_write: tl.tensor,
    beta_scale: tl.tensor,
    query_scale: tl.tensor,
    qkv_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    slot_stride: tl.tensor,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    K_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OWN_VALUES: tl.constexpr,
    OWN_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    STATES: tl.constexpr,
    EARLY: tl.constexpr,
    SINGLE: tl.constexpr,
    EARLY_NEXT: tl.constexpr,
) -> None:
    if EARLY_NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1)
    start = tl.load(query_start_loc + row).to(tl.int64)
    num_tokens = (tl.load(query_start_loc + row + 1) - start).to(tl.int32)
    slot = tl.load(state_read + row).to(tl.int64)
    if num_tokens <= 0:
        return
    has_past = slot >= 0
    inputs = qkv + start * qkv_stride
    past = conv_state + tl.maximum(slot, 0) * slot_stride
    keys = tl.arange(0, K_WIDTH)
    is_key = keys < HEAD_K
    q_channels = head * HEAD_K + keys
    k_channels = q_channels + K_HEADS * HEAD_K
    own = tl.arange(0, OWN_VALUES)
    is_own = own < GROUP * HEAD_V
    v_channels = 2 * K_HEADS * HEAD_K + head * (GROUP * HEAD_V) + own
    number = tl.arange(0, GROUPS)
    is_head = number < GROUP
    heads = head * GROUP + number
    head_log = tl.load(a_log + heads, mask=is_head, other=0.0).to(tl.float32)
    head_bias = tl.load(dt_bias + heads, mask=is_head, other=0.0).to(tl.float32)
    WIDTH: tl.constexpr = CHANNELS + 2 * K_HEADS * GROUP + K_HEADS
    for token in range(0, 1 if SINGLE else num_tokens):
        values = convolve_token(inputs, qkv_stride, past, has_past, weight, v_channels, is_own, token, CHANNELS, TAPS)
        query, key, product = query_and_key(
            inputs, qkv_stride, past, has_past, weight, q_channels, k_channels, is_key, token, query_scale, CHANNELS,
            TAPS,
        )  # fmt: skip
        own_a = tl.load(a + (start + token) * a_stride + heads, mask=is_head, other=0.0).to(tl.float32)
        own_b = tl.load(b + (start + token) * b_stride + heads, mask=is_head, other=0.0).to(tl.float32)
        log_decay, beta = gates(own_a, own_b, head_log, head_bias, beta_scale)
        spot = staged + (start + token) * WIDTH
        tl.store(spot + q_channels, query, mask=is_key)
        tl.store(spot + k_channels, key, mask=is_key)
        tl.store(spot + v_channels, values, mask=is_own)
        tl.store(spot + CHANNELS + heads, tl.exp(log_decay), mask=is_head)
        tl.store(spot + CHANNELS + K_HEADS * GROUP + heads, beta, mask=is_head)
        tl.store(spot + CHANNELS + 2 * K_HEADS * GROUP + head, product)
    keep_inputs(
        inputs, qkv_stride, past, has_past, conv_state, slot_stride, state_write + start, num_tokens, head,
        K_HEADS, GROUP, HEAD_K, HEAD_V, CHANNELS, OWN_CHANNELS, TAPS, STATES, EARLY,
    )  # fmt: skip
