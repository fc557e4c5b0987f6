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
        num_generated_tokens: tokens that requests gained.
        num_computed_tokens: tokens that went through the model.
        num_steps: steps that ran.
        num_preemptions: sequences that lost their cache to others.
        num_verifications: rows that verified drafts.
        num_draft_tokens: the drafts of these rows.
        num_accepted_tokens: drafts that were what the model chose.
        schedule_seconds: time spent to schedule, drafting included.
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
    num_verifications: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    schedule_seconds: float = 0.0
    run_seconds: float = 0.0
    finish_seconds: float = 0.0
    last_step: dict[str, Any] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a row gained on average by verifying drafts; `None` before the first."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else None

    def count_request(self, num_prompt_tokens: int) -> None:
        """Count an accepted request."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens

    def count_step(
        self,
        batch: ScheduledBatch,
        result: StepOutput,
        scheduler: Scheduler,
        *,
        num_generated: int,
        seconds: tuple[float, float, float],
    ) -> None:
        """Count a finished step.

        Args:
            batch: the step.
            result: what it gave.
            scheduler: after the step.
            num_generated: tokens that requests gained.
            seconds: spent to schedule, to run, and to take the tokens.
        """
        num_tokens = batch.num_tokens
        drafted = [row for row in range(batch.num_decodes) if batch.num_new_tokens[row] > 1]
        num_drafts = sum(batch.num_new_tokens[row] - 1 for row in drafted)
        num_accepted = sum(len(result.token_ids[row]) - 1 for row in drafted)
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.num_generated_tokens += num_generated
        self.num_preemptions += len(batch.preempted)
        self.num_verifications += len(drafted)
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.schedule_seconds += seconds[0]
        self.run_seconds += seconds[1]
        self.finish_seconds += seconds[2]
        blocks = scheduler.block_manager
        self.last_step = {
            "step": self.num_steps,
            "num_seqs": len(batch.seqs),
            "num_decodes": batch.num_decodes,
            "num_tokens": num_tokens,
            "num_generated_tokens": num_generated,
            "num_preemptions": len(batch.preempted),
            "num_verifications": len(drafted),
            "num_draft_tokens": num_drafts,
            "num_accepted_tokens": num_accepted,
            "num_checkpoints_saved": len(batch.saves),
            "num_waiting": len(scheduler.waiting),
            "num_running": len(scheduler.running),
            "num_used_blocks": blocks.num_used_blocks,
            "num_cached_blocks": blocks.num_cached_blocks,
            "num_free_groups": len(blocks.free_per_req_cache_groups),
            "schedule_seconds": seconds[0],
            "run_seconds": seconds[1],
            "finish_seconds": seconds[2],
        }

    def snapshot(self, scheduler: Scheduler) -> dict[str, Any]:
        """Return all counts, with the scheduler's queues and the cache's occupancy.

        `hit_rate` is the share of the admitted tokens that were found in the cache, `block_occupancy` and
        `group_occupancy` are the shares of blocks and groups that requests hold now; `None` where there are none.
        """
        counts = {name: value for name, value in vars(self).items() if name != "last_step"}
        blocks = scheduler.block_manager
        cache = blocks.stats()
        num_groups = blocks.states.num_groups
        return {
            **counts,
            "acceptance_length": self.acceptance_length,
            "hit_rate": cache["hit_tokens"] / cache["query_tokens"] if cache["query_tokens"] else None,
            "block_occupancy": cache["used_blocks"] / blocks.num_blocks,
            "group_occupancy": 1 - cache["free_groups"] / num_groups if num_groups else None,
            "num_waiting": len(scheduler.waiting),
            "num_running": len(scheduler.running),
            "cache": cache,
        }
