"""The ops' references: plain torch in float32, one request at a time, every score in memory.

Shared conventions. A cache is `[num_blocks, block_size, width]`; token p of row r lies in block
`block_tables[r, p // block_size]` at offset `p % block_size`. The query tokens of row r are
`query_start_loc[r] - query_start_loc[0]` and following, so that a caller can pass a slice of a step; they are the
last of the row's `seq_lens[r]` tokens, and a token sees itself and what lies before it. Rows may be empty. Every
host array equals its device tensor. Rows of `query` that belong to no row give zeros. A cache in float8_e4m3fn has a
factor per token, `scale`: a cached value is number times scale.

Formulas: DeepSeek-V2 (arXiv 2405.04434) section 2.1 for latent attention and its absorbed form, DeepSeek-V3.2
(arXiv 2512.02556) equation 1 for the index scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom_mla.kernels.float8 import quantize

__all__ = [
    "attend_selected",
    "decode",
    "prefill",
    "prefill_paged",
    "select_tokens",
    "write_latent",
]

Host = np.ndarray[Any, Any]


def write_latent(latent: Tensor, cache: Tensor, scale: Tensor | None, slot_mapping: Tensor) -> None:
    """Write one step's latents, or index keys, into their paged cache, quantized per token where there are scales.

    Args:
        latent: [num_tokens, width].
        cache: [num_blocks, block_size, width], cache dtype; written in place.
        scale: [num_blocks, block_size] float32 of a cache in float8_e4m3fn, written in place; else `None`.
        slot_mapping: [num_tokens] int64, block * block_size + offset; -1 skips the token.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    if scale is None:
        cache.view(-1, cache.shape[-1])[slots] = latent[kept].to(cache.dtype)
    else:
        numbers, scale.view(-1)[slots] = quantize(latent[kept])
        cache.view(torch.uint8).view(-1, cache.shape[-1])[slots] = numbers.view(torch.uint8)


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
    """Attend to latents with absorbed queries; for rows with few query tokens.

    Args:
        query: [num_tokens, heads, width], `value_dim` values that meet the latent, then those that meet the
            rotary key.
        cache: [num_blocks, block_size, width], the step's latents written.
        scale: [num_blocks, block_size] float32, factors of a cache in float8_e4m3fn; else `None`.
        block_tables: [rows, max_blocks] int32.
        query_start_loc: [rows + 1] int32.
        seq_lens: [rows] int32.
        query_start_loc_host: the same on the host.
        seq_lens_host: the same on the host.
        max_query_len: most query tokens of a row.
        max_seq_len: most tokens of a row.
        scaling: factor of the scores.
        value_dim: leading values of a cached token that make its value, `kv_lora_rank`.

    Returns:
        [num_tokens, heads, value_dim], still in latent space.
    """
    output = query.new_zeros(query.shape[0], query.shape[1], value_dim)
    for row, tokens, seq_len in _rows(query_start_loc_host, seq_lens_host):
        keys = _gather(cache, scale, block_tables[row], seq_len)
        scores = torch.einsum("qhd,kd->qhk", query[tokens].float(), keys) * scaling
        weights = scores.masked_fill(_future(scores.shape[0], seq_len, scores.device)[:, None], float("-inf")).softmax(
            -1
        )
        output[tokens] = torch.einsum("qhk,kd->qhd", weights, keys[:, :value_dim]).to(output.dtype)
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
    """Attend causally within chunks that have no cached prefix, over expanded keys and values.

    Args:
        query: [num_tokens, heads, key_dim].
        key: [num_tokens, heads, key_dim].
        value: [num_tokens, heads, value_dim], which may differ from key_dim.
        query_start_loc: [rows + 1] int32.
        query_start_loc_host: the same on the host.
        max_query_len: most tokens of a row.
        scaling: factor of the scores.

    Returns:
        [num_tokens, heads, value_dim]
    """
    output = torch.zeros_like(value)
    for _, tokens, length in _rows(query_start_loc_host, np.diff(query_start_loc_host)):
        scores = torch.einsum("qhd,khd->qhk", query[tokens].float(), key[tokens].float()) * scaling
        weights = scores.masked_fill(_future(length, length, scores.device)[:, None], float("-inf")).softmax(-1)
        output[tokens] = torch.einsum("qhk,khd->qhd", weights, value[tokens].float()).to(output.dtype)
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
    """Attend with chunks of queries over a cached prefix and the chunk itself, expanding cached latents.

    Args:
        query: [num_tokens, heads, nope_dim + rope_dim].
        expansion: [heads, nope_dim + value_dim, latent_dim], the weight that expands a latent into each head's key
            without its rotary part, and its value (`kv_b_proj`).
        cache: [num_blocks, block_size, latent_dim + rope_dim], the step's latents written.
        scale: [num_blocks, block_size] float32, factors of a cache in float8_e4m3fn; else `None`.
        block_tables: [rows, max_blocks] int32.
        query_start_loc: [rows + 1] int32.
        seq_lens: [rows] int32.
        query_start_loc_host: the same on the host.
        seq_lens_host: the same on the host.
        max_query_len: most query tokens of a row.
        max_seq_len: most tokens of a row.
        scaling: factor of the scores.

    Returns:
        [num_tokens, heads, value_dim]
    """
    heads, expanded_dim, latent_dim = expansion.shape
    rope_dim = cache.shape[-1] - latent_dim
    nope_dim = query.shape[-1] - rope_dim
    output = query.new_zeros(query.shape[0], heads, expanded_dim - nope_dim)
    for row, tokens, seq_len in _rows(query_start_loc_host, seq_lens_host):
        latents = _gather(cache, scale, block_tables[row], seq_len)
        expanded = torch.einsum("kl,hel->khe", latents[:, :latent_dim], expansion.float())
        rotary = latents[:, None, latent_dim:].expand(-1, heads, -1)
        keys = torch.cat((expanded[..., :nope_dim], rotary), -1)
        scores = torch.einsum("qhd,khd->qhk", query[tokens].float(), keys) * scaling
        weights = scores.masked_fill(_future(scores.shape[0], seq_len, scores.device)[:, None], float("-inf")).softmax(
            -1
        )
        output[tokens] = torch.einsum("qhk,khd->qhd", weights, expanded[..., nope_dim:]).to(output.dtype)
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
    """Score every visible token with the indexer and select the best for each query token.

    The score of key t is `sum over heads of head_weight * relu(scaling * query . key_t)`. Among equal scores the
    earliest tokens win, so that the choice depends on nothing but the request's own tokens.

    Args:
        query: [num_tokens, index_heads, index_dim], rotary embedding applied.
        head_weights: [num_tokens, index_heads] float32.
        cache: [num_blocks, block_size, index_dim], the step's index keys written.
        scale: [num_blocks, block_size] float32, factors of a cache in float8_e4m3fn; else `None`.
        block_tables: [rows, max_blocks] int32.
        query_start_loc: [rows + 1] int32.
        seq_lens: [rows] int32.
        query_start_loc_host: the same on the host.
        seq_lens_host: the same on the host.
        max_query_len: most query tokens of a row.
        max_seq_len: most tokens of a row.
        scaling: factor of the dot products.
        top_k: most tokens to select.

    Returns:
        [num_tokens, top_k] int32, ascending positions in the request, then -1 where fewer are visible.
    """
    selected = torch.full((query.shape[0], top_k), -1, dtype=torch.int32, device=query.device)
    for row, tokens, seq_len in _rows(query_start_loc_host, seq_lens_host):
        keys = _gather(cache, scale, block_tables[row], seq_len)
        scores = (torch.einsum("qhd,kd->qhk", query[tokens].float(), keys) * scaling).relu()
        scores = torch.einsum("qh,qhk->qk", head_weights[tokens].float(), scores)
        for token in range(scores.shape[0]):
            visible = seq_len - scores.shape[0] + token + 1
            order = scores[token, :visible].sort(descending=True, stable=True).indices[:top_k]
            selected[tokens.start + token, : order.numel()] = order.sort().values.to(torch.int32)
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
    """Attend with absorbed queries to each query token's own selection of latents.

    Args:
        query: [num_tokens, heads, width], as for `decode`.
        selected: [num_tokens, top_k] int32, ascending positions in the request, none in the future, then -1 for none.
        cache: [num_blocks, block_size, width], the step's latents written.
        scale: [num_blocks, block_size] float32, factors of a cache in float8_e4m3fn; else `None`.
        block_tables: [rows, max_blocks] int32.
        query_start_loc: [rows + 1] int32.
        seq_lens: [rows] int32.
        query_start_loc_host: the same on the host.
        seq_lens_host: the same on the host.
        max_query_len: most query tokens of a row.
        max_seq_len: most tokens of a row.
        scaling: factor of the scores.
        value_dim: leading values of a cached token that make its value, `kv_lora_rank`.

    Returns:
        [num_tokens, heads, value_dim], still in latent space; zeros for a token that selects nothing.
    """
    output = query.new_zeros(query.shape[0], query.shape[1], value_dim)
    for row, tokens, seq_len in _rows(query_start_loc_host, seq_lens_host):
        latents = _gather(cache, scale, block_tables[row], seq_len)
        for token in range(tokens.start, tokens.stop):
            keys = latents[selected[token][selected[token] >= 0].long()]
            weights = (query[token].float() @ keys.T * scaling).softmax(-1)
            output[token] = (weights @ keys[:, :value_dim]).to(output.dtype)
    return output


def _rows(query_start_loc: Host, lengths: Host) -> Iterator[tuple[int, slice, int]]:
    """Rows that have query tokens: index, slice of the query tokens, keys."""
    starts = (query_start_loc - query_start_loc[0]).tolist()
    for row, length in enumerate(lengths.tolist()):
        if starts[row + 1] > starts[row]:
            yield row, slice(starts[row], starts[row + 1]), length


def _gather(cache: Tensor, scale: Tensor | None, block_table: Tensor, seq_len: int) -> Tensor:
    """One row's cached tokens, [seq_len, width] float32."""
    blocks = block_table[: -(-seq_len // cache.shape[1])].long()
    tokens = cache[blocks].flatten(0, 1)[:seq_len].float()
    return tokens if scale is None else tokens * scale[blocks].flatten()[:seq_len, None]


def _future(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[num_queries, num_keys], True where the key lies after the query; the queries are the last keys."""
    positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    return torch.arange(num_keys, device=device)[None] > positions[:, None]
