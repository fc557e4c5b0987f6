"""Sequence: one stream of tokens and what the cache holds of it."""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from atom_core.engine.running_rows import (
    GROUP,
    MAX_NUM_TOKENS,
    NUM_ACCEPTED,
    NUM_COMPUTED,
    NUM_COUNTS,
    NUM_DRAFTS,
    NUM_TOKENS,
    PREFILL_TARGET,
    SEQUENCE_ID,
)
from atom_core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence as TokenIds

    from atom_core.engine.outputs import FinishReason
    from atom_core.engine.sampling import Logprob, SamplingParams

__all__ = ["Sequence", "SequenceStatus"]


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def _count(index: int) -> Any:
    """Make an attribute of one of the sequence's counts, wherever they are.

    Both `array` and the memory of a row give plain integers, which numpy's own indexing does not.
    """

    def read(seq: Sequence) -> int:
        return seq._counts[index]

    def write(seq: Sequence, value: int) -> None:
        seq._counts[index] = value

    return property(read, write)


class Sequence:
    """One stream of tokens: a prompt and what was generated from it.

    While it runs, its counts and tokens lie in a row of `RunningRows`.

    Attributes:
        id: unique in the engine, rising with arrival.
        params: how to sample.
        num_prompt_tokens: tokens of the prompt.
        num_tokens: tokens known, prompt and output.
        max_num_tokens: the sequence ends when it has this many.
        num_computed_tokens: tokens whose cache entries exist.
        num_cached_tokens: tokens that a prefix hit gave at the last admission.
        prefill_target: tokens that prefill must compute before decoding goes on.
        num_draft_tokens: draft tokens that lie behind the known ones, to be verified by the next step.
        num_accepted: tokens kept from the previous step; 0 before the first.
        block_table: blocks in order.
        has_per_req_cache: the model type is registered as stateful; decided where the request is made.
        per_req_cache_group: the leased group, -1 when none.
        restore_checkpoint: the checkpoint that the state is restored from at the next step.
        cache_salt: only sequences with the same salt share blocks.
        use_prefix_cache: whether hits are allowed; not where logits of the whole prompt are wanted.
        forks: further samples of the same prompt, which part from this one once the prompt is computed.
        row: its row of the `RunningRows` while it runs, -1 else.
    """

    num_tokens: int = _count(NUM_TOKENS)
    max_num_tokens: int = _count(MAX_NUM_TOKENS)
    num_computed_tokens: int = _count(NUM_COMPUTED)
    prefill_target: int = _count(PREFILL_TARGET)
    num_draft_tokens: int = _count(NUM_DRAFTS)
    num_accepted: int = _count(NUM_ACCEPTED)
    per_req_cache_group: int = _count(GROUP)

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: TokenIds[int],
        params: SamplingParams,
        *,
        max_num_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        has_per_req_cache: bool = False,
        cache_salt: str | None = None,
        seed: int = 0,
    ) -> None:
        self._counts: array[int] | memoryview[int] = array("q", [0] * NUM_COUNTS)
        self._counts[SEQUENCE_ID] = self.id = sequence_id
        self.params = params
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.max_num_tokens = max_num_tokens
        self._buffer: np.ndarray[Any, np.dtype[np.int32]] = np.array(prompt_token_ids, dtype=np.int32)
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        self.prefill_target = self.num_tokens
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.has_per_req_cache = has_per_req_cache
        self.per_req_cache_group = -1
        self.restore_checkpoint: int | None = None
        self.cache_salt = cache_salt
        self.use_prefix_cache = params.prompt_logprobs is None
        self.forks: list[Sequence] = []
        self.row = -1
        self.output_logprobs: list[dict[int, Logprob] | None] = []
        self.prompt_logprobs: list[dict[int, Logprob] | None] = []

    @property
    def token_ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """All known tokens, a view."""
        return self._buffer[: self.num_tokens]

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens."""
        tokens: list[int] = self._buffer[: self.num_prompt_tokens].tolist()
        return tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        tokens: list[int] = self._buffer[self.num_prompt_tokens : self.num_tokens].tolist()
        return tokens

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens are still to be computed before decoding goes on."""
        return self.num_computed_tokens < self.prefill_target

    def tokens_between(self, start: int, end: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Tokens `start` to `end`, drafts behind the known ones included; a view."""
        return self._buffer[start:end]

    def enter_row(self, row: int, counts: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]) -> None:
        """Keep counts and tokens in this row from now on.

        Args:
            row: its number.
            counts: [NUM_COUNTS] int64.
            tokens: [max_model_len] int32.
        """
        if self.max_num_tokens > len(tokens):
            raise EngineError(f"sequence {self.id} may grow to {self.max_num_tokens} tokens, a row has {len(tokens)}")
        counts[:] = self._counts
        tokens[: self.num_tokens] = self.token_ids
        self.row, self._counts, self._buffer = row, counts.data, tokens

    def leave_row(self) -> None:
        """Keep counts and tokens itself again."""
        self.row, self._counts, self._buffer = -1, array("q", self._counts), self.token_ids.copy()

    def append_token(self, token_id: int) -> None:
        """Add a generated token."""
        self._reserve(self.num_tokens + 1)
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1

    def set_drafts(self, token_ids: TokenIds[int]) -> None:
        """Put draft tokens behind the known ones."""
        end = self.num_tokens + len(token_ids)
        self._reserve(end)
        self._buffer[self.num_tokens : end] = token_ids
        self.num_draft_tokens = len(token_ids)

    def set_draft(self, index: int, token_id: int) -> None:
        """Fill in one of the `num_draft_tokens` drafts."""
        self._buffer[self.num_tokens + index] = token_id

    def truncate(self, num_tokens: int) -> None:
        """Drop generated tokens behind the first `num_tokens`, because the sequence ended there."""
        self.num_tokens = num_tokens
        del self.output_logprobs[self.num_output_tokens :]

    def restart(self) -> None:
        """Forget what the cache held; every known token is to be computed again."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted = 0
        self.prefill_target = self.num_tokens
        self.status = SequenceStatus.WAITING

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the sequence."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _reserve(self, num_tokens: int) -> None:
        if num_tokens > len(self._buffer):
            assert self.row < 0, f"sequence {self.id} outgrows its row"
            grown = np.zeros(max(num_tokens, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self.num_tokens] = self._buffer[: self.num_tokens]
            self._buffer = grown
