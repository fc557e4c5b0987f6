"""StepPipeline: the next step is on the device before the host knows the tokens of this one.

Where a step's rows will decode again whatever their tokens are, the next step is launched behind it and reads its
tokens on the device. Meanwhile the host takes the tokens of the first. A row that turns out to have ended computes one
token too many, which nobody takes; what it wrote lies in its own blocks and slots, and whoever gets these next writes
later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atom_core.engine.model_runner import LaunchedStep, ModelRunner, StepOutput
from atom_core.engine.sampler import needs_host
from atom_core.engine.scheduled_batch import ScheduledBatch
from atom_core.engine.sequence import SequenceStatus

if TYPE_CHECKING:
    from atom_core.engine.scheduler import Scheduler

__all__ = ["StepPipeline"]


class StepPipeline:
    """Launches steps, one ahead where it can.

    Args:
        runner: runs them.
        scheduler: chooses their rows.
        overlaps: whether to run ahead at all.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, *, overlaps: bool) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._overlaps = overlaps
        self._ahead: LaunchedStep | None = None

    def next(self) -> tuple[ScheduledBatch, LaunchedStep | None]:
        """Return the next step's rows: those that were launched already and still run, or newly scheduled ones.

        Returns:
            The rows, none only when there is no work, and the step if the device has it.
        """
        launched, self._ahead = self._ahead, None
        if launched is not None:
            seqs = [seq for seq in launched.scheduled.seqs if seq.status is SequenceStatus.RUNNING]
            if seqs:
                return ScheduledBatch(seqs, [1] * len(seqs), len(seqs)), launched
        return self._scheduler.schedule(), None

    def run(self, batch: ScheduledBatch, launched: LaunchedStep | None) -> StepOutput:
        """Launch a step if it is not, launch the one after it if that is certain, and wait for the first.

        Args:
            batch: from `next`.
            launched: from `next`.
        """
        launched = launched or self._runner.launch(batch)
        if self._overlaps and not any(needs_host(seq.params) for seq in batch.seqs):
            following = self._scheduler.follow(batch)
            if following is not None:
                self._ahead = self._runner.launch(following, launched)
                batch.overtaken = True
        output = self._runner.finish(launched)
        if launched.scheduled.seqs == batch.seqs:
            return output
        kept = {id(seq) for seq in batch.seqs}
        rows = [row for row, seq in enumerate(launched.scheduled.seqs) if id(seq) in kept]
        return StepOutput(
            [output.token_ids[row] for row in rows],
            [output.logprobs[row] for row in rows],
            [output.prompt_logprobs[row] for row in rows],
        )
