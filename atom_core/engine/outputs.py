"""What a request gives back. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from atom_core.engine.sampling import Logprob

__all__ = ["CompletionOutput", "FinishReason", "RequestMetrics", "RequestOutput"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`, and what it cost.

    Attributes:
        arrival_time: when the engine took it.
        first_token_time: when its first output token was there, or `None` before that.
        finished_time: when it ended, or `None` before that.
        num_cached_tokens: prompt tokens that the prefix cache spared.
        num_preemptions: times that it had to give up its blocks and start over.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request so far; not frozen, because one is made per request and step.

    Attributes:
        index: 0 to n - 1.
        text: empty where the tokenizer is skipped.
        token_ids: the output, without the prompt.
        finish_reason: `None` while it runs.
        stop_reason: the stop string or stop token that ended it, or `None`, also for the model's end of sequence.
        logprobs: per token, by token id, the chosen one first; `None` if not asked for.
        cumulative_logprob: sum of the chosen tokens' logprobs; `None` if not asked for.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request so far; not frozen, because one is made per request and step.

    Attributes:
        request_id: the engine's name for it.
        prompt: the text, or `None` where token ids came in.
        prompt_token_ids: what the model read.
        outputs: its samples, by index.
        finished: whether all samples have ended.
        metrics: times and costs.
        prompt_logprobs: per prompt token, `None` for the first; `None` if not asked for.
        error: why the request was refused or failed, or `None`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    error: str | None = None
