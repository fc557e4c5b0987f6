"""The `mimo.*` ops for the CPU: decodes batched over rows, chunks in tiles of queries.

Decode rows attend over their whole ring as it lies, with a mask from positions; which rows share a call and what
they see is planned once per step, in `scratch`. Chunks put the ring in order of positions first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["SCRATCH_BYTES", "ring_decode", "ring_prefill", "ring_write"]

SCRATCH_BYTES = 16 << 20
"""Most bytes that a group of decode rows or a tile of a chunk has in work, about."""
_GROUP_ELEMENTS = 1 << 18
"""Elements of keys and values that a group of decode rows gathers, at most, if it has more than one row."""
_TILE_TOKENS = 128
"""Query tokens of a chunk that share a mask."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Group:
    """Decode rows that share a call, all with the same number of tokens.

    Attributes:
        tokens: the rows' flat tokens.
        num_rows: how many rows.
        slots: [rows] int64, no -1.
        unseen: [rows, ring_rows] bool, ring rows that no token of the row sees: their content means nothing.
        hidden: [rows, 1, 1, tokens per row, ring_rows + tokens per row] bool, what a token does not see.
    """

    tokens: slice
    num_rows: int
    slots: Tensor
    unseen: Tensor
    hidden: Tensor


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
    """Rows of few tokens attend over their ring and themselves; see `reference.ring_decode`."""
    ring_rows, num_kv_heads, head_dim = ring_k.shape[1:]
    row_elements = (ring_rows + max_query_len) * num_kv_heads * (head_dim + ring_v.shape[3])
    most_rows = max(1, _GROUP_ELEMENTS // row_elements)
    groups = scratch.get((window, ring_rows, most_rows))
    if groups is None:
        rows = query_start_loc_host.astype(np.int64), num_computed_host.astype(np.int64), slots_host
        groups = scratch[window, ring_rows, most_rows] = list(_decode_groups(*rows, window, ring_rows, most_rows))
    dtype = _compute_dtype(query)
    for group in groups:
        by_row = (group.num_rows, -1, num_kv_heads)
        new_keys, new_values = (tensor[group.tokens].reshape(*by_row, tensor.shape[2]) for tensor in (key, value))
        keys = torch.cat([ring_k[group.slots].to(dtype), new_keys.to(dtype)], dim=1)
        old_values = ring_v[group.slots].to(dtype).masked_fill_(group.unseen[..., None, None], 0.0)
        values = torch.cat([old_values, new_values.to(dtype)], dim=1)
        # [rows, kv_heads, heads per kv head, tokens per row, dim]
        queries = query[group.tokens].to(dtype).reshape(*by_row, query.shape[1] // num_kv_heads, head_dim)
        queries = queries.permute(0, 2, 3, 1, 4)
        attended = _attend(queries, keys.transpose(1, 2), values.transpose(1, 2), group.hidden, scaling, sinks)
        out[group.tokens] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1).to(out.dtype)


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
    """Chunks attend over their ring and themselves; see `reference.ring_prefill`."""
    dtype, num_kv_heads = _compute_dtype(query), key.shape[1]
    for row, (start, end) in enumerate(pairwise(query_start_loc_host.tolist())):
        slot, first_new = int(slots_host[row]), int(num_computed_host[row])
        num_old = min(first_new, window - 1) if slot >= 0 else 0
        old = torch.arange(first_new - num_old, first_new) % ring_k.shape[1]
        keys, values = (
            torch.cat([ring[slot, old].to(dtype), new[start:end].to(dtype)]).transpose(0, 1).unsqueeze(0)
            for ring, new in ((ring_k, key), (ring_v, value))
        )
        for first in range(0, end - start, _TILE_TOKENS):
            last = min(first + _TILE_TOKENS, end - start)
            tokens = slice(start + first, start + last)
            # Counted from the oldest key of the row: query i is at num_old + i, and sees nothing before begin.
            begin, stop = max(0, num_old + first - window + 1), num_old + last
            i, j = torch.arange(num_old + first, stop).unsqueeze(1), torch.arange(begin, stop)
            hidden = (j > i) | (j <= i - window)
            queries = query[tokens].to(dtype).reshape(last - first, num_kv_heads, -1, query.shape[2])
            queries = queries.permute(1, 2, 0, 3).unsqueeze(0)
            attended = _attend(queries, keys[:, :, begin:stop], values[:, :, begin:stop], hidden, scaling, sinks)
            out[tokens] = attended[0].permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)


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
    """Write each row's last tokens into its ring; see `reference.ring_write`."""
    ring_rows = ring_k.shape[1]
    plan = scratch.get(("write", ring_rows))
    if plan is None:
        starts = query_start_loc_host.astype(np.int64)
        plan = _write_plan(starts, num_computed_host.astype(np.int64), slots_host, ring_rows)
        scratch["write", ring_rows] = plan
    tokens, targets = plan
    ring_k.view(-1, *ring_k.shape[2:]).index_copy_(0, targets, key[tokens].to(ring_k.dtype))
    ring_v.view(-1, *ring_v.shape[2:]).index_copy_(0, targets, value[tokens].to(ring_v.dtype))


