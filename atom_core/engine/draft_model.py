"""DraftModel: a smaller model guesses, one token after another, in a second role beside the model.

Its layers have caches of their own with the same blocks and groups, so that block tables, prefix hits, checkpoints and
preemption are those of the model: whatever tokens the model's caches hold after a step, the draft model's hold too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from atom_core.engine.running_rows import NUM_DRAFTS, RunningRows
from atom_core.engine.scheduled_batch import CheckpointSave, Fork, ScheduledBatch
from atom_core.engine.speculation import Speculator

if TYPE_CHECKING:
    from atom_core.engine.model_runner import ModelRunner, StepOutput
    from atom_core.engine.sequence import Sequence as TokenSequence

__all__ = ["DraftModel"]


class DraftModel(Speculator):
    """Runs the draft model once per draft, and once behind the model for what it lacks of the step's tokens.

    A draft is what the draft model would choose in the model's place, with the same random number: a draft model that
    agrees with the model is always believed, whatever the temperature, and the tokens are the model's own in any case
    (see `sampling_rows`). With k drafts it computes the last known token and the first k - 1 drafts
    before the model runs, and the last draft behind it, where the model accepted them all.

    Args:
        runner: the draft model's.
        rows: the running sequences.
        num_spec_tokens: most drafts of a sequence and step.
    """

    def __init__(self, runner: ModelRunner, rows: RunningRows, num_spec_tokens: int) -> None:
        self.runner = runner
        self._rows = rows
        self._num_spec_tokens = num_spec_tokens

    def set_drafts(self, running: Collection[TokenSequence]) -> None:
        """Make room for as many drafts as the next step may verify."""
        rows = self._rows.decoding(running)
        self._rows.counts[rows, NUM_DRAFTS] = self._rows.draft_room(rows, self._num_spec_tokens)

    def draft(self, batch: ScheduledBatch) -> None:
        """Guess the drafts of the rows that decode, all first ones, then all second ones."""
        seqs = batch.seqs[: batch.num_decodes]
        for index in range(self._num_spec_tokens):
            seqs = [seq for seq in seqs if seq.num_draft_tokens > index]
            if not seqs:
                return
            count = len(seqs)
            drafts = self.runner.run(ScheduledBatch(seqs, [1] * count, count, ahead=[index] * count)).token_ids
            for seq, (token_id,) in zip(seqs, drafts, strict=True):
                seq.set_draft(index, token_id)

    def follow(self, batch: ScheduledBatch, result: StepOutput) -> None:
        """Compute chunks of prompts, and the tokens behind which the model knows a further one."""
        own = ScheduledBatch(leased=batch.leased, samples=False)
        for row, (seq, count) in enumerate(zip(batch.seqs, batch.num_new_tokens, strict=True)):
            decodes = row < batch.num_decodes
            if decodes and len(result.token_ids[row]) <= seq.num_draft_tokens:
                continue
            own.seqs.append(seq)
            own.num_new_tokens.append(1 if decodes else count)
            own.ahead.append(seq.num_draft_tokens if decodes else 0)
            own.num_decodes += decodes
        if own.seqs:
            self.runner.run(own)

    def save_states(self, saves: Sequence[CheckpointSave]) -> None:
        """Copy the draft model's states into its own checkpoints."""
        self.runner.save_states(saves)

    def copy_forks(self, forks: Sequence[Fork]) -> None:
        """Copy the draft model's partial blocks and states."""
        self.runner.copy_forks(forks)

    def release(self, seq: TokenSequence) -> None:
        """Keep nothing of a sequence but what its blocks and its group hold."""
