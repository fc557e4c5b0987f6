"""StepGraphs: decode steps padded to a ladder of shapes, each captured once as a CUDA graph and replayed.

A captured step has no Python and no launch cost left. What it reads lies at fixed addresses: the arrays of the batch
builder and the persistent buffers of the plugins, which the host fills before each replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from atom_core.engine.batch_builder import StepInputs, StepShape
from atom_core.errors import KernelError
from atom_core.plugin import GraphSupport

if TYPE_CHECKING:
    from torch import Tensor

    from atom_core.engine.scheduled_batch import ScheduledBatch
    from atom_core.plugin import CacheRequirements

__all__ = ["CaptureCost", "StepGraphs", "ladder", "least_support", "step_shapes"]

_log = logging.getLogger("atom_core")
_ORDER = (GraphSupport.NEVER, GraphSupport.DECODE, GraphSupport.UNIFORM)

Forward = Callable[[StepInputs, Mapping[str, Any]], tuple["Tensor", "Tensor | None"]]
Prepare = Callable[[StepShape], tuple[StepInputs, Mapping[str, Any]]]


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows to capture: few at first, then such that padding is at most half of the rows.

    Args:
        max_num_seqs: the last rung.
    """
    rungs = {1, 2, 4, 8, max_num_seqs}
    rung = 16
    while rung < max_num_seqs:
        rungs.update((rung, rung * 3 // 2))
        rung *= 2
    return tuple(sorted(rung for rung in rungs if rung <= max_num_seqs))


def least_support(requirements: Mapping[str, CacheRequirements]) -> GraphSupport:
    """What every plugin of a model can do."""
    return min((GraphSupport(needs.graph_support) for needs in requirements.values()), key=_ORDER.index)


def step_shapes(support: GraphSupport, max_num_seqs: int, max_num_tokens: int, num_spec_tokens: int) -> list[StepShape]:
    """Shapes to capture.

    Args:
        support: `decode` allows one token a row, `uniform` also a verify step with all its drafts.
        max_num_seqs: most rows.
        max_num_tokens: most tokens of a step; shapes that exceed it never run.
        num_spec_tokens: drafts of a verify step, 0 without speculation.
    """
    if support is GraphSupport.NEVER:
        return []
    lengths = [1]
    if support is GraphSupport.UNIFORM and num_spec_tokens:
        lengths.append(1 + num_spec_tokens)
    shapes = [StepShape(rows, length) for length in lengths for rows in ladder(max_num_seqs)]
    return [shape for shape in shapes if shape.num_tokens <= max_num_tokens]


@dataclass(frozen=True)
class CaptureCost:
    """What capturing took.

    Attributes:
        num_graphs: graphs there are now.
        seconds: time, compilation included.
        num_bytes: device memory that they keep.
    """

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


@dataclass(frozen=True)
class _Captured:
    """One graph, with what it must keep alive.

    Attributes:
        graph: replays the step.
        logits: [num_tokens, vocab_size], where a replay leaves them.
        hidden: [num_tokens, hidden_size], where a replay leaves the last hidden states, if anybody wants them.
        inputs: views of the arrays that it reads.
        metadata: what the layers were captured with.
    """

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    hidden: Tensor | None
    inputs: StepInputs
    metadata: Mapping[str, Any]


class StepGraphs:
    """Runs decode steps in padded shapes.

    Args:
        shapes: the ladder, from `step_shapes`.
        forward: from inputs and metadata to logits [num_tokens, vocab_size], and last hidden states if wanted.
    """

    def __init__(self, shapes: Iterable[StepShape], forward: Forward) -> None:
        self._forward = forward
        self._rungs: dict[int, list[StepShape]] = {}
        for shape in sorted(shapes, key=lambda shape: shape.num_seqs):
            self._rungs.setdefault(shape.tokens_per_seq, []).append(shape)
        self._captured: dict[StepShape, _Captured] = {}
        self._pool: Any = None

    @property
    def shapes(self) -> list[StepShape]:
        """Every shape, the largest first."""
        shapes = [shape for rungs in self._rungs.values() for shape in rungs]
        return sorted(shapes, key=lambda shape: -shape.num_tokens)

    def shape_of(self, scheduled: ScheduledBatch) -> StepShape | None:
        """Return the least shape that a step fits in; `None` where it has chunks, uneven rows or too many."""
        num_seqs = len(scheduled.seqs)
        if scheduled.num_decodes != num_seqs or not num_seqs:
            return None
        length = scheduled.num_new_tokens[0]
        rungs = self._rungs.get(length)
        if rungs is None or num_seqs > rungs[-1].num_seqs or scheduled.num_new_tokens.count(length) != num_seqs:
            return None
        return next(shape for shape in rungs if shape.num_seqs >= num_seqs)

    def run(self, shape: StepShape, inputs: StepInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Compute a padded step, by replay where its shape is captured.

        Returns:
            [num_tokens, vocab_size] logits, and what else `forward` gives; padding included, valid until the next step.
        """
        captured = self._captured.get(shape)
        if captured is None:
            return self._forward(inputs, metadata)
        captured.graph.replay()
        return captured.logits, captured.hidden

    def capture(self, prepare: Prepare, device: torch.device) -> CaptureCost:
        """Capture every shape, the largest first, so that all share its memory.

        A step of padding alone is captured: it reads and writes nothing real, and whatever depends on padding being
        there is in the graph.

        Args:
            prepare: fills the arrays for a step of padding, and asks the plugins for their metadata.
            device: a CUDA device.

        Returns:
            What it took; no graphs where a kernel cannot be captured: the log names it, and steps run eagerly.
        """
        torch.cuda.empty_cache()
        started, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        for shape in self.shapes:
            try:
                self._captured[shape] = self._capture(shape, prepare)
            except KernelError as error:
                _log.warning("decode steps run without graphs: %s", error)
                self._captured.clear()
                self._rungs.clear()
                break
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        taken = max(0, free - torch.cuda.mem_get_info(device)[0])
        return CaptureCost(len(self._captured), time.perf_counter() - started, taken)

    def _capture(self, shape: StepShape, prepare: Prepare) -> _Captured:
        """Run once for compilation and workspaces, then capture with metadata that no step has used."""
        self._forward(*prepare(shape))
        torch.cuda.synchronize()
        inputs, metadata = prepare(shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, hidden = self._forward(inputs, metadata)
        return _Captured(graph, logits, hidden, inputs, metadata)
