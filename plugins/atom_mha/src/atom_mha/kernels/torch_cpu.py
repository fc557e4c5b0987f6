"""The `mha.*` ops for the CPU, out of torch's own fused attention.

Decode rows are batched: neighbouring rows of similar length gather their keys into one padded tensor and take one
call. Which rows, which slots and which mask is planned once per step and kind of mask, in `scratch`. Long rows stay
alone, and a row whose slots are consecutive is read in place. Prefill goes row by row and cuts long queries, so
that a mask stays small.

Padding repeats a row's last key instead of reading on behind it: memory that was never written may hold NaN, which
no mask removes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from atom_mha.kernels.float8 import dequantize, quantize

__all__ = ["decode", "prefill", "prefill_paged", "write_kv"]

_GROUP_KEYS = 1024
"""Most keys, padding included, that a group of decode rows gathers."""
_GROUP_PADDING = 1.5
"""Most keys of a group, padding included, per key without."""
_TILE_TOKENS = 256
"""Query tokens of a prefill chunk that share a mask."""
_TILE_SCORES = 1 << 22
"""Most scores in memory where torch's fused attention cannot be used."""

Array = np.ndarray[Any, Any]


def write_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slot_mapping: Tensor,
    scratch: dict[Any, Any],
) -> None:
    """Write a step's keys and values into the paged cache; see `reference.write_kv`."""
    if "written" not in scratch:
        written = slot_mapping >= 0
        scratch["written"] = None if bool(written.all()) else written.nonzero().squeeze(1)
    if scratch["written"] is not None:
        written = scratch["written"]
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    for new, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        if scale is None:
            cache.flatten(0, 1).index_copy_(0, slot_mapping, new.to(cache.dtype))
        else:
            numbers, scales = quantize(new)
            cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slot_mapping, numbers.view(torch.uint8))
            block_size = cache.shape[1]
            scale.transpose(1, 2)[slot_mapping // block_size, slot_mapping % block_size] = scales


@dataclass
class _Group:
    """Decode rows that share a call.

    Attributes:
        tokens: the rows' flat tokens.
        num_tokens: how many.
        num_rows: rows, all with the same number of tokens.
        slots: where the keys are: a slice, or [rows * keys] int64, padded by repetition.
        visible: [rows, tokens per row, keys]; `None` where every token sees every key.
        bias: by dtype and query heads per key head, `visible` as a summand of the scores.
    """

    tokens: slice
    num_tokens: int
    num_rows: int
    slots: slice | Tensor
    visible: Tensor | None
    bias: dict[tuple[torch.dtype, int], Tensor]

    def bias_for(self, dtype: torch.dtype, groups: int) -> Tensor | None:
        """[rows, 1, groups * tokens per row, keys], 0 or -inf."""
        if self.visible is None:
            return None
        found = self.bias.get((dtype, groups))
        if found is None:
            repeated = self.visible.unsqueeze(1).expand(-1, groups, -1, -1).flatten(1, 2).unsqueeze(1)
            found = torch.zeros(repeated.shape, dtype=dtype).masked_fill_(~repeated, float("-inf"))
            self.bias[dtype, groups] = found
        return found


def decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    scratch: dict[Any, Any],
) -> None:
    """Rows of few query tokens attend over the paged cache; see `reference.decode`."""
    groups = scratch.get((window, chunk))
    if groups is None:
        rows = _Rows(query_start_loc, seq_lens, block_tables, k_cache.shape[1])
        groups = scratch[window, chunk] = list(_decode_groups(rows, window, chunk))
    num_kv_heads, head_dim = k_cache.shape[2:]
    per_kv_head = query.shape[1] // num_kv_heads
    bias_dtype = query.dtype if soft_cap is None and sinks is None else torch.float32
    for group in groups:
        key, value = (
            _take(cache, scale, group.slots, query.dtype, group.num_rows)
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        # Query heads of one key head become rows of one query: [rows, kv_heads, heads per kv head * tokens, dim].
        own = query[group.tokens]
        if group.num_tokens == group.num_rows:
            folded = own.view(group.num_rows, num_kv_heads, per_kv_head, head_dim)
        else:
            shape = (group.num_rows, -1, num_kv_heads, per_kv_head, head_dim)
            folded = own.view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
        attended = _attend(folded, key, value, group.bias_for(bias_dtype, per_kv_head), scaling, soft_cap, sinks)
        by_head = attended.reshape(group.num_rows, query.shape[1], -1, value.shape[3]).transpose(1, 2)
        out[group.tokens].view(by_head.shape).copy_(by_head)


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    scratch: dict[Any, Any],
) -> None:
    """Chunks without a cached prefix attend to their own keys; see `reference.prefill`."""
    starts = query_start_loc.tolist()
    for start, end in pairwise(starts):
        if start == end:
            continue
        tokens = slice(start, end)
        _attend_row(query[tokens], key[tokens], value[tokens], 0, out[tokens], scaling, window, chunk, soft_cap, sinks)


