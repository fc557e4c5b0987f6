"""`mha.prefill` by torch's scaled_dot_product_attention, one call per row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["prefill"]


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
        scaling: factor of the scores.
        window: with W, position i sees only j > i - W.
        chunk: with C, position i sees only j with j // C == i // C.
        soft_cap: with c, a score s becomes c * tanh(s / c).
        sinks: [num_heads], one more logit per head in the softmax, without a value.
        scratch: kept for the step; holds the rows' bounds, so that the host asks for them once and not per layer.
    """
    starts = scratch.get("sdpa.starts")
    if starts is None:
        starts = scratch["sdpa.starts"] = query_start_loc.tolist()
    group = query.shape[1] // key.shape[1]
    for start, end in pairwise(starts):
        if start == end:
            continue
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(group, dim=0) for tensor in (k, v))
        if all(option is None for option in (window, chunk, soft_cap, sinks)):
            row = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        else:
            row = _attend_unfused(q, k, v, _visible(end - start, window, chunk, q.device), scaling, soft_cap, sinks)
        out[start:end] = row.transpose(0, 1)


def _visible(num_tokens: int, window: int | None, chunk: int | None, device: torch.device) -> Tensor:
    """[num_tokens, num_tokens] bool, which key a query sees."""
    i = torch.arange(num_tokens, device=device).unsqueeze(1)
    j = i.transpose(0, 1)
    visible = j <= i
    if window is not None:
        visible &= j > i - window
    if chunk is not None:
        visible &= j // chunk == i // chunk
    return visible


def _attend_unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scaling: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One row with what torch's fused attention lacks, in float32 at least; [num_heads, tokens, dim] each."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(dtype) @ key.to(dtype).transpose(1, 2) * scaling
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[1]]
    return (weights @ value.to(dtype)).to(query.dtype)
