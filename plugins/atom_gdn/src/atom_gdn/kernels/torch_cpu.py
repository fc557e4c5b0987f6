"""Convolution and decode for the CPU, vectorised over rows; the chunks are in `torch_cpu_chunks`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atom_gdn.kernels.reference import L2_EPSILON

__all__ = ["causal_conv", "decode", "gates", "read_states", "repeat_heads", "split_heads", "write_states"]

ROW_BLOCK_BYTES = 8 << 20
"""Decode states are worked on in blocks of about this size, which stay in a core's cache."""


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
    """See `reference.causal_conv`; one long convolution over all rows, each behind its history."""
    history = weight.shape[1] - 1
    lengths = np.diff(query_start_loc_host)
    rows = np.flatnonzero(lengths)
    if not rows.size:
        return
    starts, lengths = query_start_loc_host[:-1][rows].astype(np.int64), lengths[rows]
    # In the padded sequence, row r's history begins at begin[r] and its tokens at begin[r] + history.
    begin = np.concatenate([[0], np.cumsum(lengths + history)[:-1]])
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens = torch.from_numpy(np.repeat(starts, lengths) + within)
    places = torch.from_numpy(np.repeat(begin, lengths) + within)
    taps = torch.arange(history)
    begins = torch.from_numpy(begin)

    padded = x.new_empty((int(lengths.sum()) + rows.size * history, x.shape[1]), dtype=torch.float32)
    padded[begins[:, None] + taps] = read_states(conv_state, state_read[torch.from_numpy(rows)])
    padded[places + history] = x[tokens].float()
    out[tokens] = functional.silu(_convolve(padded, weight, 0)[places]).to(out.dtype)

    ends = torch.from_numpy(starts + lengths)
    tails = padded[(begins + torch.from_numpy(lengths.astype(np.int64)))[:, None] + taps]
    write_states(conv_state, state_write[ends - 1], tails)


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
    """See `reference.decode`; a loop over a row's few tokens, each step over all rows."""
    lengths = query_start_loc.diff()
    order = lengths.argsort(descending=True, stable=True)[: lengths.count_nonzero()]
    block = max(1, ROW_BLOCK_BYTES // (recurrent_state[0].numel() * 4))
    for rows in torch.split(order, block) if len(order) else ():
        _decode_rows(
            *(qkv, a, b, weight, a_log, dt_bias, beta_scale, conv_state, recurrent_state, out),
            *(query_start_loc[rows].long(), lengths[rows], state_read[rows], state_write),
        )


def _decode_rows(
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
    starts: Tensor,
    lengths: Tensor,
    state_read: Tensor,
    state_write: Tensor,
) -> None:
    """Decode rows of falling length, each with at least one token."""
    inputs = read_states(conv_state, state_read)
    states = read_states(recurrent_state, state_read)
    for index in range(int(lengths[0])):
        num_rows = int((lengths > index).sum())
        tokens = starts[:num_rows] + index
        window = torch.cat([inputs[:num_rows], qkv[tokens, None].float()], 1)
        inputs = window[:, 1:]
        convolved = functional.silu(_convolve(window, weight, 1)[:, 0]).to(qkv.dtype).float()
        query, key, value = split_heads(convolved, recurrent_state)
        repeats = value.shape[1] // key.shape[1]
        log_decay, beta = gates(a[tokens], b[tokens], a_log, dt_bias, beta_scale)
        decay = log_decay.exp()[..., None]

        # The old state meets key and query in one pass; the update's share of the output is added by hand.
        both = repeat_heads(torch.stack([key, query], -1), repeats)
        state = states[:num_rows]
        remembered, read = (decay * part for part in (state @ both).unbind(-1))
        update = beta[..., None] * (value - remembered)
        output = read + update * repeat_heads((key * query).sum(-1, keepdim=True), repeats)
        outer = (update.flatten(0, 1)[:, :, None], both[..., 0].flatten(0, 1)[:, None, :])
        state.mul_(decay[..., None]).flatten(0, 1).baddbmm_(*outer)
        out[tokens] = output.to(out.dtype)
        if recurrent_state.dtype != torch.float32:
            state.copy_(state.to(recurrent_state.dtype))
        write_states(conv_state, state_write[tokens], inputs)
        write_states(recurrent_state, state_write[tokens], state)


def read_states(states: Tensor, slots: Tensor) -> Tensor:
    """A float32 copy of the slots' states; zeros for -1."""
    found = states[slots.clamp(min=0)]
    if bool((slots < 0).any()):
        found[slots < 0] = 0
    return found.float()


def write_states(states: Tensor, slots: Tensor, values: Tensor) -> None:
    """Put values into their slots, except where the slot is -1."""
    if bool((slots < 0).any()):
        slots, values = slots[slots >= 0], values[slots >= 0]
    states.index_copy_(0, slots, values.to(states.dtype))


def _convolve(inputs: Tensor, weight: Tensor, dim: int) -> Tensor:
    """Correlate along `dim` with [channels, taps]; the result is taps - 1 shorter."""
    taps = weight.shape[1]
    length = inputs.shape[dim] - taps + 1
    found = inputs.narrow(dim, 0, length) * weight[:, 0].float()
    for tap in range(1, taps):
        found.addcmul_(inputs.narrow(dim, tap, length), weight[:, tap].float())
    return found


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, beta_scale: float) -> tuple[Tensor, Tensor]:
    """Logarithm of the decay, and update strength."""
    log_decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return log_decay, b.float().sigmoid() * beta_scale


def split_heads(qkv: Tensor, recurrent_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the last dimension into heads; queries and keys of unit length, queries scaled by 1 / sqrt(head_k)."""
    v_heads, head_v, head_k = recurrent_state.shape[1:]
    key_dim = (qkv.shape[-1] - v_heads * head_v) // 2
    query, key, value = torch.split(qkv, [key_dim, key_dim, v_heads * head_v], -1)
    query, key = (_unit(torch.unflatten(part, -1, (-1, head_k))) for part in (query, key))
    return query * head_k**-0.5, key, torch.unflatten(value, -1, (v_heads, head_v))


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + L2_EPSILON)


def repeat_heads(tensor: Tensor, repeats: int) -> Tensor:
    """Give each of the `repeats` value heads of a key head its copy; heads are dimension 1."""
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1)
