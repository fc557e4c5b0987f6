"""BlockManager: which blocks and which group each sequence holds, and what it shares with others."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from atom_core.cache.block_pool import BlockPool
from atom_core.cache.cached_sequence import CachedSequence, Lookup, Track
from atom_core.cache.checkpoint_policy import CheckpointPolicy
from atom_core.cache.prefix import HashFunction, PrefixIndex, PrefixNode
from atom_core.cache.state_pool import StatePool
from atom_core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atom_core.cache.config import CacheConfig

__all__ = ["BlockManager", "CachedSequence"]

_MAX_WAITING_TRACKS = 64


class BlockManager:
    """Blocks and groups of all sequences, with a prefix cache.

    Args:
        config: counts and sharing options.
        hash_function: instead of xxh3_128; hits are verified, so a bad function costs hits and nothing else.

    Attributes:
        per_req_cache_equiv_blocks: blocks charged per stateful sequence.
        per_req_cache_accounting: by id of each stateful sequence, the blocks charged for its state.
        states: groups and checkpoints.
    """

    def __init__(self, config: CacheConfig, *, hash_function: HashFunction | None = None) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.per_req_cache_equiv_blocks = config.per_req_cache_equiv_blocks
        self.per_req_cache_accounting: dict[int, list[int]] = {}
        self._max_model_len = config.max_model_len
        self._caching = config.enable_prefix_caching and config.prefix_cacheable
        self.states = StatePool(config.num_per_req_cache_groups, config.num_checkpoints if self._caching else 0)
        self._index = PrefixIndex(config.block_size, hash_function)
        self._pool = BlockPool(config.num_blocks, self._index, on_withdrawn=self.states.forget)
        self._running: dict[int, Track] = {}
        self._waiting: OrderedDict[int, Track] = OrderedDict()
        self._policy = CheckpointPolicy(config.block_size, config.checkpoint_interval)
        self._query_tokens = 0
        self._hit_tokens = 0

    @property
    def free_per_req_cache_groups(self) -> list[int]:
        """Groups that no sequence leases."""
        return self.states.free_groups

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: free ones and unreferenced cached ones."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Published blocks that nobody references."""
        return self._pool.num_cached

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold, those charged for state included."""
        return self.num_blocks - self._pool.num_free

    def stats(self) -> dict[str, int]:
        """Counts since the start (tokens asked for and found, evictions) and now (blocks, groups, checkpoints)."""
        return {
            "query_tokens": self._query_tokens,
            "hit_tokens": self._hit_tokens,
            "evicted_blocks": self._pool.num_evictions,
            "free_blocks": self.num_free_blocks,
            "cached_blocks": self.num_cached_blocks,
            "used_blocks": self.num_used_blocks,
            "free_groups": len(self.states.free_groups),
            **self.states.stats(),
        }

    def can_never_allocate(self, num_tokens: int, stateful: bool) -> str | None:
        """Say why a request of this many tokens, prompt and output, cannot run even alone; `None` if it can."""
        if num_tokens > self._max_model_len:
            return f"{num_tokens} tokens are more than max_model_len {self._max_model_len}"
        if stateful and not self.states.num_groups:
            return "it needs per-request state, and the cache was planned without any"
        charged = self.per_req_cache_equiv_blocks if stateful else 0
        needed = self._blocks_of(num_tokens) + charged
        if needed > self.num_blocks:
            state = f" ({charged} of them for its state)" if charged else ""
            return f"{num_tokens} tokens need {needed} blocks{state}, and the cache has {self.num_blocks}"
        return None

    def can_allocate(self, seq: CachedSequence, reserve_blocks: int = 0) -> bool:
        """Whether `allocate` would succeed and leave `reserve_blocks` free; changes nothing.

        A repeated refusal takes constant time until enough blocks were released to make another answer possible.
        """
        if seq.has_per_req_cache and not self.states.free_groups:
            return False
        track = self._track(seq)
        return self._most_slack_blocks(track) >= reserve_blocks and self._look_up(track).slack_blocks >= reserve_blocks

    def allocate(self, seq: CachedSequence) -> None:
        """Give a sequence the blocks of all its known tokens, shared as far as possible, and a group if it needs one.

        At least one token is left to compute. Afterwards the group's first slot must be filled, with the checkpoint
        `seq.restore_checkpoint` (then call `restored`) or with initial values.

        Raises:
            EngineError: `can_allocate` is false, or the sequence is allocated already; nothing has changed.
        """
        if seq.id in self._running:
            raise EngineError(f"sequence {seq.id} is allocated already; deallocate it first")
        if not self.can_allocate(seq):
            raise EngineError(f"sequence {seq.id} does not fit the cache now; ask can_allocate first")
        track = self._track(seq)
        lookup = self._look_up(track)
        num_shared = len(lookup.shared)
        seq.block_table = self._pool.share(lookup.shared) + self._pool.take(lookup.num_new_blocks)
        seq.num_computed_tokens = seq.num_cached_tokens = num_shared * self.block_size
        seq.restore_checkpoint = lookup.checkpoint_id
        if lookup.checkpoint_id is not None:
            self.states.pin(lookup.checkpoint_id)
        if seq.has_per_req_cache:
            seq.per_req_cache_group = self.states.lease()
            self.per_req_cache_accounting[seq.id] = self._pool.take(self.per_req_cache_equiv_blocks)
        if lookup.num_found_blocks > num_shared:
            self._policy.remember_refused(track.hashes[lookup.num_found_blocks - 1])
        track.lookup = None
        track.num_published_blocks = num_shared
        track.tail = lookup.shared[-1] if lookup.shared else seq.cache_salt
        track.prompt_boundary_tokens = (seq.num_tokens - 1) // self.block_size * self.block_size
        self._waiting.pop(seq.id, None)
        self._running[seq.id] = track
        self._query_tokens += seq.num_tokens
        self._hit_tokens += seq.num_cached_tokens

    def fork(self, seq: CachedSequence, other: CachedSequence) -> tuple[int, int] | None:
        """Give `other` what `seq` has computed: its full blocks, a block for the rest, and a group if it needs one.

        Call it after `publish`. Copy the partial block and the state behind the step that made them.

        Args:
            seq: allocated, its prompt computed.
            other: begins with the same tokens; not allocated.

        Returns:
            The partial block and the block that takes its copy, `None` where `seq` fills its blocks.

        Raises:
            EngineError: `can_fork` is false; nothing has changed.
        """
        if not self.can_fork(seq):
            raise EngineError(f"sequence {other.id} does not fit the cache now; ask can_fork first")
        num_full, rest = divmod(seq.num_computed_tokens, self.block_size)
        blocks = (seq.block_table[num_full], self._pool.take(1)[0]) if rest else None
        other.block_table = self._pool.hold(seq.block_table[:num_full]) + ([blocks[1]] if blocks else [])
        other.num_computed_tokens, other.num_cached_tokens = seq.num_computed_tokens, seq.num_cached_tokens
        other.restore_checkpoint = None
        if other.has_per_req_cache:
            other.per_req_cache_group = self.states.lease()
            self.per_req_cache_accounting[other.id] = self._pool.take(self.per_req_cache_equiv_blocks)
        track = self._running[seq.id]
        self._waiting.pop(other.id, None)
        self._running[other.id] = replace(track, seq=other, hashes=list(track.hashes))
        return blocks

    def can_fork(self, seq: CachedSequence) -> bool:
        """Whether `fork` would succeed; changes nothing."""
        charged = self.per_req_cache_equiv_blocks if seq.has_per_req_cache else 0
        needed = charged + bool(seq.num_computed_tokens % self.block_size)
        return needed <= self._pool.num_free and (bool(self.states.free_groups) or not seq.has_per_req_cache)

    def can_append(self, seq: CachedSequence, num_tokens: int) -> bool:
        """Whether the block table can grow to hold `num_tokens` tokens in all; changes nothing."""
        missing_tokens = num_tokens - len(seq.block_table) * self.block_size
        return missing_tokens <= 0 or self._blocks_of(missing_tokens) <= self._pool.num_free

    def append(self, seq: CachedSequence, num_tokens: int) -> bool:
        """Grow the block table to hold `num_tokens` tokens in all; false, with nothing changed, if it cannot."""
        missing_tokens = num_tokens - len(seq.block_table) * self.block_size
        if missing_tokens <= 0:
            return True
        missing_blocks = self._blocks_of(missing_tokens)
        if missing_blocks > self._pool.num_free:
            return False
        seq.block_table.extend(self._pool.take(missing_blocks))
        return True

    def append_all(self, seqs: Sequence[CachedSequence], nums_tokens: Sequence[int]) -> bool:
        """Grow the block tables of sequences that lack blocks; false, with nothing changed, if not all can."""
        missing = [
            self._blocks_of(num_tokens) - len(seq.block_table)
            for seq, num_tokens in zip(seqs, nums_tokens, strict=True)
        ]
        if sum(missing) > self._pool.num_free:
            return False
        taken = iter(self._pool.take(sum(missing)))
        for seq, count in zip(seqs, missing, strict=True):
            seq.block_table.extend(islice(taken, count))
        return True

    def publish(self, seq: CachedSequence, num_computed_tokens: int) -> None:
        """Let others share each block whose last token is among the first `num_computed_tokens`.

        Call it once the step that computes these tokens is enqueued. Tokens that are not known yet are left out.
        """
        if not self._caching:
            return
        track = self._running[seq.id]
        first = track.num_published_blocks
        last = num_computed_tokens // self.block_size
        if last <= first or not track.publishable:
            return
        last = min(last, seq.num_tokens // self.block_size)
        chunks = self._index.extend(track.hashes, seq.token_ids, seq.cache_salt, first, last)
        for index, token_bytes in enumerate(chunks, start=first):
            parent = track.tail
            node = None
            if not (isinstance(parent, PrefixNode) and not parent.alive):
                node = self._pool.publish(track.hashes[index], token_bytes, parent, seq.block_table[index])
            if node is None:
                track.publishable = False
                return
            track.tail = node
            track.num_published_blocks = index + 1

    def deallocate(self, seq: CachedSequence) -> None:
        """Take everything back from a sequence, finished, preempted or given up; nothing if it holds nothing.

        Published blocks stay findable, and those at the start of the sequence longest.
        """
        self._waiting.pop(seq.id, None)
        if self._running.pop(seq.id, None) is None:
            return
        self._pool.release(seq.block_table)
        seq.block_table = []
        seq.num_computed_tokens = 0
        if seq.restore_checkpoint is not None:
            self.states.unpin(seq.restore_checkpoint, restored=False)
            seq.restore_checkpoint = None
        if seq.has_per_req_cache:
            self._pool.release(self.per_req_cache_accounting.pop(seq.id))
            self.states.release(seq.per_req_cache_group)
            seq.per_req_cache_group = -1

    def restored(self, seq: CachedSequence) -> None:
        """Unpin a sequence's checkpoint; its copy into the group's first slot is enqueued."""
        assert seq.restore_checkpoint is not None, f"sequence {seq.id} has no checkpoint to restore"
        self.states.unpin(seq.restore_checkpoint, restored=True)
        seq.restore_checkpoint = None

    def next_boundary(self, seq: CachedSequence, start: int, end: int) -> int:
        """Where to end a prefill chunk of tokens `start` to `end`: the first boundary worth a checkpoint, or `end`."""
        if not self.states.num_checkpoints or not seq.has_per_req_cache:
            return end
        return self._policy.next_boundary(self._running[seq.id], start, end)

    def may_keep_state(self, start: int, end: int) -> bool:
        """Whether any state that decoding makes after `start + 1 .. end` tokens may be worth a checkpoint; quick."""
        return self.states.num_checkpoints > 0 and self._policy.may_pass_boundary(start, end)

    def keeps_state(self, seq: CachedSequence, num_computed_tokens: int) -> bool:
        """Whether a regular checkpoint is due after so many tokens."""
        return (
            seq.has_per_req_cache
            and self.states.num_checkpoints > 0
            and self._policy.is_regular_boundary(num_computed_tokens)
        )

    def take_checkpoint(self, seq: CachedSequence, num_computed_tokens: int) -> int | None:
        """Reserve a checkpoint for the state after exactly `num_computed_tokens` tokens, which a slot now holds.

        Publishes the blocks up to there. Copy the slot's state behind the step that made it, then call
        `states.publish_checkpoint`.

        Returns:
            The checkpoint to copy into, or `None` if none is worth taking here, exists already, or can be had.
        """
        if not self.states.num_checkpoints or not seq.has_per_req_cache:
            return None
        track = self._running[seq.id]
        num_blocks, rest = divmod(num_computed_tokens, self.block_size)
        if rest or not num_blocks:
            return None
        self.publish(seq, num_computed_tokens)
        tail = track.tail
        if track.num_published_blocks != num_blocks or not isinstance(tail, PrefixNode) or not tail.alive:
            return None
        if not self._policy.is_boundary(track, num_computed_tokens):
            return None
        self._policy.forget_refused(tail.block_hash)
        return self.states.reserve_checkpoint(tail)

    def check(self) -> None:
        """Verify that every block and every group is exactly one of free, cached and owned.

        Raises:
            EngineError: an invariant does not hold.
        """
        references: Counter[int] = Counter()
        for track in self._running.values():
            references.update(track.seq.block_table)
        for charged in self.per_req_cache_accounting.values():
            references.update(charged)
        self._pool.check(references)
        self.states.check()

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _track(self, seq: CachedSequence) -> Track:
        track = self._waiting.get(seq.id)
        if track is None or track.seq is not seq:
            track = self._waiting[seq.id] = Track(seq)
            if len(self._waiting) > _MAX_WAITING_TRACKS:
                self._waiting.popitem(last=False)
        return track

    def _most_slack_blocks(self, track: Track) -> int:
        """Bound the slack of a new lookup from the last one: only gains and longer prefixes can raise it."""
        last = track.lookup
        if last is None or last.num_tokens != track.seq.num_tokens or last.state_version != self.states.version:
            return sys.maxsize
        if last.next_hash is not None and last.next_hash in self._index:
            return sys.maxsize
        return last.slack_blocks + self._pool.num_gains - last.num_gains

    def _look_up(self, track: Track) -> Lookup:
        seq, last = track.seq, track.lookup
        version = self._pool.version + self.states.version
        if last is not None and last.version == version and last.num_tokens == seq.num_tokens:
            return last
        found: list[PrefixNode] = []
        checkpoint_id = next_hash = None
        if self._caching and seq.use_prefix_cache and (self.states.num_checkpoints or not seq.has_per_req_cache):
            max_blocks = (seq.num_tokens - 1) // self.block_size
            found = self._index.match(track.hashes, seq.token_ids, seq.cache_salt, max_blocks)
            next_hash = track.hashes[len(found)] if len(found) < max_blocks else None
        shared = found
        if seq.has_per_req_cache:
            num_restored, checkpoint_id = self.states.find_checkpoint(found) or (0, None)
            shared = found[:num_restored]
            next_hash = None  # a longer prefix is of no use before a new checkpoint, which changes the version
        num_new = self._blocks_of(seq.num_tokens) - len(shared)
        charged = self.per_req_cache_equiv_blocks if seq.has_per_req_cache else 0
        num_free = self._pool.num_free - self._pool.count_cached(shared)
        track.lookup = Lookup(
            version=version,
            state_version=self.states.version,
            num_gains=self._pool.num_gains,
            num_tokens=seq.num_tokens,
            shared=shared,
            checkpoint_id=checkpoint_id,
            num_found_blocks=len(found),
            next_hash=next_hash,
            num_new_blocks=num_new,
            slack_blocks=num_free - num_new - charged,
        )
        return track.lookup
