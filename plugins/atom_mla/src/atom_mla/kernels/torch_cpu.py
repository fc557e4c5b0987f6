"""Fast kernels in torch, in bounded memory; signatures and shapes are those of `reference`.

All compute in float32. Rows are batched or cut into pieces so that no temporary exceeds `SCRATCH_BYTES`, except
where a single row and token needs more. Cached values that no query may see are zeroed before they meet a weight,
because an unused block may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["SCRATCH_BYTES", "attend_selected", "decode", "prefill", "prefill_paged", "select_tokens"]

Host = np.ndarray[Any, Any]

SCRATCH_BYTES = 64 << 20
"""Aim for the largest temporary of a kernel."""
_SCRATCH_VALUES = SCRATCH_BYTES // 4


def decode(
    query: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_start_loc_host: Host,
    seq_lens_host: Host,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
    value_dim: int,
) -> Tensor:
    """`reference.decode`, rows padded to the longest of a group that fits the scratch memory."""
    num_tokens, heads, width = query.shape
    output = query.new_zeros(num_tokens, heads, value_dim)
    device, block_size = query.device, cache.shape[1]
    starts_host = query_start_loc_host[:-1] - query_start_loc_host[0]
    query_lens_host = np.diff(query_start_loc_host)
    per_key = width + max_query_len * heads * 2
    for first, last in _groups(seq_lens_host, per_key):
        longest = int(seq_lens_host[first:last].max())
        depth = int(query_lens_host[first:last].max())
        if depth == 0:
            continue
        blocks = block_tables[first:last, : -(-longest // block_size)].long()
        keys = _dequantize(cache[blocks], None if scale is None else scale[blocks]).flatten(1, 2)[:, :longest]
        lens = seq_lens[first:last].long()
        positions = torch.arange(longest, device=device)
        keys.masked_fill_((positions >= lens[:, None])[..., None], 0)
        query_lens = torch.from_numpy(query_lens_host[first:last]).to(device)
        offsets = torch.arange(depth, device=device)
        present = offsets < query_lens[:, None]
        tokens = (torch.from_numpy(starts_host[first:last]).to(device)[:, None] + offsets).clamp_(max=num_tokens - 1)
        scores = query[tokens].float().flatten(1, 2) @ keys.transpose(1, 2)
        scores = scores.mul_(scaling).view(last - first, depth, heads, longest)
        last_visible = (lens - query_lens)[:, None] + offsets
        hidden = positions > torch.where(present, last_visible, 0)[..., None]
        weights = scores.masked_fill_(hidden[:, :, None], float("-inf")).softmax(-1)
        values = weights.flatten(1, 2) @ keys[..., :value_dim]
        output[tokens[present]] = values.view(last - first, depth, heads, value_dim)[present].to(output.dtype)
    return output


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Host,
    max_query_len: int,
    scaling: float,
) -> Tensor:
    """`reference.prefill`, through torch's fused attention, which wants equal dims: the narrower ones are padded."""
    width = max(key.shape[-1], value.shape[-1])
    output = torch.zeros_like(value)
    query, key, padded = (functional.pad(one, (0, width - one.shape[-1])) for one in (query, key, value))
    for tokens in _row_slices(query_start_loc_host):
        queries, keys, values = (part[tokens].transpose(0, 1)[None] for part in (query, key, padded))
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
        output[tokens] = attended[0, ..., : value.shape[-1]].transpose(0, 1)
    return output


