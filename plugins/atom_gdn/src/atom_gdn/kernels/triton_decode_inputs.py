# mypy: disallow-untyped-decorators=False
"""What a decode step computes beside the recurrent states: convolution, norms, gates; see `triton_decode`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_gdn.kernels.triton_parts import gates, padded, silu, unit_factor

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
        values = _convolve_token(inputs, qkv_stride, past, has_past, weight, v_channels, is_own, token, CHANNELS, TAPS)
        query, key, product = _query_and_key(
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
    _keep_inputs(
        inputs, qkv_stride, past, has_past, conv_state, slot_stride, state_write + start, num_tokens, head,
        K_HEADS, GROUP, HEAD_K, HEAD_V, CHANNELS, OWN_CHANNELS, TAPS, STATES, EARLY,
    )  # fmt: skip


@triton.jit
def _convolve_token(
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
def _query_and_key(
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
    query = _convolve_token(inputs, stride, past, has_past, weight, q_channels, present, token, CHANNELS, TAPS)
    key = _convolve_token(inputs, stride, past, has_past, weight, k_channels, present, token, CHANNELS, TAPS)
    query = query * (unit_factor(query, 0) * query_scale)
    key = key * unit_factor(key, 0)
    return query, key, tl.sum(query * key, 0)


@triton.jit
def _keep_inputs(
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
