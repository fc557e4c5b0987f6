"""What the `mha.*` ops compute, in plain torch: one row after another, every score in memory.

All tensors of a call are on one device. Rows are requests; `query_start_loc` may be a slice of a step's, then its
first entry is not 0, and only the tokens of its rows are read and written. `scratch` lives as long as the rows do:
a kernel may keep there what depends on the rows and the mask alone, and finds it again in the step's next layer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from atom_mha.kernels.float8 import dequantize, quantize

__all__ = ["decode", "prefill", "prefill_paged", "write_kv"]


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
    """Write a step's keys and values into the paged cache, quantized per token and head where there are scales.

    Args:
        key: [num_tokens, num_kv_heads, head_dim].
        value: [num_tokens, num_kv_heads, v_head_dim].
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim]; written.
        v_cache: [num_blocks, block_size, num_kv_heads, v_head_dim]; written.
        k_scale: [num_blocks, num_kv_heads, block_size] float32 of a cache in float8_e4m3fn, written; else `None`.
        v_scale: the same for values.
        slot_mapping: [num_tokens] int64, block * block_size + offset; -1 skips the token.
        scratch: kept for the step.
    """
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    for new, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        if scale is None:
            cache.flatten(0, 1)[slots] = new[written].to(cache.dtype)
        else:
            numbers, scale.transpose(1, 2)[slots // cache.shape[1], slots % cache.shape[1]] = quantize(new[written])
            cache.view(torch.uint8).flatten(0, 1)[slots] = numbers.view(torch.uint8)


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
    """Rows of few query tokens attend over the paged cache, which holds their own keys already.

    Row r has `n = query_start_loc[r + 1] - query_start_loc[r]` tokens at positions `seq_lens[r] - n ...`; n is 0 in
    padding rows. The token at position p sees the keys 0 ... p that the mask leaves.

    Args:
        query: [num_tokens, num_heads, head_dim]; query head h uses key head h // (num_heads / num_kv_heads).
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: [num_blocks, block_size, num_kv_heads, v_head_dim].
        k_scale: [num_blocks, num_kv_heads, block_size] float32: a cached key is number times scale; `None` for 1.
        v_scale: the same for values.
        out: [num_tokens, num_heads, v_head_dim]; the rows' tokens are written.
        query_start_loc: [rows + 1] int32, first token of each row and the end of the last.
        seq_lens: [rows] int32, keys of each row, its new tokens included.
        block_tables: [rows, max_blocks] int32; entries past a row's blocks mean nothing.
        max_query_len: no row has more tokens.
        max_seq_len: no row has more keys.
        scaling: factor of the scores.
        window: with W, position i sees only j > i - W.
        chunk: with C, position i sees only j with j // C == i // C.
        soft_cap: with c, a score s becomes c * tanh(s / c).
        sinks: [num_heads], one more logit per head in the softmax, without a value.
        scratch: kept for the step.
    """
    block_size = k_cache.shape[1]
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for row, seq_len in enumerate(lens):
        start, end = starts[row], starts[row + 1]
        blocks = block_tables[row, : -(-seq_len // block_size)].long()
        key = _gather(k_cache, k_scale, blocks, query.dtype)[:seq_len]
        value = _gather(v_cache, v_scale, blocks, query.dtype)[:seq_len]
        positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        out[start:end] = _attend(query[start:end], key, value, positions, scaling, window, chunk, soft_cap, sinks)


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
    """Chunks of many query tokens attend over the paged cache; the same function of its arguments as `decode`."""
    decode(
        query,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        out,
        query_start_loc,
        seq_lens,
        block_tables,
        max_query_len,
        max_seq_len,
        scaling,
        window,
        chunk,
        soft_cap,
        sinks,
        scratch,
    )


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
    """Chunks without a cached prefix attend to their own keys; a row's first token has position 0.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key: [num_tokens, num_kv_heads, head_dim].
        value: [num_tokens, num_kv_heads, v_head_dim].
        out: [num_tokens, num_heads, v_head_dim]; the rows' tokens are written.
        query_start_loc: [rows + 1] int32, first token of each row and the end of the last.
        max_query_len: no row has more tokens.
        scaling: as in `decode`.
        window: as in `decode`.
        chunk: as in `decode`.
        soft_cap: as in `decode`.
        sinks: as in `decode`.
        scratch: kept for the step.
    """
    starts = query_start_loc.tolist()
    for start, end in pairwise(starts):
        row = slice(start, end)
        positions = torch.arange(end - start, device=query.device)
        out[row] = _attend(query[row], key[row], value[row], positions, scaling, window, chunk, soft_cap, sinks)


def _gather(cache: Tensor, scale: Tensor | None, blocks: Tensor, query_dtype: torch.dtype) -> Tensor:
    """Keys or values of `blocks`, [tokens, num_kv_heads, dim]: as they are cached, or dequantized in float32."""
    taken = cache[blocks].flatten(0, 1)
    if scale is None:
        return taken
    return dequantize(
        taken, scale[blocks].transpose(1, 2).flatten(0, 1), torch.promote_types(query_dtype, torch.float32)
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One row: softmax attention in float32, in float64 where the query is float64.

    Args:
        query: [tokens, num_heads, head_dim].
        key: [keys, num_kv_heads, head_dim], from position 0.
        value: [keys, num_kv_heads, v_head_dim].
        positions: [tokens], of the queries.
        scaling: factor of the scores.
        window: as in `decode`.
        chunk: as in `decode`.
        soft_cap: as in `decode`.
        sinks: as in `decode`.

    Returns:
        [tokens, num_heads, v_head_dim], the query's dtype
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.shape[1] // key.shape[1]
    keys = key.to(dtype).repeat_interleave(groups, dim=1)
    values = value.to(dtype).repeat_interleave(groups, dim=1)
    scores = torch.einsum("ihd,jhd->hij", query.to(dtype), keys) * scaling
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    i = positions.unsqueeze(1)
    j = torch.arange(key.shape[0], device=query.device).unsqueeze(0)
    visible = j <= i
    if window is not None:
        visible &= j > i - window
    if chunk is not None:
        visible &= j // chunk == i // chunk
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink_scores = sinks.to(dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[0]]
    return torch.einsum("hij,jhd->ihd", weights, values).to(query.dtype)