def prefill_paged(
    query: Tensor,
    expansion: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_start_loc_host: Host,
    seq_lens_host: Host,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
) -> Tensor:
    """`reference.prefill_paged`, piece by piece over the keys with a running softmax.

    A long chunk expands each piece of latents; a short one absorbs the expansion into its queries instead, which
    costs more per query and key and nothing per key.
    """
    heads, expanded_dim, latent_dim = expansion.shape
    rope_dim = cache.shape[-1] - latent_dim
    nope_dim = query.shape[-1] - rope_dim
    value_dim = expanded_dim - nope_dim
    expansion = expansion.float()
    key_part, value_part = expansion[:, :nope_dim], expansion[:, nope_dim:]
    output = query.new_zeros(query.shape[0], heads, value_dim)
    for row, tokens in enumerate(_row_slices(query_start_loc_host)):
        num_queries = tokens.stop - tokens.start
        if num_queries == 0:
            continue
        queries = query[tokens].float().transpose(0, 1)
        absorb = num_queries * (2 * latent_dim - nope_dim - value_dim) <= latent_dim * expanded_dim
        if absorb:
            queries = torch.cat((queries[..., :nope_dim] @ key_part, queries[..., nope_dim:]), -1)
        softmax = _RunningSoftmax(queries, int(seq_lens_host[row]), latent_dim if absorb else value_dim, scaling)
        piece = _SCRATCH_VALUES // (heads * (2 * num_queries + 2 * query.shape[-1] + value_dim))
        for start, latents in _pieces(cache, scale, block_tables[row], softmax.num_keys, piece):
            if absorb:
                softmax.add(start, latents[None], latents[None, :, :latent_dim])
                continue
            expanded = latents[:, :latent_dim] @ expansion.flatten(0, 1).T
            expanded = expanded.view(-1, heads, expanded_dim).transpose(0, 1)
            rotary = latents[None, :, latent_dim:].expand(heads, -1, -1)
            softmax.add(start, torch.cat((expanded[..., :nope_dim], rotary), -1), expanded[..., nope_dim:])
        attended = softmax.result() @ value_part.transpose(1, 2) if absorb else softmax.result()
        output[tokens] = attended.transpose(0, 1).to(output.dtype)
    return output


