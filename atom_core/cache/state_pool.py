"""StatePool: groups leased to requests, and checkpoints of their state by content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from atom_core.errors import EngineError

__all__ = ["StatePool"]


class StatePool:
    """Who holds which group and what each checkpoint is of.

    A checkpoint is free, being written, or published; published ones can be found, and are evicted least recently
    used first unless pinned. Its key stands for a whole verified prefix; the manager uses its prefix nodes.

    Args:
        num_groups: groups in all.
        num_checkpoints: checkpoints in all.

    Attributes:
        free_groups: groups that nobody leases.
        version: changes whenever a lookup may find more than before.
        num_evictions: checkpoints overwritten by others.
        num_restores: checkpoints copied into a request's slot.
    """

    def __init__(self, num_groups: int, num_checkpoints: int) -> None:
        self.num_groups = num_groups
        self.num_checkpoints = num_checkpoints
        self.free_groups = list(range(num_groups))
        self.version = 0
        self.num_evictions = 0
        self.num_restores = 0
        self._leased: set[int] = set()
        self._free = list(range(num_checkpoints))
        self._by_key: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        self._writing: set[int] = set()
        self._pins: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # published and unpinned, least recently used first

    def lease(self) -> int:
        """Take a free group.

        Raises:
            EngineError: none is free.
        """
        if not self.free_groups:
            raise EngineError(f"all {self.num_groups} groups are leased; ask can_allocate first")
        group = self.free_groups.pop()
        self._leased.add(group)
        return group

    def release(self, group: int) -> None:
        """Give a leased group back.

        Raises:
            EngineError: the group is not leased.
        """
        if group not in self._leased:
            raise EngineError(f"group {group} is released but not leased")
        self._leased.remove(group)
        self.free_groups.append(group)

    def find_checkpoint(self, keys: Sequence[Hashable]) -> tuple[int, int] | None:
        """Find the published checkpoint of the longest prefix.

        Args:
            keys: of the prefixes of 1, 2, ... blocks.

        Returns:
            Blocks of the prefix and the checkpoint, or `None`.
        """
        if not self._by_key:
            return None
        for num_blocks in range(len(keys), 0, -1):
            checkpoint_id = self._by_key.get(keys[num_blocks - 1])
            if checkpoint_id is not None and checkpoint_id not in self._writing:
                return num_blocks, checkpoint_id
        return None

    def reserve_checkpoint(self, key: Hashable) -> int | None:
        """Take a checkpoint to write a state into, free or least recently used.

        Args:
            key: of the prefix that the state is after.

        Returns:
            The checkpoint, or `None` when there is one of this prefix or all are pinned or being written.
        """
        known = self._by_key.get(key)
        if known is not None:
            if known in self._evictable:
                self._evictable.move_to_end(known)
            return None
        if self._free:
            checkpoint_id = self._free.pop()
        elif self._evictable:
            checkpoint_id, _ = self._evictable.popitem(last=False)
            del self._by_key[self._key_of.pop(checkpoint_id)]
            self.num_evictions += 1
        else:
            return None
        self._by_key[key] = checkpoint_id
        self._key_of[checkpoint_id] = key
        self._writing.add(checkpoint_id)
        return checkpoint_id

    def publish_checkpoint(self, checkpoint_id: int) -> None:
        """Let a reserved checkpoint be found; its copy is enqueued behind the step that made the state.

        Raises:
            EngineError: the checkpoint is not being written.
        """
        if checkpoint_id not in self._writing:
            raise EngineError(f"checkpoint {checkpoint_id} is published but was not reserved")
        self._writing.remove(checkpoint_id)
        self.version += 1
        self._settle(checkpoint_id)

    def pin(self, checkpoint_id: int) -> None:
        """Keep a published checkpoint from being overwritten until it is unpinned as often as it was pinned."""
        if checkpoint_id not in self._key_of or checkpoint_id in self._writing:
            raise EngineError(f"checkpoint {checkpoint_id} is pinned but not published")
        self._pins[checkpoint_id] = self._pins.get(checkpoint_id, 0) + 1
        self._evictable.pop(checkpoint_id, None)

    def unpin(self, checkpoint_id: int, *, restored: bool) -> None:
        """Drop one pin.

        Args:
            checkpoint_id: a pinned checkpoint.
            restored: its copy into a request's slot is enqueued; otherwise the request gave up.
        """
        if checkpoint_id not in self._pins:
            raise EngineError(f"checkpoint {checkpoint_id} is unpinned but not pinned")
        self.num_restores += restored
        self._pins[checkpoint_id] -= 1
        if self._pins[checkpoint_id] == 0:
            del self._pins[checkpoint_id]
            self._settle(checkpoint_id)

    def forget(self, key: Hashable) -> None:
        """Drop the checkpoint of a prefix that can no longer be found; a pinned one lives on until it is unpinned."""
        checkpoint_id = self._by_key.pop(key, None)
        if checkpoint_id is None:
            return
        del self._key_of[checkpoint_id]
        if checkpoint_id in self._evictable:
            del self._evictable[checkpoint_id]
            self._free.append(checkpoint_id)

    def stats(self) -> dict[str, int]:
        """Checkpoints kept now, and evicted and restored so far."""
        return {
            "checkpoints_kept": len(self._by_key) - len(self._writing & self._key_of.keys()),
            "checkpoints_evicted": self.num_evictions,
            "checkpoints_restored": self.num_restores,
        }

    def check(self) -> None:
        """Verify that every group is free or leased and every checkpoint in exactly one state.

        Raises:
            EngineError: an invariant does not hold.
        """
        groups = sorted([*self.free_groups, *self._leased])
        if groups != list(range(self.num_groups)):
            raise EngineError(f"groups are not each free or leased exactly once: {groups}")
        states = sorted([*self._free, *self._writing, *self._pins, *self._evictable])
        if states != list(range(self.num_checkpoints)):
            raise EngineError(f"checkpoints are not each free, being written, pinned or evictable: {states}")
        if {key: checkpoint_id for checkpoint_id, key in self._key_of.items()} != self._by_key:
            raise EngineError("checkpoints and their keys disagree")
        if any(checkpoint_id not in self._key_of for checkpoint_id in self._evictable):
            raise EngineError("an evictable checkpoint has no key")

    def _settle(self, checkpoint_id: int) -> None:
        """Put a checkpoint that is neither written nor pinned where it belongs."""
        if checkpoint_id in self._key_of:
            self._evictable[checkpoint_id] = None
        else:
            self._free.append(checkpoint_id)
