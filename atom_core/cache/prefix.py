"""Chained block hashes, and the index of published blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import xxhash

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["HashFunction", "Parent", "PrefixIndex", "PrefixNode"]

HashFunction: TypeAlias = Callable[[bytes], bytes]

_TOKEN_BYTES = 4


@dataclass(eq=False, slots=True)
class PrefixNode:
    """The content of one published block: its tokens, behind everything that its parent stands for.

    Identity is content: two equal prefixes share a node, and two nodes that are both alive differ in content. A
    verified parent therefore verifies the whole prefix, whatever the hash function does.

    Attributes:
        block_hash: the chained hash that the index finds the node by.
        token_bytes: the block's token ids, int32.
        parent: the node of the block before, or the cache salt at the start of a sequence.
        block_id: the block that holds the content.
        alive: the node is in the index. What follows a dead parent can never be found again.
    """

    block_hash: bytes
    token_bytes: bytes
    parent: Parent
    block_id: int
    alive: bool = True

    @property
    def orphaned(self) -> bool:
        """Whether the parent has left the index."""
        return isinstance(self.parent, PrefixNode) and not self.parent.alive


Parent: TypeAlias = PrefixNode | str | None


class PrefixIndex:
    """Published blocks by chained hash, at most one per hash and one per block.

    Args:
        block_size: tokens per block.
        hash_function: bytes to a digest of fixed length, xxh3_128 when `None`; a collision costs hits, it never
            gives a wrong one.
    """

    def __init__(self, block_size: int, hash_function: HashFunction | None = None) -> None:
        self._stride = block_size * _TOKEN_BYTES
        self._block_size = block_size
        self._hash: HashFunction = hash_function or xxhash.xxh3_128_digest
        self._nodes: dict[bytes, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._nodes

    def find(self, block_hash: bytes) -> PrefixNode | None:
        """The node under a hash, unverified."""
        return self._nodes.get(block_hash)

    def insert(self, node: PrefixNode) -> None:
        """Make a node findable; nothing else may be under its hash."""
        assert node.block_hash not in self._nodes, "a hash is published once"
        self._nodes[node.block_hash] = node

    def remove(self, node: PrefixNode) -> None:
        """Take a node out for good; its children become orphans."""
        del self._nodes[node.block_hash]
        node.alive = False
        node.parent = None  # a dead node must not keep its ancestors in memory

    def match(
        self, hashes: list[bytes], token_ids: npt.NDArray[np.int32], salt: str | None, max_blocks: int
    ) -> list[PrefixNode]:
        """Find the longest published prefix of whole blocks, verified block by block.

        Args:
            hashes: the sequence's block hashes as far as they are known; extended as far as the search goes.
            token_ids: [num_tokens] int32, at least `max_blocks` blocks of them.
            salt: the sequence's cache salt.
            max_blocks: most blocks to find.

        Returns:
            The nodes, first block first.
        """
        stride, num_known = self._stride, len(hashes)
        find, hash_function = self._nodes.get, self._hash
        previous_hash = self._root(salt)
        previous: PrefixNode | None = None
        found: list[PrefixNode] = []
        data = token_ids[: max_blocks * self._block_size].tobytes()
        for index in range(max_blocks):
            token_bytes = data[index * stride : (index + 1) * stride]
            if index < num_known:
                block_hash = hashes[index]
            else:
                block_hash = hash_function(previous_hash + token_bytes)
                hashes.append(block_hash)
            node = find(block_hash)
            if node is None or node.token_bytes != token_bytes:
                break
            # Identity where it suffices: this loop runs 8,192 times for a prompt of 131,072 tokens.
            if node.parent != salt if previous is None else node.parent is not previous:
                break
            found.append(node)
            previous, previous_hash = node, block_hash
        return found

    def extend(
        self, hashes: list[bytes], token_ids: npt.NDArray[np.int32], salt: str | None, first: int, last: int
    ) -> list[bytes]:
        """Make the hashes of the first `last` blocks known.

        Args:
            hashes: the sequence's block hashes as far as they are known; extended.
            token_ids: [num_tokens] int32, at least `last` blocks of them.
            salt: the sequence's cache salt.
            first: the first block whose bytes are wanted.
            last: the block to stop before.

        Returns:
            Token bytes of the blocks from `first` to `last`.
        """
        start = min(first, len(hashes))
        data = token_ids[start * self._block_size : last * self._block_size].tobytes()
        chunks = [data[offset : offset + self._stride] for offset in range(0, len(data), self._stride)]
        for index in range(len(hashes), last):
            hashes.append(self._hash((hashes[-1] if hashes else self._root(salt)) + chunks[index - start]))
        return chunks[first - start :]

    def _root(self, salt: str | None) -> bytes:
        return b"" if salt is None else self._hash(salt.encode())
