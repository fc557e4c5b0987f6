"""EngineStats: what the engine did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atom_core.engine.model_runner import StepOutput
    from atom_core.engine.scheduled_batch import ScheduledBatch
    from atom_core.engine.scheduler import Scheduler

__all__ = ["EngineStats"]


@dataclass
class EngineStats:
    """Counts since the engine started, and the last step's figures.

    Attributes:
        num_requests: requests that were accepted.
        num_prompt_tokens: their prompts' tokens.
        num_generated_tokens: tokens that were sampled.
        num_computed_tokens: tokens that went through the model.
        num_steps: steps that ran.
        num_preemptions: sequences that lost their cache to others.
        schedule_seconds: time spent to schedule.
        run_seconds: time spent in the model, batch building and sampling included.
        finish_seconds: time spent to take the tokens.
        last_step: figures of the last step, as `atom_step_finished` gets them.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    schedule_seconds: float = 0.0
    run_seconds: float = 0.0
    finish_seconds: float = 0.0
    last_step: dict[str, Any] = field(default_factory=dict)

    def count_request(self, num_prompt_tokens: int) -> None:
        """Count an accepted request."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens

    def count_step(
        self,
        batch: ScheduledBatch,
        result: StepOutput,
        *,
        schedule_seconds: float,
        run_seconds: float,
        finish_seconds: float,
    ) -> None:
        """Count a finished step."""
        num_tokens = batch.num_tokens
        num_generated = sum(map(len, result.token_ids))
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.num_generated_tokens += num_generated
        self.num_preemptions += len(batch.preempted)
        self.schedule_seconds += schedule_seconds
        self.run_seconds += run_seconds
        self.finish_seconds += finish_seconds
        self.last_step = {
            "step": self.num_steps,
            "num_seqs": len(batch.seqs),
            "num_decodes": batch.num_decodes,
            "num_tokens": num_tokens,
            "num_generated_tokens": num_generated,
            "num_preemptions": len(batch.preempted),
            "schedule_seconds": schedule_seconds,
            "run_seconds": run_seconds,
            "finish_seconds": finish_seconds,
        }

    def snapshot(self, scheduler: Scheduler) -> dict[str, Any]:
        """Return all counts, with the scheduler's queues and the cache's occupancy."""
        counts = {name: value for name, value in vars(self).items() if name != "last_step"}
        return {
            **counts,
            "num_waiting": len(scheduler.waiting),
            "num_running": len(scheduler.running),
            "cache": scheduler.block_manager.stats(),
        }
