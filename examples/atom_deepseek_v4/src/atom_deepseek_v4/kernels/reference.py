"""What the ops `deepseek_v4.*` compute, in plain torch.

All tensors of a call are on one device. Rows are requests; row r has the flat tokens from `query_start_loc[r]` to
`query_start_loc[r + 1]`, at positions `num_computed[r]` and on. `_host` arguments are numpy.

A ring of R rows keeps what belongs to position p in row p % R. Of a row's ring only positions below `num_computed`
count: other rows hold rejected drafts, or were never written and may be NaN. Entry w of a row stands for the tokens
w * ratio ... w * ratio + ratio - 1; it lies in the block of these tokens. A token at position p sees the entries below
(p + 1) // ratio, those that its request has completed with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["SCRATCH_BYTES", "attend", "compress", "select", "write_ring"]

SCRATCH_BYTES = 4 << 20
"""About what scores and gathered entries take at a time; queries are cut into tiles that fit, of one token at least."""


def write_ring(values: Tensor, ring: Tensor, positions: Tensor, token_slots: Tensor, token_ends: Tensor) -> None:
    """Write the last tokens of each row, as many as the ring has rows or fewer, into its ring.

    Args:
        values: [num_tokens, ...].
        ring: [num_slots, ring_rows, ...]; written.
        positions: [num_tokens] int64.
        token_slots: [num_tokens] int64, the ring of each token; -1 for a padding token, which is not written.
        token_ends: [num_tokens] int64, the position after the row's last token.
    """
    ring_rows = ring.shape[1]
    kept = (token_slots >= 0) & (positions >= token_ends - ring_rows)
    ring[token_slots[kept], positions[kept] % ring_rows] = values[kept].to(ring.dtype)


def compress(
    values: Tensor,
    ring: Tensor,
    position_bias: Tensor,
    windows: Tensor,
    slots: Tensor,
    num_computed: Tensor,
    token_offsets: Tensor,
    overlaps: bool,
) -> Tensor:
    """Pool the windows that the step closes: the mean of their tokens' values, weighted by a softmax of the gates.

    The softmax is for each channel alone, over the window's tokens, of gate plus position bias (DeepSeek-V4, equations
    9 to 12 and 20 to 23; `DeepseekV4CSACompressor`, `DeepseekV4HCACompressor`). Where windows overlap, a token has two
    series of `dim` channels side by side, and entry w pools the first series of window w - 1 with the second of window
    w; before window 0 there is nothing.

    Args:
        values: [num_tokens, 2, width], values and gates of the step's tokens; width is dim, or 2 * dim with overlap.
        ring: [num_slots, ring_rows, 2, width], those of earlier tokens.
        position_bias: [ratio, width] float32, added to the gates by place in the window.
        windows: [closed] int64, the windows' numbers.
        slots: [closed] int64, the ring of each window's row.
        num_computed: [closed] int64, from this position on tokens are in `values`, before it in the ring.
        token_offsets: [closed] int64, position + offset is the flat token.
        overlaps: whether windows overlap.

    Returns:
        [closed, dim], dtype of the values
    """
    ratio, width = position_bias.shape
    dim = width // 2 if overlaps else width
    places = torch.arange(-ratio if overlaps else 0, ratio, device=values.device)
    positions = windows[:, None] * ratio + places
    in_step = positions >= num_computed[:, None]
    tokens = (positions + token_offsets[:, None]).clamp(0, len(values) - 1)
    old = ring[slots[:, None], positions % ring.shape[1]].to(values.dtype)
    sources = torch.where(in_step[..., None, None], values[tokens], old)
    # A window before the first holds garbage, perhaps NaN.
    exists = (positions >= 0)[..., None]
    value = sources[:, :, 0].masked_fill(~exists, 0)
    gate = (sources[:, :, 1] + position_bias.repeat(2 if overlaps else 1, 1)).masked_fill(~exists, float("-inf"))
    if overlaps:
        value, gate = (torch.cat((part[:, :ratio, :dim], part[:, ratio:, dim:]), 1) for part in (value, gate))
    weights = gate.softmax(dim=1, dtype=torch.promote_types(gate.dtype, torch.float32))
    return (value * weights.to(value.dtype)).sum(dim=1)


def select(
    index_query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    query_start_loc_host: Array,
    num_computed_host: Array,
    block_tables: Tensor,
    scaling: float,
    top_k: int,
    ratio: int,
) -> Tensor:
    """Choose each token's best entries: the largest sums over heads of weight times ReLU of the score.

    Source: DeepSeek-V4, equations 13 to 17; `DeepseekV4Indexer`.

    Args:
        index_query: [num_tokens, index_heads, dim], rotated.
        head_weights: [num_tokens, index_heads] float32.
        index_keys: [num_blocks, block_size / ratio, dim].
        query_start_loc_host: [rows + 1], first token of each row and the end of the last.
        num_computed_host: [rows], position of each row's first token.
        block_tables: [rows, max_blocks] int32.
        scaling: factor of the scores.
        top_k: entries per token at most; no row needs more than it has entries.
        ratio: tokens per entry.

    Returns:
        [num_tokens, top_k] int64, entries of the token's row in no particular order; -1 where there are fewer.
    """
    selection = torch.full((len(index_query), top_k), -1, dtype=torch.int64, device=index_query.device)
    dtype = _compute_dtype(index_query)
    for row, (start, end) in enumerate(pairwise(query_start_loc_host.tolist())):
        first = int(num_computed_host[row])
        num_entries = (first + end - start) // ratio
        if start == end or num_entries == 0:
            continue
        keys = _gather(index_keys, block_tables[row], num_entries).to(dtype)
        for tile in _tiles(start, end, index_query.shape[1] * num_entries * dtype.itemsize * 3):
            positions = torch.arange(tile.start - start + first, tile.stop - start + first, device=keys.device)
            scores = (index_query[tile].to(dtype) @ keys.T).relu() * scaling
            scores = (scores * head_weights[tile, :, None]).sum(dim=1)
            visible = torch.arange(num_entries, device=keys.device) < ((positions + 1) // ratio)[:, None]
            best = scores.masked_fill(~visible, float("-inf")).topk(min(top_k, num_entries), dim=-1).indices
            selection[tile, : best.shape[1]] = best.masked_fill(~visible.gather(1, best), -1)
    return selection


def attend(
    query: Tensor,
    key: Tensor,
    ring: Tensor,
    entries: Tensor | None,
    selection: Tensor | None,
    out: Tensor,
    query_start_loc_host: Array,
    num_computed_host: Array,
    slots_host: Array,
    block_tables: Tensor,
    scaling: float,
    window: int,
    ratio: int | None,
    sinks: Tensor,
) -> None:
    """Attend over the last `window` tokens, compressed entries, and a sink; keys are the values too.

    Args:
        query: [num_tokens, num_heads, dim], rotated.
        key: [num_tokens, dim], rotated; one for all heads.
        ring: [num_slots, ring_rows, dim], keys of earlier tokens.
        entries: [num_blocks, block_size / ratio, dim]; `None` without.
        selection: [num_tokens, top_k] int64, the entries that each token sees, -1 for none; `None` for all visible.
        out: [num_tokens, num_heads, dim]; the rows' tokens are written.
        query_start_loc_host: [rows + 1], first token of each row and the end of the last.
        num_computed_host: [rows], position of each row's first token.
        slots_host: [rows], the slot of each row's ring.
        block_tables: [rows, max_blocks] int32.
        scaling: factor of the scores.
        window: tokens that a token sees, itself included.
        ratio: tokens per entry; `None` without entries.
        sinks: [num_heads], one more logit per head in the softmax, without a value.
    """
    ring_rows, num_heads, dtype = ring.shape[1], query.shape[1], _compute_dtype(query)
    for row, (start, end) in enumerate(pairwise(query_start_loc_host.tolist())):
        if start == end:
            continue
        first = int(num_computed_host[row])
        first_key = max(0, first - window + 1)
        old = torch.arange(first_key, first, device=query.device) % ring_rows
        keys = torch.cat((ring[int(slots_host[row]), old].to(dtype), key[start:end].to(dtype)))
        num_entries = 0 if ratio is None else (first + end - start) // ratio
        per_token = num_entries if selection is None else selection.shape[1]
        found = keys[:0]
        if entries is not None and selection is None:
            found = _gather(entries, block_tables[row], num_entries).to(dtype)
        token_elements = 3 * num_heads * (len(keys) + per_token) + per_token * keys.shape[1]
        for tile in _tiles(start, end, token_elements * dtype.itemsize):
            positions = torch.arange(tile.start - start + first, tile.stop - start + first, device=query.device)
            distance = positions[:, None] - torch.arange(first_key, first + end - start, device=query.device)
            in_window = (distance >= 0) & (distance < window)
            if entries is not None and selection is not None:
                seen = selection[tile] >= 0
                found = _pick(entries, block_tables[row], selection[tile]).to(dtype)
            else:
                visible = positions * 0 if ratio is None else (positions + 1) // ratio
                seen = torch.arange(num_entries, device=query.device) < visible[:, None]
            scaled = query[tile].to(dtype) * scaling
            out[tile] = _attend(scaled, keys, in_window, found, seen, sinks).to(out.dtype)


def _attend(query: Tensor, keys: Tensor, in_window: Tensor, entries: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    """One tile of a row; [tokens, num_heads, dim].

    Args:
        query: [tokens, num_heads, dim], scaled.
        keys: [keys, dim].
        in_window: [tokens, keys], which keys a token sees.
        entries: [entries, dim], or [tokens, entries, dim] where each token has its own.
        seen: [tokens, entries], which entries a token sees.
        sinks: [num_heads].
    """
    scores = torch.cat((query @ keys.mT, query @ entries.mT), dim=-1)
    scores = scores.masked_fill(~torch.cat((in_window, seen), 1)[:, None], float("-inf"))
    sink = sinks.to(query.dtype).view(1, -1, 1).expand(len(query), -1, 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)
    return weights[..., : len(keys)] @ keys + weights[..., len(keys) : -1] @ entries


def _gather(entries: Tensor, block_table: Tensor, num_entries: int) -> Tensor:
    """The first entries of a row, [num_entries, dim]; all of them have been written."""
    num_blocks = -(-num_entries // entries.shape[1])
    return entries[block_table[:num_blocks].long()].flatten(0, 1)[:num_entries]


def _pick(entries: Tensor, block_table: Tensor, selection: Tensor) -> Tensor:
    """The selected entries of a row, [tokens, top_k, dim]; zero for -1, whatever lies where it would point."""
    chosen = selection.clamp(min=0)
    found = entries[block_table[chosen // entries.shape[1]].long(), chosen % entries.shape[1]]
    return found.masked_fill((selection < 0)[..., None], 0)


def _tiles(start: int, end: int, token_bytes: int) -> Iterator[slice]:
    size = max(1, SCRATCH_BYTES // max(1, token_bytes))
    for first in range(start, end, size):
        yield slice(first, min(end, first + size))


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
