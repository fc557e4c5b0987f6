"""StateMover: fills and copies the slots of per-request state, always between two forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from atom_core.engine.batch_builder import StateLayout
from atom_core.plugin import Rewind

if TYPE_CHECKING:
    from atom_core.cache.tensors import CacheTensors
    from atom_core.engine.scheduled_batch import CheckpointSave, Fork
    from atom_core.engine.sequence import Sequence as TokenSequence

__all__ = ["StateMover"]


class StateMover:
    """Gives leased groups their state and keeps checkpoints of it.

    Args:
        caches: the tensors.
        layouts: by plugin with state.
        num_groups: groups of every plugin; checkpoints lie behind them.

    Attributes:
        caches: the tensors.
    """

    def __init__(self, caches: CacheTensors, layouts: Mapping[str, StateLayout], num_groups: int) -> None:
        self.caches = caches
        self._layouts = dict(layouts)
        self._slots_per_req = {plugin: layout.slots_per_req for plugin, layout in layouts.items()}
        self._num_groups = num_groups

    def prepare(self, leased: Sequence[TokenSequence]) -> None:
        """Give newly leased groups their checkpoints or initial values, before the first forward that reads them."""
        if not leased or not self._layouts:
            return
        fresh = [seq.per_req_cache_group for seq in leased if seq.restore_checkpoint is None]
        restored = [seq for seq in leased if seq.restore_checkpoint is not None]
        if fresh:
            self.caches.initialize_slots(
                {
                    plugin: [group * count + offset for group in fresh for offset in range(count)]
                    for plugin, count in self._slots_per_req.items()
                }
            )
        if restored:
            self.caches.copy_slots(
                {
                    plugin: (
                        [self._checkpoint_slot(count, seq.restore_checkpoint) for seq in restored],
                        [seq.per_req_cache_group * count for seq in restored],
                    )
                    for plugin, count in self._slots_per_req.items()
                }
            )

    def fork(self, forks: Sequence[Fork]) -> None:
        """Copy partial blocks and states for samples that part, behind the forward that made them."""
        copies = [fork.blocks for fork in forks if fork.blocks is not None]
        if copies:
            sources, destinations = zip(*copies, strict=True)
            self.caches.copy_blocks(sources, destinations)
        parted = [fork for fork in forks if fork.new_group >= 0]
        if parted and self._layouts:
            self.caches.copy_slots(
                {
                    plugin: ([fork.group * count for fork in parted], [fork.new_group * count for fork in parted])
                    for plugin, count in self._slots_per_req.items()
                }
            )

    def save(self, saves: Sequence[CheckpointSave]) -> None:
        """Copy states into their checkpoints, behind the forward that made them and before the next."""
        if not saves or not self._layouts:
            return
        self.caches.copy_slots(
            {
                plugin: (
                    [
                        save.group * layout.slots_per_req + (save.token if layout.rewind is Rewind.SLOTS else 0)
                        for save in saves
                    ],
                    [self._checkpoint_slot(layout.slots_per_req, save.checkpoint_id) for save in saves],
                )
                for plugin, layout in self._layouts.items()
            }
        )

    def _checkpoint_slot(self, slots_per_req: int, checkpoint_id: int | None) -> int:
        assert checkpoint_id is not None, "only a checkpoint has a slot"
        return self._num_groups * slots_per_req + checkpoint_id
