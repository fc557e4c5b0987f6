"""What the `mimo.*` ops compute, in plain torch: one row after another, every score in memory.

All tensors of a call are on one device. Rows are requests; `query_start_loc` may be a slice of a step's, then its
first entry is not 0, and only the tokens of its rows are read and written. Row r has the tokens at positions
`num_computed[r], num_computed[r] + 1, ...`.

A ring of `ring_rows >= window` rows holds the key and value of position p in row `p % ring_rows`. Of a row's ring
only the positions below `num_computed` count: other rows hold rejected drafts, or were never written and may be NaN.

`scratch` lives as long as the rows do: a kernel may keep there what depends on the rows, the window and the ring's
size alone, and finds it again in the step's next layer. Host mirrors hold the same as their tensors, in numpy; a
kernel on another device may read them only where it does not run in a captured graph.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["ring_decode", "ring_prefill", "ring_write"]


def ring_decode(
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
    """Rows of few tokens attend over their ring, which does not hold these tokens yet, and themselves.

    The token at position p sees the positions p - window + 1 ... p.

    Args:
        query: [num_tokens, num_heads, head_dim]; query head h uses key head h // (num_heads / num_kv_heads).
        key: [num_tokens, num_kv_heads, head_dim].
        value: [num_tokens, num_kv_heads, v_head_dim].
        ring_k: [num_slots, ring_rows, num_kv_heads, head_dim].
        ring_v: [num_slots, ring_rows, num_kv_heads, v_head_dim].
        out: [num_tokens, num_heads, v_head_dim]; the rows' tokens are written.
        query_start_loc: [rows + 1] int32, first token of each row and the end of the last.
        query_start_loc_host: its mirror.
        num_computed: [rows] int32, position of each row's first token.
        num_computed_host: its mirror.
        slots: [rows] int64, the slot of each row's ring; -1 sees only the row's own tokens.
        slots_host: its mirror.
        max_query_len: no row has more tokens.
        scaling: factor of the scores.
        window: keys that a token sees, itself included.
        sinks: [num_heads], one more logit per head in the softmax, without a value.
        scratch: kept for the step.
    """
    ring_rows = ring_k.shape[1]
    for row, (start, end) in enumerate(pairwise(query_start_loc_host.tolist())):
        if start == end:
            continue
        slot, first_new = int(slots_host[row]), int(num_computed_host[row])
        first = max(0, first_new - window + 1) if slot >= 0 else first_new
        old = torch.arange(first, first_new, device=query.device) % ring_rows
        keys = torch.cat([ring_k[slot, old].to(key.dtype), key[start:end]])
        values = torch.cat([ring_v[slot, old].to(value.dtype), value[start:end]])
        out[start:end] = _attend(query[start:end], keys, values, first, first_new, scaling, window, sinks)


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
    """Chunks of many tokens attend over their ring and themselves; the same function of its arguments as `ring_decode`.

    A chunk may be longer than the ring, and its first may be the request's first.
    """
    ring_decode(
        query,
        key,
        value,
        ring_k,
        ring_v,
        out,
        query_start_loc,
        query_start_loc_host,
        num_computed,
        num_computed_host,
        slots,
        slots_host,
        max_query_len,
        scaling,
        window,
        sinks,
        scratch,
    )


def ring_write(
    key: Tensor,
    value: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Array,
    num_computed: Tensor,
    num_computed_host: Array,
    slots: Tensor,
    slots_host: Array,
    max_query_len: int,
    scratch: dict[Any, Any],
) -> None:
    """Write each row's last `ring_rows` tokens, or all if there are fewer, into its ring.

    Args:
        key: [num_tokens, num_kv_heads, head_dim].
        value: [num_tokens, num_kv_heads, v_head_dim].
        ring_k: [num_slots, ring_rows, num_kv_heads, head_dim]; written.
        ring_v: [num_slots, ring_rows, num_kv_heads, v_head_dim]; written.
        query_start_loc: as in `ring_decode`.
        query_start_loc_host: as in `ring_decode`.
        num_computed: as in `ring_decode`.
        num_computed_host: as in `ring_decode`.
        slots: [rows] int64, the slot of each row's ring; -1 writes nothing.
        slots_host: its mirror.
        max_query_len: as in `ring_decode`.
        scratch: as in `ring_decode`.
    """
    ring_rows = ring_k.shape[1]
    for row, (start, end) in enumerate(pairwise(query_start_loc_host.tolist())):
        slot = int(slots_host[row])
        if slot < 0:
            continue
        for token in range(max(start, end - ring_rows), end):
            position = int(num_computed_host[row]) + token - start
            ring_k[slot, position % ring_rows] = key[token].to(ring_k.dtype)
            ring_v[slot, position % ring_rows] = value[token].to(ring_v.dtype)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: int,
    first_query: int,
    scaling: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """One row: softmax attention in float32, in float64 where the query is float64.

    Args:
        query: [tokens, num_heads, head_dim], from position `first_query`.
        key: [keys, num_kv_heads, head_dim], from position `first_key`.
        value: [keys, num_kv_heads, v_head_dim], from position `first_key`.
        first_key: position of the first key.
        first_query: position of the first query.
        scaling: factor of the scores.
        window: keys that a token sees, itself included.
        sinks: as in `ring_decode`.

    Returns:
        [tokens, num_heads, v_head_dim], the query's dtype
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.shape[1] // key.shape[1]
    keys = key.to(dtype).repeat_interleave(groups, dim=1)
    values = value.to(dtype).repeat_interleave(groups, dim=1)
    scores = torch.einsum("ihd,jhd->hij", query.to(dtype), keys) * scaling
    i = torch.arange(first_query, first_query + query.shape[0], device=query.device).unsqueeze(1)
    j = torch.arange(first_key, first_key + key.shape[0], device=query.device).unsqueeze(0)
    visible = (j <= i) & (j > i - window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink_scores = sinks.to(dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[0]]
    return torch.einsum("hij,jhd->ihd", weights, values).to(query.dtype)