def prefill_paged(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    scratch: dict[Any, Any],
) -> None:
    """Chunks of many query tokens attend over the paged cache; see `reference.prefill_paged`."""
    rows = scratch.get("rows")
    if rows is None:
        rows = scratch["rows"] = _Rows(query_start_loc, seq_lens, block_tables, k_cache.shape[1])
    for row in range(len(rows.seq_lens)):
        if rows.query_lens[row] == 0:
            continue
        tokens = slice(int(rows.starts[row]), int(rows.starts[row + 1]))
        first = int(rows.first_visible(window, chunk)[row])
        slots = rows.slots(row, np.arange(first, rows.seq_lens[row])[None])
        key, value = (
            _take(cache, scale, slots, query.dtype, 1)[0].transpose(0, 1)
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        _attend_row(query[tokens], key, value, first, out[tokens], scaling, window, chunk, soft_cap, sinks)


class _Rows:
    """Rows of a call on the host.

    Attributes:
        starts: [rows + 1], first token of each row.
        query_lens: [rows], new tokens.
        seq_lens: [rows], keys.
        positions: [rows], position of each row's first new token.
    """

    def __init__(self, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int) -> None:
        self.starts: Array = query_start_loc.numpy().astype(np.int64)
        self.query_lens: Array = np.diff(self.starts)
        self.seq_lens: Array = seq_lens.numpy().astype(np.int64)
        self.positions: Array = self.seq_lens - self.query_lens
        self._block_tables: Array = block_tables.numpy()
        self._block_size = block_size

    def first_visible(self, window: int | None, chunk: int | None) -> Array:
        """[rows], the first key that a row's first token sees; later tokens see none before it."""
        first: Array = _first_visible(self.positions, window, chunk)
        return first

    def slots(self, rows: int | slice, positions: Array) -> slice | Tensor:
        """Slots of the keys at `positions` [rows, keys], flat; a slice where a single row's are consecutive."""
        tables = self._block_tables[rows].reshape(len(positions), -1)
        blocks = np.take_along_axis(tables, positions // self._block_size, axis=1).astype(np.int64)
        slots = (blocks * self._block_size + positions % self._block_size).ravel()
        first, last = int(slots[0]), int(slots[-1])
        if len(positions) == 1 and last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
            return slice(first, last + 1)
        return torch.from_numpy(slots)


def _first_visible(positions: Any, window: int | None, chunk: int | None) -> Any:
    first = positions * 0
    if window is not None:
        first = np.maximum(first, positions - window + 1)
    if chunk is not None:
        first = np.maximum(first, positions // chunk * chunk)
    return first


def _decode_groups(rows: _Rows, window: int | None, chunk: int | None) -> Iterator[_Group]:
    """Cut rows into groups of equal query length and bounded padding; rows without tokens are in none."""
    first = rows.first_visible(window, chunk)
    spans = rows.seq_lens - first
    begin = 0
    while begin < len(spans):
        query_len, end, total, longest = int(rows.query_lens[begin]), begin, 0, 0
        while end < len(spans) and rows.query_lens[end] == query_len:
            wider = max(longest, int(spans[end]))
            padded = wider * (end - begin + 1)
            if end > begin and (padded > _GROUP_KEYS or padded > _GROUP_PADDING * (total + int(spans[end]))):
                break
            longest, total, end = wider, total + int(spans[end]), end + 1
        if query_len:
            yield _decode_group(rows, slice(begin, end), first[begin:end], longest, window, chunk)
        begin = end


def _decode_group(
    rows: _Rows, group: slice, first: Array, longest: int, window: int | None, chunk: int | None
) -> _Group:
    seq_lens, query_len = rows.seq_lens[group], int(rows.query_lens[group.start])
    keys = first[:, None] + np.arange(longest)
    queries = rows.positions[group][:, None] + np.arange(query_len)
    visible = keys[:, None] <= queries[..., None]
    visible &= keys[:, None] >= _first_visible(queries, window, chunk)[..., None]
    return _Group(
        tokens=slice(int(rows.starts[group.start]), int(rows.starts[group.stop])),
        num_tokens=len(seq_lens) * query_len,
        num_rows=len(seq_lens),
        slots=rows.slots(group, np.minimum(keys, seq_lens[:, None] - 1)),
        visible=None if visible.all() else torch.from_numpy(visible),
        bias={},
    )


def _take(cache: Tensor, scale: Tensor | None, slots: slice | Tensor, dtype: torch.dtype, num_rows: int) -> Tensor:
    """Keys or values of a group: [rows, kv_heads, keys, dim], a view of the cache where they are consecutive."""
    num_kv_heads, dim = cache.shape[2:]
    if scale is not None:
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop)
        numbers = cache.view(torch.uint8).flatten(0, 1).index_select(0, slots)
        scales = scale.transpose(1, 2)[slots // cache.shape[1], slots % cache.shape[1]]
        wide = dequantize(numbers.view(torch.float8_e4m3fn), scales, dtype)
        return wide.view(num_rows, -1, num_kv_heads, dim).transpose(1, 2)
    if isinstance(slots, slice):
        token = num_kv_heads * dim
        shape = (1, num_kv_heads, slots.stop - slots.start, dim)
        first = cache.storage_offset() + slots.start * token
        return cache.as_strided(shape, (0, dim, token, 1), first).to(dtype)
    taken = cache.flatten(0, 1).index_select(0, slots)
    return taken.to(dtype).view(num_rows, -1, num_kv_heads, dim).transpose(1, 2)


def _attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: int,
    out: Tensor,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """One chunk, whose tokens are the last of the keys.

    Args:
        query: [tokens, num_heads, head_dim].
        key: [keys, num_kv_heads, head_dim], from position `first_key`.
        value: [keys, num_kv_heads, v_head_dim].
        first_key: position of the first key.
        out: [tokens, num_heads, v_head_dim].
        scaling: as in `reference.decode`.
        window: as in `reference.decode`.
        chunk: as in `reference.decode`.
        soft_cap: as in `reference.decode`.
        sinks: as in `reference.decode`.
    """
    num_tokens, num_heads = query.shape[:2]
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    end_position = first_key + key.shape[0]
    position = end_position - num_tokens
    fused = soft_cap is None and sinks is None and key.shape[2] == value.shape[2]
    tile = _TILE_TOKENS if fused else max(1, min(_TILE_TOKENS, _TILE_SCORES // (num_heads * key.shape[0])))
    while position < end_position:
        begin = int(_first_visible(position, window, chunk))
        causal = fused and begin == position
        end = end_position if causal else min(end_position, position + tile)
        if chunk is not None:
            end = min(end, begin + chunk)
        if causal and window is not None:
            end = min(end, begin + window)
        keys = slice(begin - first_key, end - first_key)
        tokens = slice(position - end_position + num_tokens, end - end_position + num_tokens)
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query[tokens], key[keys], value[keys]))
        if causal:
            k, v = (tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor for tensor in (k, v))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        else:
            folded = q.reshape(1, num_kv_heads, -1, q.shape[3])
            bias = _tile_bias(
                position,
                end,
                begin,
                window,
                chunk,
                query.dtype if soft_cap is None and sinks is None else torch.float32,
            )
            attended = _attend(folded, k, v, bias.repeat(groups, 1), scaling, soft_cap, sinks)
        out[tokens].copy_(attended.reshape(num_heads, end - position, -1).transpose(0, 1))
        position = end


def _tile_bias(
    position: int, end: int, first_key: int, window: int | None, chunk: int | None, dtype: torch.dtype
) -> Tensor:
    """[tokens, keys], 0 or -inf, for queries `position ... end` and keys `first_key ... end`."""
    queries = np.arange(position, end)[:, None]
    keys = np.arange(first_key, end)[None]
    visible = torch.from_numpy((keys <= queries) & (keys >= _first_visible(queries, window, chunk)))
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of folded queries: torch's own, or spelt out in float32 where that has no soft-cap or sinks.

    Args:
        query: [rows, kv_heads, heads per kv head * tokens, head_dim].
        key: [rows, kv_heads, keys, head_dim].
        value: [rows, kv_heads, keys, v_head_dim].
        bias: summand of the scores, broadcast to [rows, kv_heads, heads per kv head * tokens, keys].
        scaling: factor of the scores.
        soft_cap: as in `reference.decode`.
        sinks: [num_heads].

    Returns:
        [rows, kv_heads, heads per kv head * tokens, v_head_dim], the query's dtype
    """
    if soft_cap is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = torch.matmul(query.to(dtype) * scaling, key.to(dtype).transpose(-1, -2))
    if soft_cap is not None:
        scores = torch.tanh_(scores.div_(soft_cap)).mul_(soft_cap)
    if bias is not None:
        scores += bias
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        num_kv_heads, folded = scores.shape[1:3]
        per_head = folded // (sinks.shape[0] // num_kv_heads)
        sink_scores = sinks.to(dtype).repeat_interleave(per_head).view(num_kv_heads, folded, 1)
        sink_scores = sink_scores.expand(scores.shape[0], -1, -1, -1)
        weights = torch.cat([scores, sink_scores], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights, value.to(dtype)).to(query.dtype)
