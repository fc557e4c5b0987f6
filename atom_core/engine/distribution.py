"""From logits to a filtered distribution, and draws from it, in exact integer arithmetic.

A token's weight is `exp((logit - max) / temperature)` in fixed point, 2**40 for the likeliest token. Integer sums do
not depend on their order, so a draw depends on the row's own logits and uniform only: neither on other rows, nor on
the order a sort gives to ties, nor on how a device scans, nor on which way below finds it. A token less likely than
2**-40 of the likeliest is never drawn. A row without any finite logit gives some token, unspecified.

Filters are a tensor [rows, 4] float64: a row's temperature, top_k (0 for off, at most the vocabulary), top_p and min_p.
Their definitions are transformers' `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper`, except that tokens
with equal logits share one fate. `whole_mass` says that some row has top-p without top-k: the share is then one of the
whole vocabulary's mass, which costs a pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = ["draw_plain", "draw_ranked", "filtered_weights", "token_weights", "uniform_numbers"]

_ONE = 2**40
_BLOCK = 256
_CANDIDATES = 256


def uniform_numbers(seeds: Sequence[int], positions: Sequence[int], stream: int) -> Tensor:
    """Give a random number for each seed and position, the same in any company.

    Args:
        seeds: 0 to 2**64 - 1.
        positions: as many.
        stream: numbers of different streams are independent.

    Returns:
        [len(seeds)] float64 in [0, 1), on the CPU, where seeds and positions are.
    """
    words = _mix(np.array(seeds, dtype=np.uint64)) ^ np.array(positions, dtype=np.uint64)
    words = _mix(_mix(words) ^ np.uint64(stream))
    return torch.from_numpy((words >> np.uint64(11)) * 2.0**-53)


def token_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Weigh each token against the likeliest of its row.

    Args:
        logits: [rows, tokens], any floating dtype; computed in float32.
        temperature: [rows, 1].

    Returns:
        [rows, tokens] int64 from 0 to 2**40.
    """
    relative = logits.float() - logits.amax(-1, keepdim=True).float()
    return relative.div_(temperature.float()).exp_().mul_(_ONE).to(torch.int64)


