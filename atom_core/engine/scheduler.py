"""Scheduler: which sequence computes which tokens in the next step.

In this file a `row` is a place in a batch, and an `index` holds the rows of sequences in `RunningRows`.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from atom_core.cache.block_manager import BlockManager
from atom_core.engine.running_rows import (
    MAX_NUM_TOKENS,
    NUM_ACCEPTED,
    NUM_COMPUTED,
    NUM_DRAFTS,
    NUM_TOKENS,
    PREFILL_TARGET,
    RunningRows,
)
from atom_core.engine.scheduled_batch import CheckpointSave, Fork, ScheduledBatch
from atom_core.engine.sequence import Sequence, SequenceStatus
from atom_core.errors import EngineError, RequestError

__all__ = ["Scheduler", "SchedulerLimits"]


@dataclass(frozen=True)
class SchedulerLimits:
    """What bounds a step.

    Attributes:
        max_num_seqs: most rows.
        max_num_batched_tokens: most tokens.
        max_model_len: most tokens of a sequence.
        prefill_chunk_tokens: most prompt tokens that one sequence computes in a step.
        policy: `mixed`, or `prefill_first`: a step has either prefills or decodes.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefill_chunk_tokens: int | None = None
    policy: Literal["mixed", "prefill_first"] = "mixed"

    @property
    def max_running(self) -> int:
        """Most running sequences: no more than a step has tokens, so that each makes progress in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Scheduler:
    """Admits sequences in order of arrival, and preempts the latest when blocks run out.

    `running` and `waiting` are both in order of arrival: admission is first come, first served, and a preempted
    sequence goes back to where it was in the queue.

    Attributes:
        rows: counts, tokens and blocks of the running sequences.
    """

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager) -> None:
        self.limits = limits
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.rows = RunningRows(limits.max_num_seqs, limits.max_model_len, block_manager.block_size)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that passed `check`, before all that arrived later."""
        if not self.waiting or self.waiting[-1].id < seq.id:
            self.waiting.append(seq)
        else:
            self.waiting.insert(bisect(self.waiting, seq.id, key=_arrival), seq)

    def check(self, seq: Sequence) -> None:
        """Refuse a sequence that can never be served.

        Raises:
            RequestError: it can never be served: no tokens, longer than the model allows, or larger than the
                whole cache.
        """
        if seq.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if seq.num_prompt_tokens >= self.limits.max_model_len:
            raise RequestError(
                f"the prompt has {seq.num_prompt_tokens} tokens; with max_model_len {self.limits.max_model_len} "
                f"at most {self.limits.max_model_len - 1} fit, since one must be generated"
            )
        num_samples = 1 + len(seq.forks)
        if num_samples > self.limits.max_running:
            raise RequestError(
                f"n is {num_samples}, but samples of a prompt run at once, and at most {self.limits.max_running} "
                f"sequences do (the least of max_num_seqs, max_num_batched_tokens and the groups of per-request state)"
            )
        reason = self.block_manager.can_never_allocate(seq.max_num_tokens, seq.has_per_req_cache)
        if reason is not None:
            raise RequestError(reason)

    def cancel(self, seq: Sequence) -> None:
        """Take an unfinished sequence out and release what it holds; samples that wait to part from it end with it."""
        _drop_forks(seq)
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        seq.finish("abort")

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's rows.

        Returns:
            The batch; without rows only when there is no work.

        Raises:
            EngineError: there is work, but none can run.
        """
        batch = ScheduledBatch()
        if self.limits.policy == "mixed":
            budget = self._schedule_decodes(batch, self.limits.max_num_batched_tokens)
            self._schedule_prefills(batch, budget)
        else:
            self._schedule_prefills(batch, self.limits.max_num_batched_tokens)
            if not batch.seqs:
                self._schedule_decodes(batch, self.limits.max_num_batched_tokens)
        if not batch.seqs and self.has_work:
            raise EngineError(
                f"{len(self.waiting)} waiting and {len(self.running)} running sequences, but none can run; "
                f"free blocks {self.block_manager.num_free_blocks}"
            )
        return batch

    def follow(self, batch: ScheduledBatch) -> ScheduledBatch | None:
        """Choose the step after one whose tokens are not known yet.

        Args:
            batch: a step that was launched.

        Returns:
            The rows that decode again whatever their tokens are, with blocks for them; `None` where the next step
            depends on the tokens, on who waits, or where the states that this step makes are to be kept.
        """
        if batch.num_decodes != len(batch.seqs) or len(self.running) != len(batch.seqs):
            return None
        if self.waiting and len(self.running) < self.limits.max_running:
            return None
        index = self.rows.of(batch.seqs)
        now = self.rows.counts[index]
        num_tokens = now[:, NUM_TOKENS]
        full = np.flatnonzero(num_tokens % self.block_manager.block_size == 0).tolist()
        if any(self.block_manager.keeps_state(batch.seqs[place], int(num_tokens[place])) for place in full):
            return None
        going = np.flatnonzero(num_tokens + 1 < now[:, MAX_NUM_TOKENS])
        seqs = [batch.seqs[place] for place in going.tolist()]
        if not seqs:
            return None
        wanted = num_tokens[going] + 1
        if not self._grow_all(seqs, self._lacking_blocks(index[going], wanted), wanted):
            return None
        return ScheduledBatch(seqs, [1] * len(seqs), len(seqs), ahead=[1] * len(seqs), follows=True)

    def postprocess(
        self, batch: ScheduledBatch, sampled: Rows[Rows[int]], forked: Mapping[int, Rows[int]] | None = None
    ) -> list[Sequence]:
        """Take a finished step's tokens, and decide which of its states to keep in `batch.saves` and `batch.forks`.

        Copy these, then call `states_saved`, both before the next step is scheduled.

        Args:
            batch: the step's rows.
            sampled: for each row the tokens that it gained: none for a chunk that does not complete, one for a
                plain row, up to 1 + drafts for a row that verified.
            forked: by row whose sequence has forks and whose prompt is computed, the first token of each fork.

        Returns:
            The sequences that finished.
        """
        for seq in batch.leased:
            if seq.restore_checkpoint is not None:
                self.block_manager.restored(seq)
        index, counts = self.rows.of(batch.seqs), self.rows.counts
        before = counts[index]
        num_sampled = np.fromiter(map(len, sampled), np.int64, len(index))
        verified = before[:, NUM_DRAFTS] > 0
        starts = before[:, NUM_COMPUTED]
        ends = starts + np.where(verified, num_sampled, batch.num_new_tokens)
        counts[index, NUM_DRAFTS] = 0
        counts[index, NUM_COMPUTED] = ends
        counts[index, NUM_ACCEPTED] = np.where(verified, num_sampled, 1)
        finished = self._append(batch.seqs, sampled, index, num_sampled)
        ends = np.minimum(ends, counts[index, NUM_TOKENS])
        block_size = self.block_manager.block_size
        filled = np.flatnonzero(ends // block_size > starts // block_size)
        for row, start, end in zip(filled.tolist(), starts[filled].tolist(), ends[filled].tolist(), strict=True):
            self._keep(batch, row, start, end)
        for row, tokens in (forked or {}).items():
            finished += self._fork(batch, batch.seqs[row], tokens)
        for seq in finished:
            self._release(seq)
        return finished

    def states_saved(self, batch: ScheduledBatch) -> None:
        """Let the step's checkpoints be found; their copies are enqueued behind the forward that made the states."""
        for save in batch.saves:
            self.block_manager.states.publish_checkpoint(save.checkpoint_id)

    def stop(self, seq: Sequence, reason: str | int | None) -> None:
        """End a sequence from outside, for example at a stop string; one that has just ended otherwise, too."""
        _drop_forks(seq)
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        seq.finish("stop", reason)

    def _schedule_decodes(self, batch: ScheduledBatch, budget: int) -> int:
        seqs, index, counts = list(self.running), self.rows.of(self.running), self.rows.counts
        decode = counts[index, NUM_COMPUTED] >= counts[index, PREFILL_TARGET]
        seqs, index = _select(seqs, index, decode)
        num_tokens = counts[index, NUM_TOKENS]
        spare = budget - int((num_tokens - counts[index, NUM_COMPUTED]).sum()) - (len(self.running) - len(seqs))
        drafts = counts[index, NUM_DRAFTS]
        if drafts.sum() > spare:
            drafts = np.clip(spare - (np.cumsum(drafts) - drafts), 0, drafts)  # the first get theirs
            counts[index, NUM_DRAFTS] = drafts
        lacking = self._lacking_blocks(index, num_tokens + drafts)
        if not self._grow_all(seqs, lacking, num_tokens + drafts):
            for place in lacking:
                if seqs[place].status is SequenceStatus.RUNNING:
                    self._grow(seqs[place], batch)
        if batch.preempted:
            seqs, index = _select(seqs, index, np.array([seq.status is SequenceStatus.RUNNING for seq in seqs]))
        now = counts[index]
        batch.seqs += seqs
        batch.num_new_tokens += (now[:, NUM_TOKENS] + now[:, NUM_DRAFTS] - now[:, NUM_COMPUTED]).tolist()
        batch.num_decodes = len(seqs)
        return budget - batch.num_tokens

    def _lacking_blocks(self, index: np.ndarray[Any, Any], num_tokens: np.ndarray[Any, Any]) -> list[int]:
        """Which of these rows have no blocks for so many tokens; places in `index`."""
        has_room = self.rows.tables.lengths[index] * self.block_manager.block_size >= num_tokens
        places: list[int] = np.flatnonzero(~has_room).tolist()
        return places

    def _grow_all(self, seqs: Rows[Sequence], places: Rows[int], num_tokens: np.ndarray[Any, Any]) -> bool:
        """Give those of the sequences their blocks; false, with nothing changed, if there are not enough for all."""
        if not places:
            return True
        lacking = [seqs[place] for place in places]
        if not self.block_manager.append_all(lacking, num_tokens[places].tolist()):
            return False
        for seq in lacking:
            self.rows.add_blocks(seq)
        return True

    def _grow(self, seq: Sequence, batch: ScheduledBatch) -> None:
        """Make room for the sequence's new tokens; drop its drafts, then preempt the latest arrivals."""
        blocks = self.block_manager
        if not blocks.append(seq, seq.num_tokens + seq.num_draft_tokens):
            seq.num_draft_tokens = 0
            while not blocks.append(seq, seq.num_tokens):
                victim = self.running[-1]
                self._preempt(victim, batch)
                if victim is seq:
                    return
        self.rows.add_blocks(seq)

    def _preempt(self, seq: Sequence, batch: ScheduledBatch) -> None:
        self._release(seq)
        seq.restart()
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.add(seq)
        batch.preempted.append(seq)

    def _schedule_prefills(self, batch: ScheduledBatch, budget: int) -> None:
        index, counts = self.rows.of(self.running), self.rows.counts
        for place in np.flatnonzero(counts[index, NUM_COMPUTED] < counts[index, PREFILL_TARGET]).tolist():
            if budget > 0:
                budget -= self._add_chunk(batch, self.running[place], budget)
        if not self.waiting:
            return
        promised = sum(len(seq.forks) for seq in self.running)  # rows, and with them groups, kept for samples to part
        while budget > 0 and self.waiting and not batch.preempted:
            seq = self.waiting[0]
            num_running = len(self.running) + promised
            if num_running + 1 + len(seq.forks) > self.limits.max_running:
                break
            reserve = num_running + len(seq.forks) if num_running else 0
            if not self.block_manager.can_allocate(seq, reserve_blocks=reserve):
                break
            promised += len(seq.forks)
            self.waiting.popleft()
            self.block_manager.allocate(seq)
            self._start(seq)
            if seq.per_req_cache_group >= 0:
                batch.leased.append(seq)
            budget -= self._add_chunk(batch, seq, budget)

    def _start(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        seq.prefill_target = seq.num_tokens
        self.rows.add(seq)
        insort(self.running, seq, key=_arrival)

    def _fork(self, batch: ScheduledBatch, seq: Sequence, tokens: Rows[int]) -> list[Sequence]:
        """Let samples part from a sequence whose prompt is computed; those without a block queue up like any other.

        Returns:
            The samples that ended with their first token.
        """
        ended = []
        forks, seq.forks = seq.forks, []
        for fork, token in zip(forks, tokens, strict=True):
            if not self.block_manager.can_fork(seq):
                self.add(fork)
                continue
            blocks = self.block_manager.fork(seq, fork)
            self._start(fork)
            fork.num_accepted = 1
            batch.forks.append(Fork(seq.per_req_cache_group, fork.per_req_cache_group, blocks))
            fork.append_token(token)
            if self._finishes(fork, token):
                ended.append(fork)
        return ended

    def _add_chunk(self, batch: ScheduledBatch, seq: Sequence, budget: int) -> int:
        start = seq.num_computed_tokens
        end = min(seq.prefill_target, start + min(budget, self.limits.prefill_chunk_tokens or budget))
        end = self.block_manager.next_boundary(seq, start, end)
        batch.seqs.append(seq)
        batch.num_new_tokens.append(end - start)
        return end - start

    def _keep(self, batch: ScheduledBatch, row: int, start: int, end: int) -> None:
        """Publish the blocks that a row's tokens `start` to `end` filled, and reserve checkpoints of its states.

        A chunk leaves the state after its last token only, a decode row the states after each.
        """
        seq, blocks, decodes = batch.seqs[row], self.block_manager, row < batch.num_decodes
        if not batch.overtaken and (not decodes or blocks.may_keep_state(start, end)):
            size = blocks.block_size
            first = start // size * size + size if decodes else end
            for boundary in range(first, end + 1, size):
                checkpoint_id = blocks.take_checkpoint(seq, boundary)
                if checkpoint_id is not None:
                    token = boundary - start - 1 if decodes else 0
                    batch.saves.append(CheckpointSave(checkpoint_id, seq.per_req_cache_group, token))
        blocks.publish(seq, end)

    def _append(
        self,
        seqs: Rows[Sequence],
        sampled: Rows[Rows[int]],
        index: np.ndarray[Any, Any],
        num_sampled: np.ndarray[Any, Any],
    ) -> list[Sequence]:
        """Add each row's tokens, up to the one that ends its sequence.

        Returns:
            The sequences that ended.
        """
        counts = self.rows.counts
        known = counts[index, NUM_TOKENS]
        ends = known + num_sampled
        places = np.arange(num_sampled.sum()) + np.repeat(ends - np.cumsum(num_sampled), num_sampled)
        tokens = np.fromiter(chain.from_iterable(sampled), np.int32, len(places))
        self.rows.tokens[np.repeat(index, num_sampled), places] = tokens
        counts[index, NUM_TOKENS] = ends
        may_end = ends >= counts[index, MAX_NUM_TOKENS]
        stops = (not seq.stop_token_ids.isdisjoint(new) for seq, new in zip(seqs, sampled, strict=True))
        may_end |= np.fromiter(stops, bool, len(seqs))
        ended = []
        for row in np.flatnonzero(may_end).tolist():
            seq = seqs[row]
            for number, token in enumerate(sampled[row], start=int(known[row]) + 1):
                seq.num_tokens = number
                if self._finishes(seq, token):
                    ended.append(seq)
                    break
        return ended

    def _finishes(self, seq: Sequence, token: int) -> bool:
        if token in seq.stop_token_ids and seq.num_output_tokens > seq.params.min_tokens:
            seq.finish("stop", None if token in seq.eos_token_ids else token)
        elif seq.num_tokens >= seq.max_num_tokens:
            seq.finish("length")
        return seq.status is SequenceStatus.FINISHED

    def _release(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq)
        self.running.remove(seq)
        self.rows.remove(seq)


def _drop_forks(seq: Sequence) -> None:
    for fork in seq.forks:
        fork.finish("abort")
    seq.forks = []


def _select(
    seqs: list[Sequence], index: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]
) -> tuple[list[Sequence], np.ndarray[Any, Any]]:
    """Keep the sequences, and their rows, where the mask is true."""
    if mask.all():
        return seqs, index
    return [seqs[place] for place in np.flatnonzero(mask).tolist()], index[mask]


def _arrival(seq: Sequence) -> int:
    return seq.id
