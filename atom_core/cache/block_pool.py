"""BlockPool: every block is exactly one of free, cached (published, unreferenced) and owned."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from atom_core.cache.prefix import Parent, PrefixIndex, PrefixNode
from atom_core.errors import EngineError

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks with reference counts; published ones stay findable until their memory is needed.

    Args:
        num_blocks: blocks in all.
        index: where published blocks are found.
        on_withdrawn: told of every node that leaves the index.

    Attributes:
        version: changes whenever anything changes.
        num_gains: grows by one with every event after which an unchanged request may need one block less, or one
            block more may be had: a block released, or a block taking over another's content. New content in the
            index is not counted.
        num_evictions: cached blocks whose memory was reused.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex, on_withdrawn: Callable[[PrefixNode], None]) -> None:
        self.version = 0
        self.num_gains = 0
        self.num_evictions = 0
        self._num_blocks = num_blocks
        self._index = index
        self._on_withdrawn = on_withdrawn
        self._ref_counts = [0] * num_blocks
        self._nodes: list[PrefixNode | None] = [None] * num_blocks
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, PrefixNode] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Published blocks that nobody references."""
        return len(self._cached)

    def count_cached(self, nodes: Sequence[PrefixNode]) -> int:
        """How many of these nodes' blocks nobody references."""
        cached = self._cached
        return sum(1 for node in nodes if node.block_id in cached) if cached else 0

    def take(self, count: int) -> list[int]:
        """Own `count` blocks of no particular content, free ones first, then the least recently used cached ones."""
        assert count <= self.num_free, f"{count} blocks taken of {self.num_free}"
        self.version += 1
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                block_id = self._free.popleft()
            else:
                block_id, node = self._cached.popitem(last=False)
                self._forget(node)
                self.num_evictions += 1
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, nodes: Sequence[PrefixNode]) -> list[int]:
        """Reference the blocks of published nodes; returns their ids."""
        self.version += 1
        shared = [node.block_id for node in nodes]
        for block_id in shared:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1
        return shared

    def hold(self, block_ids: Sequence[int]) -> list[int]:
        """Reference blocks that others hold; returns them."""
        self.version += 1
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is held by nobody"
            self._ref_counts[block_id] += 1
        return list(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block; of equally old cached blocks the last is evicted first."""
        self.version += 1
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self.num_gains += 1
                node = self._nodes[block_id]
                if node is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = node

    def publish(self, block_hash: bytes, token_bytes: bytes, parent: Parent, block_id: int) -> PrefixNode | None:
        """Make an owned block findable by its content.

        If the content is published already, an unreferenced older copy gives way to this block; a referenced one
        stays, and this block remains unpublished.

        Args:
            block_hash: the chained hash.
            token_bytes: the block's token ids, int32.
            parent: the node of the block before, or the cache salt.
            block_id: the block.

        Returns:
            The node of this content, or `None` when other content is published under the same hash.
        """
        self.version += 1
        existing = self._index.find(block_hash)
        if existing is not None and existing.orphaned:
            self._withdraw(existing)
            existing = None
        if existing is None:
            node = PrefixNode(block_hash, token_bytes, parent, block_id)
            self._index.insert(node)
            self._nodes[block_id] = node
            return node
        if existing.parent != parent or existing.token_bytes != token_bytes:
            return None
        if existing.block_id in self._cached:
            del self._cached[existing.block_id]
            self._nodes[existing.block_id] = None
            self._free.append(existing.block_id)
            existing.block_id = block_id
            self._nodes[block_id] = existing
            self.num_gains += 1
        return existing

    def check(self, references: Mapping[int, int]) -> None:
        """Verify that every block is exactly one of free, cached and owned.

        Args:
            references: by block, how many holders there are; blocks without any may be left out.

        Raises:
            EngineError: an invariant does not hold.
        """
        free = set(self._free)
        _require(len(free) == len(self._free), "a block is free twice")
        for block_id in range(self._num_blocks):
            node, count = self._nodes[block_id], self._ref_counts[block_id]
            _require(count == references.get(block_id, 0), f"block {block_id} counts {count} references")
            states = (block_id in free, block_id in self._cached, count > 0)
            _require(sum(states) == 1, f"block {block_id} is (free, cached, owned) = {states}")
            _require(node is None or block_id not in free, f"free block {block_id} is published")
            _require(node is not None or block_id not in self._cached, f"cached block {block_id} is not published")
            if node is not None:
                _require(node.alive and node.block_id == block_id, f"block {block_id} has a node of another block")
                _require(self._index.find(node.block_hash) is node, f"block {block_id} cannot be found by its hash")
        _require(len(self._index) == sum(node is not None for node in self._nodes), "the index holds a stray node")

    def _withdraw(self, node: PrefixNode) -> None:
        self.num_gains += 1
        if self._cached.pop(node.block_id, None) is not None:
            self._free.append(node.block_id)
        self._forget(node)

    def _forget(self, node: PrefixNode) -> None:
        self._nodes[node.block_id] = None
        self._index.remove(node)
        self._on_withdrawn(node)


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise EngineError(f"the block pool is inconsistent: {problem}")