def draw_plain(logits: Tensor, filters: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row from the whole vocabulary at the row's temperature.

    Args:
        logits: [rows, vocab], any floating dtype.
        filters: [rows, 4] float64; only the temperature is read.
        uniforms: [rows] float64 in [0, 1).

    Returns:
        [rows] int64 token ids.
    """
    return _draw(token_weights(logits, filters[:, :1]), uniforms)


def draw_ranked(logits: Tensor, filters: Tensor, uniforms: Tensor, *, whole_mass: bool) -> Tensor:
    """Draw one token per row from what the filters leave.

    Args:
        logits: [rows, vocab], any floating dtype.
        filters: [rows, 4] float64.
        uniforms: [rows] float64 in [0, 1).
        whole_mass: see above.

    Returns:
        [rows] int64 token ids.
    """
    ids, weights, open_rows = _likeliest(logits, filters, whole_mass)
    cumulative = weights.cumsum(-1)
    token_ids = ids.gather(1, _locate(cumulative, _target(cumulative, uniforms))).squeeze(1)
    if open_rows.numel():
        wide = _sorted_weights(logits[open_rows], filters[open_rows], whole_mass)
        token_ids[open_rows] = _draw(wide, uniforms[open_rows])
    return token_ids


def filtered_weights(logits: Tensor, filters: Tensor, *, whole_mass: bool) -> Tensor:
    """Weigh the tokens that the filters leave.

    Args:
        logits: [rows, vocab], any floating dtype.
        filters: [rows, 4] float64.
        whole_mass: see above.

    Returns:
        [rows, vocab] int64, 0 for tokens filtered out.
    """
    ids, weights, open_rows = _likeliest(logits, filters, whole_mass)
    result = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device).scatter_(1, ids, weights)
    if open_rows.numel():
        result[open_rows] = _sorted_weights(logits[open_rows], filters[open_rows], whole_mass)
    return result


def _likeliest(logits: Tensor, filters: Tensor, whole_mass: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Filter the largest 256 logits, which mostly is all that the filters leave.

    Returns:
        ids [rows, kept] ascending, their weights [rows, kept] with 0 for those filtered out, and the indices of the
        rows where more than these tokens may be left.
    """
    size = min(_CANDIDATES, logits.shape[1])
    values, ids = logits.topk(size, dim=-1)
    mass = token_weights(logits, filters[:, :1]).sum(-1, keepdim=True) if whole_mass else None
    weights, kth_value, cutoff = _cut(values, filters, mass)
    weights.masked_fill_(values < cutoff, 0)
    settled = torch.where(filters[:, 1] > 0, values[:, -1] < kth_value[:, 0], weights[:, -1] == 0)
    if size == logits.shape[1]:
        settled.fill_(True)
    num_kept = max(1, int((weights > 0).sum(-1).max()))
    ids, order = ids[:, :num_kept].sort(-1)
    return ids, weights[:, :num_kept].gather(1, order), (~settled).nonzero().squeeze(1)


def _sorted_weights(logits: Tensor, filters: Tensor, whole_mass: bool) -> Tensor:
    """[rows, vocab] int64: what `filtered_weights` returns, by sorting the whole vocabulary."""
    weights = token_weights(logits, filters[:, :1])
    mass = weights.sum(-1, keepdim=True) if whole_mass else None
    _, _, cutoff = _cut(logits.sort(dim=-1, descending=True).values, filters, mass)
    return weights.masked_fill_((logits < cutoff) | (weights < filters[:, 3:] * _ONE), 0)


def _cut(values: Tensor, filters: Tensor, mass: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Find where top-k and top-p cut, and apply min-p.

    Args:
        values: [rows, size] the largest logits, descending.
        filters: [rows, 4].
        mass: [rows, 1] the whole vocabulary's, or `None` if no row needs it.

    Returns:
        weights [rows, size], 0 outside top-k and min-p; the k-th largest logit [rows, 1]; the least logit that top-k
        and top-p keep [rows, 1].
    """
    temperature, top_k, top_p, min_p = filters.unsqueeze(-1).unbind(1)
    size, limited = values.shape[1], top_k > 0
    kth_value = values.gather(1, torch.where(limited, top_k, size).long().clamp(max=size) - 1)
    weights = token_weights(values, temperature).masked_fill_(values < kth_value, 0)
    cumulative = weights.cumsum(-1)
    top_k_mass = cumulative[:, -1:]
    reached = top_p * (top_k_mass if mass is None else torch.where(limited, top_k_mass, mass))
    num_needed = (cumulative - weights < reached).sum(-1, keepdim=True)
    cutoff = torch.maximum(kth_value, values.gather(1, (num_needed - 1).clamp_(min=0)))
    return weights.masked_fill_(weights < min_p * _ONE, 0), kth_value, cutoff


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[rows] int64: the token that each row's uniform falls on in its cumulative weights [rows, vocab].

    The cumulative sum runs over sums of 256 tokens, then within the block hit: the same token as over all, sooner.
    """
    vocab_size = weights.shape[1]
    if vocab_size % _BLOCK:
        weights = functional.pad(weights, (0, -vocab_size % _BLOCK))
    blocks = weights.view(len(weights), -1, _BLOCK)
    sums = blocks.sum(-1)
    cumulative = sums.cumsum(-1)
    target = _target(cumulative, uniforms)
    block = _locate(cumulative, target)
    rest = target - (cumulative.gather(1, block) - sums.gather(1, block))
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
    token_ids = block * _BLOCK + _locate(inside.cumsum(-1), rest)
    return token_ids.clamp_(max=vocab_size - 1).squeeze(1)


def _target(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """[rows, 1] int64 in [0, total): where in the cumulative weights [rows, n] each row's uniform falls."""
    total = cumulative[:, -1:]
    return torch.minimum((uniforms.unsqueeze(1) * total).long(), total - 1)


def _locate(cumulative: Tensor, target: Tensor) -> Tensor:
    """[rows, 1] the first index whose cumulative weight exceeds the target; within bounds even if logits were NaN."""
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection that scatters nearby words."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