def select_tokens(
    query: Tensor,
    head_weights: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_start_loc_host: Host,
    seq_lens_host: Host,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
    top_k: int,
) -> Tensor:
    """`reference.select_tokens`, some query tokens at a time."""
    selected = torch.full((query.shape[0], top_k), -1, dtype=torch.int32, device=query.device)
    for row, tokens in enumerate(_row_slices(query_start_loc_host)):
        num_keys = int(seq_lens_host[row])
        first = num_keys - (tokens.stop - tokens.start)
        positions = torch.arange(num_keys, device=query.device)
        step = max(1, _SCRATCH_VALUES // max(1, num_keys * 8))
        for start in range(tokens.start, tokens.stop, step):
            part = slice(start, min(start + step, tokens.stop))
            scores = _index_scores(query[part], head_weights[part], cache, scale, block_tables[row], num_keys, scaling)
            own = torch.arange(first + start - tokens.start, first + part.stop - tokens.start, device=query.device)
            scores.masked_fill_(positions > own[:, None], float("-inf"))
            selected[part, : min(top_k, num_keys)] = _best(scores, top_k)
    return selected


def attend_selected(
    query: Tensor,
    selected: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_start_loc_host: Host,
    seq_lens_host: Host,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
    value_dim: int,
) -> Tensor:
    """`reference.attend_selected`, gathering for some query tokens at a time."""
    heads, block_size = query.shape[1], cache.shape[1]
    output = query.new_zeros(query.shape[0], heads, value_dim)
    flat = cache.view(-1, cache.shape[-1])
    step = max(1, _SCRATCH_VALUES // (selected.shape[1] * (cache.shape[-1] + 2 * heads)))
    for row, tokens in enumerate(_row_slices(query_start_loc_host)):
        for start in range(tokens.start, tokens.stop, step):
            part = slice(start, min(start + step, tokens.stop))
            chosen = selected[part].long()
            absent = chosen < 0
            chosen = chosen.clamp_(min=0)
            slots = block_tables[row].long()[chosen // block_size] * block_size + chosen % block_size
            keys = _dequantize(flat[slots], None if scale is None else scale.view(-1)[slots])
            keys.masked_fill_(absent[..., None], 0)
            scores = (query[part].float() @ keys.transpose(1, 2)).mul_(scaling)
            weights = scores.masked_fill_(absent[:, None], float("-inf")).softmax(-1).nan_to_num_(0)
            output[part] = (weights @ keys[..., :value_dim]).to(output.dtype)
    return output


class _RunningSoftmax:
    """Attention over pieces of the keys: softmax numerators and denominators relative to a running maximum.

    Milakov and Gimelshein, arXiv 1805.02867, algorithm 3.
    """

    def __init__(self, queries: Tensor, num_keys: int, value_dim: int, scaling: float) -> None:
        """Start; `queries` is [heads, num_queries, dim], the last tokens of `num_keys`."""
        heads, num_queries, _ = queries.shape
        self.num_keys = num_keys
        self._queries = queries * scaling
        self._positions = torch.arange(num_keys - num_queries, num_keys, device=queries.device)
        self._maximum = queries.new_full((heads, num_queries, 1), float("-inf"))
        self._total = queries.new_zeros(heads, num_queries, 1)
        self._values = queries.new_zeros(heads, num_queries, value_dim)

    def add(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Take in keys and values [heads or 1, piece, dim] of the positions from `start` on."""
        scores = self._queries @ keys.transpose(1, 2)
        positions = torch.arange(start, start + keys.shape[1], device=keys.device)
        scores.masked_fill_(positions > self._positions[:, None], float("-inf"))
        # Key 0 is visible to every query and comes first, so the maximum is finite from the first piece on.
        maximum = torch.maximum(self._maximum, scores.amax(-1, keepdim=True))
        weights = scores.sub_(maximum).exp_()
        decay = (self._maximum - maximum).exp_()
        self._total = self._total * decay + weights.sum(-1, keepdim=True)
        self._values = self._values * decay + weights @ values
        self._maximum = maximum

    def result(self) -> Tensor:
        """The output, [heads, num_queries, value_dim]."""
        return self._values / self._total


def _index_scores(
    query: Tensor,
    head_weights: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    block_table: Tensor,
    num_keys: int,
    scaling: float,
) -> Tensor:
    """Scores of all keys of a row, [queries, num_keys] float32, future ones included."""
    queries, weights = query.float(), head_weights.float()
    scores = queries.new_empty(query.shape[0], num_keys)
    piece = _SCRATCH_VALUES // (2 * queries[..., 0].numel())
    for start, keys in _pieces(cache, scale, block_table, num_keys, piece):
        products = (queries @ keys.T).mul_(scaling).relu_()
        scores[:, start : start + keys.shape[0]] = (weights[:, None] @ products)[:, 0]
    return scores


def _best(scores: Tensor, top_k: int) -> Tensor:
    """Ascending positions of the `top_k` best scores, the earliest of equal ones; -1 where there are fewer.

    Args:
        scores: [queries, num_keys]; -inf is never selected.
        top_k: most positions.

    Returns:
        [queries, min(top_k, num_keys)] int32.
    """
    num_keys = scores.shape[1]
    positions = torch.arange(num_keys, device=scores.device)
    taken = scores > float("-inf")
    if num_keys > top_k:
        threshold = scores.topk(top_k, -1).values[:, -1:]
        above = scores > threshold
        equal = taken & (scores == threshold)
        taken = above | (equal & (equal.cumsum(-1) <= top_k - above.sum(-1, keepdim=True)))
    ordered = torch.where(taken, positions, num_keys).topk(min(top_k, num_keys), -1, largest=False).values
    return torch.where(ordered < num_keys, ordered, -1).to(torch.int32)


def _row_slices(query_start_loc: Host) -> Iterator[slice]:
    """Each row's query tokens, counted from the first row's first."""
    starts = (query_start_loc - query_start_loc[0]).tolist()
    return (slice(start, stop) for start, stop in pairwise(starts))


def _groups(seq_lens: Host, values_per_key: int) -> Iterator[tuple[int, int]]:
    """Cut rows into runs whose padded keys fit the scratch memory; a row alone may exceed it."""
    first, longest = 0, 0
    for row, seq_len in enumerate(seq_lens.tolist()):
        longest = max(longest, seq_len)
        if row > first and (row + 1 - first) * longest * values_per_key > _SCRATCH_VALUES:
            yield first, row
            first, longest = row, seq_len
    if len(seq_lens) > first:
        yield first, len(seq_lens)


def _dequantize(numbers: Tensor, scale: Tensor | None) -> Tensor:
    """Values [..., width] in float32, a copy; `scale` is [...]."""
    values = numbers.to(torch.float32, copy=True)
    return values if scale is None else values.mul_(scale[..., None])


def _pieces(
    cache: Tensor, scale: Tensor | None, block_table: Tensor, num_keys: int, piece: int
) -> Iterator[tuple[int, Tensor]]:
    """A row's cached tokens in pieces of whole blocks: first position and [tokens, width] float32."""
    block_size = cache.shape[1]
    count = max(1, piece // block_size)
    for start in range(0, num_keys, count * block_size):
        first = start // block_size
        blocks = block_table[first : first + count].long()
        tokens = _dequantize(cache[blocks], None if scale is None else scale[blocks]).flatten(0, 1)
        yield start, tokens[: num_keys - start]