def _write_plan(starts: Array, num_computed: Array, slots: Array, ring_rows: int) -> tuple[Tensor, Tensor]:
    """Flat tokens that are written, and their places among the rows of all rings."""
    lengths = np.diff(starts)
    written = np.where(slots >= 0, np.minimum(lengths, ring_rows), 0)
    within = np.arange(written.sum()) - np.repeat(np.cumsum(written) - written, written)
    within += np.repeat(lengths - written, written)
    positions = np.repeat(num_computed, written) + within
    targets = np.repeat(slots, written) * ring_rows + positions % ring_rows
    return torch.from_numpy(np.repeat(starts[:-1], written) + within), torch.from_numpy(targets)


def _decode_groups(
    starts: Array, num_computed: Array, slots: Array, window: int, ring_rows: int, most_rows: int
) -> Iterator[_Group]:
    """Cut rows into groups of equal query length; rows without tokens are in none."""
    lengths = np.diff(starts)
    begin = 0
    for edge in [*(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]:
        while begin < edge:
            rows = slice(begin, min(edge, begin + most_rows))
            if lengths[begin]:
                tokens = slice(int(starts[rows.start]), int(starts[rows.stop]))
                yield _decode_group(tokens, num_computed[rows], slots[rows], int(lengths[begin]), window, ring_rows)
            begin = rows.stop


def _decode_group(tokens: slice, num_computed: Array, slots: Array, length: int, window: int, ring_rows: int) -> _Group:
    newest = num_computed[:, None] - 1
    held = newest - (newest - np.arange(ring_rows)) % ring_rows
    held = np.where((held >= 0) & (slots[:, None] >= 0), held, -window - 1)
    queries = num_computed[:, None] + np.arange(length)
    keys = np.concatenate([held, queries], axis=1)[:, None]
    hidden = (keys > queries[..., None]) | (keys <= queries[..., None] - window)
    return _Group(
        tokens=tokens,
        num_rows=len(num_computed),
        slots=torch.from_numpy(np.maximum(slots, 0)),
        unseen=torch.from_numpy(hidden[..., :ring_rows].all(axis=1)),
        hidden=torch.from_numpy(hidden)[:, None, None],
    )


def _compute_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
    """Softmax attention with sinks.

    Args:
        query: [rows, kv_heads, heads per kv head, tokens, head_dim].
        key: [rows, kv_heads, keys, head_dim]; where hidden from every token, anything.
        value: [rows, kv_heads, keys, v_head_dim]; finite.
        hidden: bool, broadcast to [rows, kv_heads, heads per kv head, tokens, keys]; a token sees one key at least.
        scaling: factor of the scores.
        sinks: [num_heads].

    Returns:
        [rows, kv_heads, heads per kv head, tokens, v_head_dim]
    """
    folded = (query * scaling).flatten(2, 3)
    scores = torch.matmul(folded, key.transpose(-1, -2)).view(*query.shape[:-1], -1)
    scores.masked_fill_(hidden, float("-inf"))
    highest = scores.amax(dim=-1, keepdim=True)
    if sinks is None:
        weights = scores.sub_(highest).exp_()
        total = weights.sum(dim=-1, keepdim=True)
    else:
        sink_scores = sinks.to(scores.dtype).view(*query.shape[1:3], 1, 1)
        highest = torch.maximum(highest, sink_scores)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink_scores - highest)
    attended = torch.matmul(weights.flatten(2, 3), value) / total.flatten(2, 3)
    return attended.view(*query.shape[:-1], -1)
