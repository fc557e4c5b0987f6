"""StepPlan: what every MhaLayer needs of a step beyond the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from atom_core.plugin import AttentionBatch

__all__ = ["Run", "RunKind", "StepPlan"]

Key = TypeVar("Key")
Made = TypeVar("Made")


class RunKind(StrEnum):
    """Which op attends for a run of rows; the value is the op's name after `mha.`."""

    DECODE = "decode"
    PREFILL = "prefill"
    PREFILL_PAGED = "prefill_paged"


@dataclass(frozen=True)
class Run:
    """Consecutive rows of the batch that one call of one op serves.

    Attributes:
        kind: the op.
        query_start_loc: [rows + 1] int32, first flat token of each row and the end of the last.
        seq_lens: [rows] int32, keys of each row, its new tokens included.
        block_tables: [rows, max_blocks] int32.
        max_query_len: most tokens of a row.
        max_seq_len: most keys of a row.
        scratch: where kernels keep what depends on the rows and the mask alone, for the other layers of the step.
    """

    kind: RunKind
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    scratch: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepPlan:
    """A step's runs.

    Attributes:
        runs: every row is in exactly one.
        has_padding: there are tokens of no row; their output is zero.
        scratch: like a run's, for what depends on the whole step.
    """

    runs: tuple[Run, ...]
    has_padding: bool
    scratch: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, batch: AttentionBatch) -> StepPlan:
        """Cut a batch into runs: the decodes, then stretches of chunks with and without a cached prefix."""
        runs = []
        if batch.num_decodes:
            bounds = batch.max_decode_query_len, batch.max_seq_len
            runs.append(_run(batch, RunKind.DECODE, 0, batch.num_decodes, *bounds))
        for kind, first, end in _prefill_stretches(batch):
            seq_lens = batch.seq_lens_host[first:end]
            max_query_len = int((seq_lens - batch.num_computed_host[first:end]).max())
            runs.append(_run(batch, kind, first, end, max_query_len, int(seq_lens.max())))
        return cls(tuple(runs), has_padding=int(batch.query_start_loc_host[batch.num_seqs]) < batch.num_tokens)

    def shared(self, key: Key, make: Callable[[Key], Made]) -> Made:
        """Return what `make(key)` gave to the first layer that asked in this step."""
        if key not in self.scratch:
            self.scratch[key] = make(key)
        made: Made = self.scratch[key]
        return made


def _run(batch: AttentionBatch, kind: RunKind, first: int, end: int, max_query_len: int, max_seq_len: int) -> Run:
    return Run(
        kind,
        batch.query_start_loc[first : end + 1],
        batch.seq_lens[first:end],
        batch.block_tables[first:end],
        max_query_len,
        max_seq_len,
    )


def _prefill_stretches(batch: AttentionBatch) -> Iterator[tuple[RunKind, int, int]]:
    if batch.num_decodes == batch.num_seqs:
        return
    has_prefix = batch.num_computed_host[batch.num_decodes : batch.num_seqs] > 0
    changes = np.flatnonzero(np.diff(has_prefix)) + 1
    edges = [0, *changes.tolist(), len(has_prefix)]
    for first, end in pairwise(edges):
        kind = RunKind.PREFILL_PAGED if has_prefix[first] else RunKind.PREFILL
        yield kind, batch.num_decodes + first, batch.num_decodes + end
