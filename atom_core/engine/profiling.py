"""Profiling: how much memory is left for caches once weights, the largest steps and the graphs have theirs."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from atom_core.engine.memory import available_bytes, format_bytes, memory_limit_bytes
from atom_core.engine.running_rows import RunningRows
from atom_core.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from atom_core.cache.plan import CachePlan
    from atom_core.config import EngineConfig
    from atom_core.engine.bound_model import BoundModel
    from atom_core.engine.scheduler import SchedulerLimits

__all__ = ["MemoryUse", "largest_steps", "measure_memory"]

_log = logging.getLogger("atom_core")


@dataclass(frozen=True)
class MemoryUse:
    """What a model takes of a device beside its caches.

    Attributes:
        resident_bytes: weights, buffers, the driver's context and libraries: what is gone from the free memory.
        peak_bytes: what the largest step takes on top, for its time.
        graph_bytes: what captured graphs take.
    """

    resident_bytes: int
    peak_bytes: int
    graph_bytes: int

    def with_draft(self, draft: MemoryUse) -> MemoryUse:
        """Add a second role, measured after this one: their steps take turns, the rest is there at once."""
        peak = max(self.peak_bytes, draft.peak_bytes)
        return MemoryUse(draft.resident_bytes, peak, self.graph_bytes + draft.graph_bytes)

    def cache_bytes(self, config: EngineConfig, device: torch.device, free_bytes: int, workspace_bytes: int) -> int:
        """Return the bytes for caches and workspace.

        Args:
            config: names the memory, or the share of what was free.
            device: for messages.
            free_bytes: free before anything was loaded.
            workspace_bytes: scratch memory that the plan takes off itself; it is part of the peak.
        """
        limit, _ = memory_limit_bytes(config, device, free_bytes)
        return limit - self.resident_bytes - max(0, self.peak_bytes - workspace_bytes) - self.graph_bytes


def largest_steps(max_num_seqs: int, max_num_tokens: int, max_model_len: int) -> list[list[int]]:
    """Lengths of the rows of the steps that take most: one long chunk, and as many rows as give tokens.

    Args:
        max_num_seqs: most rows.
        max_num_tokens: most tokens.
        max_model_len: most tokens of a row, one of them generated.
    """
    rows = min(max_num_seqs, max_num_tokens)
    share, rest = divmod(max_num_tokens, rows)
    longest = max(1, max_model_len - 1)
    return [[min(max_num_tokens, longest)], [min(longest, share + (row < rest)) for row in range(rows)]]


def measure_memory(
    bound: BoundModel, plan: CachePlan, limits: SchedulerLimits, free_bytes: int, *, captured: bool = True
) -> MemoryUse:
    """Run the largest steps and capture two graphs, over caches of one block and one group.

    Args:
        bound: the model, on a CUDA device.
        plan: says the block size; its counts are not used.
        limits: of a step.
        free_bytes: free before anything was loaded.
        captured: whether decode steps will be captured, where they can be.
    """
    device = bound.inspection.device
    smallest = replace(plan, num_blocks=1, num_groups=min(1, plan.num_groups), num_checkpoints=0)
    rows = RunningRows(limits.max_num_seqs, limits.max_model_len, plan.block_size)
    runner = bound.make_runner(smallest, limits, rows)
    _release()
    resident = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    params = SamplingParams(temperature=1.0, top_p=0.95)
    for lengths in largest_steps(limits.max_num_seqs, limits.max_num_batched_tokens, bound.inspection.max_model_len):
        with bound.probe_batch(rows, lengths, params) as batch:
            runner.run(batch)
    peak = torch.cuda.max_memory_allocated(device) - resident
    _release()
    shapes = sorted(bound.step_shapes(limits) if captured else [], key=lambda shape: -shape.num_tokens)
    graph_bytes = 0
    for count, some in ((1, shapes[:1]), (len(shapes) - 1, shapes[-1:])):
        if count > 0:
            graph_bytes += count * bound.capture(runner, some).num_bytes
    del runner
    _release()
    use = MemoryUse(free_bytes - available_bytes(device), peak, graph_bytes)
    _log.info(
        "weights and libraries take %s, the largest step %s more, %d graphs about %s",
        format_bytes(use.resident_bytes),
        format_bytes(use.peak_bytes),
        len(shapes),
        format_bytes(use.graph_bytes),
    )
    return use


def _release() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
