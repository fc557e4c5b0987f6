"""CachedSequence: what the manager reads and writes of a sequence, and what it keeps of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from atom_core.cache.prefix import Parent, PrefixNode

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["CachedSequence", "Lookup", "Track"]


class CachedSequence(Protocol):
    """What the manager reads and writes of a sequence.

    Attributes:
        num_computed_tokens: tokens whose keys, values and state are in the cache; set at allocation.
        num_cached_tokens: tokens found in the cache at allocation; set there.
        block_table: blocks in token order; set at allocation.
        per_req_cache_group: leased group, -1 when none; set at allocation.
        restore_checkpoint: checkpoint to copy into the group's first slot before the first forward, `None` to
            write initial values; set at allocation, pinned until `restored`.
    """

    num_computed_tokens: int
    num_cached_tokens: int
    block_table: list[int]
    per_req_cache_group: int
    restore_checkpoint: int | None

    @property
    def id(self) -> int:
        """Unique among living sequences."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """[num_tokens or more] int32, prompt and output; known tokens never change."""

    @property
    def num_tokens(self) -> int:
        """Known tokens."""

    @property
    def has_per_req_cache(self) -> bool:
        """Whether the request needs a group."""

    @property
    def use_prefix_cache(self) -> bool:
        """Whether the sequence may start from cached blocks; its own are published either way."""

    @property
    def cache_salt(self) -> str | None:
        """Sequences share blocks only with those of equal salt."""


@dataclass(slots=True)
class Lookup:
    """What a sequence would share if it were allocated now, and until when that is true.

    Attributes:
        version: the pools' version that this is true of.
        state_version: the state pool's version.
        num_gains: the block pool's gains so far.
        num_tokens: the sequence's known tokens.
        shared: nodes of the blocks to share.
        checkpoint_id: the checkpoint to restore.
        num_found_blocks: blocks whose keys and values are cached; more than shared where no checkpoint reaches as far.
        next_hash: hash of the first block that was not found, if sharing it would help.
        num_new_blocks: blocks of its table to take.
        slack_blocks: free blocks that would be left; negative if it does not fit.
    """

    version: int
    state_version: int
    num_gains: int
    num_tokens: int
    shared: list[PrefixNode]
    checkpoint_id: int | None
    num_found_blocks: int
    next_hash: bytes | None
    num_new_blocks: int
    slack_blocks: int


@dataclass(slots=True)
class Track:
    """What the manager keeps of one sequence.

    Attributes:
        seq: the sequence.
        hashes: chained hashes of its first blocks, as far as they were needed.
        lookup: the last lookup while it waits.
        num_published_blocks: leading blocks of its table that are published, its own or another's.
        tail: the node of the last of these; the cache salt before the first.
        publishable: false once a block could not be linked to the chain.
        prompt_boundary_tokens: the last block boundary before the last token known at allocation.
    """

    seq: CachedSequence
    hashes: list[bytes] = field(default_factory=list)
    lookup: Lookup | None = None
    num_published_blocks: int = 0
    tail: Parent = None
    publishable: bool = True
    prompt_boundary_tokens: int = 0
