"""InputOutputProcessor: from prompts to sequences, and from tokens back to text."""

from __future__ import annotations

import time
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atom_core.engine.detokenizer import Detokenizer
from atom_core.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from atom_core.engine.sequence import Sequence, SequenceStatus
from atom_core.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from atom_core.engine.sampling import Logprob, SamplingParams

__all__ = ["InputOutputProcessor", "Request", "StopFound"]

_SEED_MASK = 2**64 - 1
_SAMPLE_STRIDE = 0x9E3779B97F4A7C15


@dataclass
class Request:
    """A request in the engine: its sequences and the text made from them so far.

    Attributes:
        id: unique in the engine.
        prompt: the prompt's text, if it came as text.
        prompt_token_ids: the prompt's tokens.
        params: how to sample.
        seqs: one per sample; the further ones part from the first once it has computed the prompt.
        metrics: times and counts.
        detokenizers: one per sample, `None` without a tokenizer.
        error: why the request failed.
    """

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    seqs: list[Sequence] = field(default_factory=list)
    detokenizers: list[Detokenizer | None] = field(default_factory=list)
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.seqs)


@dataclass(frozen=True, slots=True)
class StopFound:
    """A stop string in a sample's text.

    Attributes:
        text: the stop string.
        num_tokens: output tokens up to the one that completed it.
    """

    text: str
    num_tokens: int


class InputOutputProcessor:
    """Makes sequences from prompts and text from tokens; needs no model.

    Args:
        tokenizer: `None` where requests are token ids and results carry no text.
        vocab_size: token ids must be below it.
        max_model_len: most tokens of a request.
        eos_token_ids: tokens that end an output.
        stateful: whether the model type is registered as stateful; decides `has_per_req_cache`.
        seed: for requests that bring none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        stateful: bool,
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._stateful = stateful
        self._seed = seed
        self._next_sequence_id = 0

    def make_request(
        self,
        request_id: str,
        prompt: str | TokenIds[int],
        params: SamplingParams,
        cache_salt: str | None = None,
    ) -> Request:
        """Tokenize a prompt and make the request's sequences.

        Raises:
            RequestError: the prompt is no text and no list of token ids of this vocabulary, or is text where
                there is no tokenizer, or stop strings are asked for without one.
        """
        token_ids = self._token_ids(prompt)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none (skip_tokenizer)")
        limit = self._max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + params.max_tokens)
        text = prompt if isinstance(prompt, str) else None
        request = Request(request_id, text, token_ids, params, RequestMetrics(arrival_time=time.monotonic()))
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token")
        for index in range(params.n):
            seed = params.seed if params.seed is not None else self._seed + self._next_sequence_id
            seq = Sequence(
                self._next_sequence_id,
                token_ids,
                params,
                max_num_tokens=limit,
                eos_token_ids=self._eos_token_ids,
                has_per_req_cache=self._stateful,
                cache_salt=cache_salt,
                seed=(seed + index * _SAMPLE_STRIDE) & _SEED_MASK,
            )
            self._next_sequence_id += 1
            request.seqs.append(seq)
            request.detokenizers.append(Detokenizer(self.tokenizer, params) if self.tokenizer is not None else None)
        request.seqs[0].forks = request.seqs[1:]
        return request

    def take_tokens(self, request: Request, index: int, num_known: int) -> StopFound | None:
        """Turn a sample's tokens behind the first `num_known` into text.

        Returns:
            The stop string that the text reached, if any.
        """
        detokenizer = request.detokenizers[index]
        if detokenizer is None:
            return None
        seq = request.seqs[index]
        token_ids = seq.token_ids[num_known:].tolist()
        stopped_by_token = seq.finish_reason == "stop" and not request.params.include_stop_str_in_output
        detokenizer.append(token_ids[:-1] if stopped_by_token else token_ids)
        if detokenizer.finished_by is None:
            return None
        return StopFound(detokenizer.finished_by, detokenizer.num_tokens)

    def output(self, request: Request) -> RequestOutput:
        """The request's result so far."""
        completions = []
        request.metrics.num_preemptions = sum(seq.num_preemptions for seq in request.seqs)
        for index, seq in enumerate(request.seqs):
            detokenizer = request.detokenizers[index]
            if detokenizer is not None and seq.status is SequenceStatus.FINISHED:
                detokenizer.flush()
            logprobs = None
            if request.params.logprobs is not None:
                logprobs = [found for found in seq.output_logprobs if found]
            completions.append(
                CompletionOutput(
                    index=index,
                    text="" if detokenizer is None else detokenizer.text,
                    token_ids=seq.output_token_ids,
                    finish_reason=seq.finish_reason,
                    stop_reason=seq.stop_reason,
                    logprobs=logprobs,
                    cumulative_logprob=None if logprobs is None else _sum_of_chosen(logprobs),
                )
            )
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(request),
            outputs=completions,
            finished=request.finished,
            error=request.error,
            metrics=request.metrics,
        )

    def _prompt_logprobs(self, request: Request) -> list[Any] | None:
        if request.params.prompt_logprobs is None or not request.seqs:
            return None
        return [None, *request.seqs[0].prompt_logprobs]

    def _token_ids(self, prompt: str | TokenIds[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the prompt is text, but this engine has no tokenizer; give token ids")
            return list(self.tokenizer(prompt)["input_ids"])
        try:
            token_ids = [int(token) for token in prompt]
        except (TypeError, ValueError):
            raise RequestError(f"a prompt is text or a list of token ids, found {type(prompt).__name__}") from None
        wrong = next((token for token in token_ids if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is outside the vocabulary of {self._vocab_size}")
        return token_ids


def _sum_of_chosen(logprobs: TokenIds[dict[int, Logprob]]) -> float:
    """Add up the logprobs of the chosen tokens, the first of each."""
    return sum(next(iter(found.values())).logprob for found in logprobs)
