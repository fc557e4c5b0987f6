"""ScheduledBatch: what one step computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atom_core.engine.sequence import Sequence

__all__ = ["CheckpointSave", "Fork", "ScheduledBatch"]


@dataclass(frozen=True, slots=True)
class CheckpointSave:
    """One state to keep.

    Attributes:
        checkpoint_id: where to copy it.
        group: the group that made it.
        token: which of its row's tokens the state is after, where each writes a slot of its own; 0 for a chunk.
    """

    checkpoint_id: int
    group: int
    token: int


@dataclass(frozen=True, slots=True)
class Fork:
    """One sample that parts from another behind their prompt.

    Attributes:
        group: the group that holds the state, -1 for none.
        new_group: the group that gets a copy of it.
        blocks: the partial block and the new one that gets a copy of it; `None` where the prompt fills its blocks.
    """

    group: int
    new_group: int
    blocks: tuple[int, int] | None


@dataclass
class ScheduledBatch:
    """The rows of one step: decodes first, then prefill chunks.

    Attributes:
        seqs: the sequences, one per row.
        num_new_tokens: tokens that the row computes, at least 1.
        num_decodes: the first rows, which decode (or verify drafts).
        leased: sequences whose group was leased for this step; their state is to be initialised or restored
            before the forward.
        saves: states to copy behind the forward, before anything else is scheduled; known once its tokens are.
        forks: what to copy behind the forward, before anything else is scheduled; known once its tokens are.
        preempted: sequences that lost their cache while this step was scheduled.
        ahead: for each row, tokens behind the computed ones that this role has computed since the last step, none
            for a chunk; empty where no row has any. A role that drafts runs ahead, and a step that follows.
        follows: the step is launched behind a plain one whose tokens are not known yet.
        samples: whether tokens are to be chosen.
        overtaken: the step behind this one was launched before this one's tokens were known, so that its states are
            overwritten.
    """

    seqs: list[Sequence] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    num_decodes: int = 0
    leased: list[Sequence] = field(default_factory=list)
    saves: list[CheckpointSave] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    follows: bool = False
    samples: bool = True
    overtaken: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.num_new_tokens)

    @property
    def per_req_cache_groups(self) -> list[int]:
        """The group of each row, -1 for a row without state."""
        return [seq.per_req_cache_group for seq in self.seqs]

    def completes(self, row: int) -> bool:
        """Whether the row reaches its last known token, so that its logits give a new one."""
        seq = self.seqs[row]
        return seq.num_computed_tokens + self.num_new_tokens[row] >= seq.num_tokens
