"""Logprobs: how likely tokens were in the distribution that the model gave, before any filter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atom_core.engine.sampling import Logprob

__all__ = ["prompt_logprobs", "row_pieces", "token_logprobs"]

# Logits worked on at once: on a CPU so few that they stay in its cache, elsewhere to bound the memory.
_CPU_LOGITS, _DEVICE_LOGITS = 2**20, 2**26


def prompt_logprobs(logits: Tensor, target_ids: Sequence[int], num_top: int) -> list[dict[int, Logprob]]:
    """Report how likely the prompt's tokens were.

    Args:
        logits: [tokens, vocab], any floating dtype, unfiltered.
        target_ids: the token that followed each row.
        num_top: alternatives to report besides the target.

    Returns:
        Per row, logprobs by token id, the target first.
    """
    return token_logprobs(logits, torch.tensor(target_ids, device=logits.device), [num_top] * len(logits))


def token_logprobs(logits: Tensor, token_ids: Tensor, nums_top: Sequence[int]) -> list[dict[int, Logprob]]:
    """Report logprobs of one token per row and of each row's likeliest tokens.

    Args:
        logits: [rows, vocab], any floating dtype, unfiltered.
        token_ids: [rows] int64.
        nums_top: alternatives to report, per row.

    Returns:
        Per row, logprobs by token id, the row's token first.
    """
    num_top = min(max(nums_top, default=0), logits.shape[1])
    answers: list[dict[int, Logprob]] = []
    for piece in row_pieces(logits):
        scores, ids = logits[piece].float(), token_ids[piece]
        norms = scores.logsumexp(-1, keepdim=True)
        chosen = scores.gather(1, ids.unsqueeze(1))
        ranks = (scores > chosen).sum(-1) + 1
        top = scores.topk(num_top, dim=-1)
        answers += [
            {token_id: Logprob(logprob, rank)}
            for token_id, logprob, rank in zip(
                ids.tolist(), (chosen - norms).squeeze(1).tolist(), ranks.tolist(), strict=True
            )
        ]
        tops = zip(answers[piece], top.indices.tolist(), (top.values - norms).tolist(), nums_top[piece], strict=True)
        for answer, top_ids, top_logprobs, num in tops:
            for place in range(min(num, num_top)):
                answer.setdefault(top_ids[place], Logprob(top_logprobs[place], place + 1))
    return answers


def row_pieces(logits: Tensor) -> list[slice]:
    """Slices of rows to work on one after another; one, perhaps empty, at least."""
    budget = _CPU_LOGITS if logits.device.type == "cpu" else _DEVICE_LOGITS
    step = max(1, budget // logits.shape[1])
    return [slice(start, min(start + step, len(logits))) for start in range(0, max(1, len(logits)), step)]
