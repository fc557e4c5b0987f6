"""Block tables: those of the running sequences as rows of one array, and a step's selection of them."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["BlockTables", "TableCopy"]


class BlockTables:
    """One row per running sequence, to which only new blocks are added.

    The work of a step does not grow with the tokens generated before.

    Args:
        max_num_seqs: rows.
        max_blocks_per_seq: columns.

    Attributes:
        blocks: [max_num_seqs, max_blocks_per_seq] int32; entries past a sequence's blocks mean nothing.
        lengths: [max_num_seqs] int64, blocks of each row.
        versions: [max_num_seqs] int64, changes with the row.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self.blocks: np.ndarray[Any, np.dtype[np.int32]] = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self.lengths: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(max_num_seqs, dtype=np.int64)
        self.versions: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(max_num_seqs, dtype=np.int64)

    def clear(self, row: int) -> None:
        """Forget a row's blocks."""
        self.lengths[row] = 0
        self.versions[row] += 1

    def extend(self, row: int, blocks: list[int]) -> None:
        """Take over the blocks of a row that are not known yet.

        Args:
            row: the row.
            blocks: all of its blocks; those that are known have not changed.
        """
        known, length = int(self.lengths[row]), len(blocks)
        if known != length:
            self.blocks[row, known:length] = blocks[known:]
            self.lengths[row] = length
            self.versions[row] += 1


class TableCopy:
    """Keeps a step's array of block tables up to date, copying only what changed since the same array's last step.

    With 8,192 tokens a row, copying all of 256 rows takes as long as everything else in building a batch.

    Args:
        target: [rows, columns] int32; nobody else writes it, except behind `forget`.
    """

    def __init__(self, target: np.ndarray[Any, Any]) -> None:
        self._target = target
        self._rows = np.full(len(target), -1, dtype=np.int64)
        self._versions = np.zeros(len(target), dtype=np.int64)

    def update(self, tables: BlockTables, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Make the first rows of the target those of the tables.

        Args:
            tables: of all rows.
            rows: which, in order.
        """
        count = len(rows)
        versions = tables.versions[rows]
        stale = np.flatnonzero((self._rows[:count] != rows) | (self._versions[:count] != versions))
        if len(stale):
            changed = rows[stale]
            width = int(tables.lengths[changed].max())
            self._target[stale, :width] = tables.blocks[changed, :width]
            self._rows[:count] = rows
            self._versions[:count] = versions

    def forget(self, first: int) -> None:
        """Take rows from `first` on for overwritten."""
        self._rows[first:] = -1
