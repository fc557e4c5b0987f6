"""The ops, defined token by token in plain torch and float32.

The recurrence is equation 10 of "Gated Delta Networks" (arXiv 2412.06464), one head, with q and k of unit length:

    S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        S: [head_v, head_k]
    o_t = S_t q_t / sqrt(head_k)
    g_t = -exp(a_log) softplus(a_t + dt_bias),  beta_t = beta_scale sigmoid(b_t)

All three ops share their addressing. Token tensors hold every token of the step; `query_start_loc` selects the op's
rows, so the decodes are `query_start_loc[: num_decodes + 1]` and the chunks `query_start_loc[num_decodes:]`. Tokens
outside of these rows are neither read nor written. A row's state is read whole before any of it is written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    import numpy as np

__all__ = ["L2_EPSILON", "causal_conv", "chunk_delta_rule", "decode"]

L2_EPSILON = 1e-6
"""Added to the squared length of a query or key before it is normalized, as the released models do."""


def causal_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: np.ndarray[Any, Any],
    state_read: Tensor,
    state_write: Tensor,
    max_query_len: int,
) -> None:
    """Convolve each channel of each row causally, continuing from the row's last inputs; then SiLU.

    Args:
        x: [num_tokens, channels], inputs.
        weight: [channels, taps], the last tap meets the token itself.
        conv_state: [num_slots, taps - 1, channels], the inputs before a row's first token, oldest first. The slot
            of a row's last token takes the last taps - 1 inputs.
        out: [num_tokens, channels], written.
        query_start_loc: [rows + 1] int32, first token of each row.
        query_start_loc_host: the same in numpy.
        state_read: [rows] int64, the slot to continue from; -1 starts from zeros.
        state_write: [num_tokens] int64, the slot that takes the state after this token, -1 for none; only the
            entry of a row's last token counts.
        max_query_len: most tokens of a row.
    """
    for row, (start, end) in enumerate(pairwise(query_start_loc_host.tolist())):
        if start == end:
            continue
        inputs = torch.cat([_read(conv_state, int(state_read[row])), x[start:end].float()])
        for token in range(end - start):
            out[start + token] = _convolve(inputs[token : token + weight.shape[1]], weight)
        _write(conv_state, int(state_write[end - 1]), inputs[end - start :])


def chunk_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    beta_scale: float,
    recurrent_state: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: np.ndarray[Any, Any],
    state_read: Tensor,
    state_write: Tensor,
    max_query_len: int,
) -> None:
    """Run the gated delta rule over chunks of any length, continuing from the rows' states.

    Args:
        qkv: [num_tokens, 2 * k_heads * head_k + v_heads * head_v], queries, keys and values after the convolution.
            Key head h serves the v_heads / k_heads consecutive value heads from h * v_heads / k_heads on.
        a: [num_tokens, v_heads], decay before softplus.
        b: [num_tokens, v_heads], update strength before sigmoid.
        a_log: [v_heads].
        dt_bias: [v_heads].
        beta_scale: factor of the update strength.
        recurrent_state: [num_slots, v_heads, head_v, head_k]. The slot of a row's last token takes the last state.
        out: [num_tokens, v_heads, head_v], written.
        query_start_loc: [rows + 1] int32, first token of each row.
        query_start_loc_host: the same in numpy.
        state_read: [rows] int64, the slot to continue from; -1 starts from zeros.
        state_write: [num_tokens] int64, the slot that takes the state after this token, -1 for none; only the
            entry of a row's last token counts.
        max_query_len: most tokens of a row.
    """
    for row, (start, end) in enumerate(pairwise(query_start_loc_host.tolist())):
        if start == end:
            continue
        state = _read(recurrent_state, int(state_read[row]))
        for token in range(start, end):
            decay, beta = _gates(a[token], b[token], a_log, dt_bias, beta_scale)
            state, out[token] = _delta_rule(state, qkv[token].float(), decay, beta)
        _write(recurrent_state, int(state_write[end - 1]), state)


def decode(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    beta_scale: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    max_query_len: int,
) -> None:
    """Convolution and gated delta rule for rows of a few tokens, with the state after every token kept.

    The carried state is rounded to the state's dtype after each token, so that several tokens at once equal the
    same tokens one at a time.

    Args:
        qkv: [num_tokens, channels], queries, keys and values before the convolution; see `chunk_delta_rule`.
        a: [num_tokens, v_heads], decay before softplus.
        b: [num_tokens, v_heads], update strength before sigmoid.
        weight: [channels, taps].
        a_log: [v_heads].
        dt_bias: [v_heads].
        beta_scale: factor of the update strength.
        conv_state: [num_slots, taps - 1, channels], written at the slot of every token.
        recurrent_state: [num_slots, v_heads, head_v, head_k], written at the slot of every token.
        out: [num_tokens, v_heads, head_v], written.
        query_start_loc: [rows + 1] int32, first token of each row; there may be rows without tokens.
        state_read: [rows] int64, the slot to continue from; -1 starts from zeros.
        state_write: [num_tokens] int64, the slot that takes the state after this token; -1 for none.
        max_query_len: most tokens of a row.
    """
    for row, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        if start == end:
            continue
        inputs = torch.cat([_read(conv_state, int(state_read[row])), qkv[start:end].float()])
        state = _read(recurrent_state, int(state_read[row]))
        for index, token in enumerate(range(start, end)):
            convolved = _convolve(inputs[index : index + weight.shape[1]], weight).to(qkv.dtype).float()
            decay, beta = _gates(a[token], b[token], a_log, dt_bias, beta_scale)
            state, out[token] = _delta_rule(state, convolved, decay, beta)
            state = state.to(recurrent_state.dtype).float()
            slot = int(state_write[token])
            _write(conv_state, slot, inputs[index + 1 : index + weight.shape[1]])
            _write(recurrent_state, slot, state)


def _read(states: Tensor, slot: int) -> Tensor:
    return states[slot].float() if slot >= 0 else torch.zeros_like(states[0], dtype=torch.float32)


def _write(states: Tensor, slot: int, value: Tensor) -> None:
    if slot >= 0:
        states[slot] = value.to(states.dtype)


def _convolve(window: Tensor, weight: Tensor) -> Tensor:
    """[taps, channels] and [channels, taps] to [channels]."""
    return functional.silu((window * weight.float().T).sum(0))


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, beta_scale: float) -> tuple[Tensor, Tensor]:
    """One token's decay, in (0, 1], and update strength, both [v_heads]."""
    log_decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return log_decay.exp(), b.float().sigmoid() * beta_scale


def _delta_rule(state: Tensor, qkv: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: [v_heads, head_v, head_k] state to the new state and [v_heads, head_v] output."""
    v_heads, head_v, head_k = state.shape
    key_dim = (qkv.shape[0] - v_heads * head_v) // 2
    query, key, value = torch.split(qkv, [key_dim, key_dim, v_heads * head_v])
    repeats = v_heads * head_k // key_dim
    query = _unit(query.view(-1, head_k)).repeat_interleave(repeats, 0)
    key = _unit(key.view(-1, head_k)).repeat_interleave(repeats, 0)
    value = value.view(v_heads, head_v)
    state = state * decay[:, None, None]
    remembered = (state * key[:, None, :]).sum(-1)
    state = state + beta[:, None, None] * (value - remembered)[:, :, None] * key[:, None, :]
    return state, (state * query[:, None, :]).sum(-1) * head_k**-0.5


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + L2_EPSILON)
