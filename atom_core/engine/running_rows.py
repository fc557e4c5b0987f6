"""RunningRows: what steps need of the running sequences, as arrays with a row for each.

Drafting, scheduling, building a batch and taking its tokens then cost array operations, not Python for each sequence.
"""

from __future__ import annotations

import mmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from atom_core.engine.block_tables import BlockTables

if TYPE_CHECKING:
    from collections.abc import Collection

    from atom_core.engine.sequence import Sequence

__all__ = [
    "GROUP",
    "MAX_NUM_TOKENS",
    "NUM_ACCEPTED",
    "NUM_COMPUTED",
    "NUM_COUNTS",
    "NUM_DRAFTS",
    "NUM_TOKENS",
    "PREFILL_TARGET",
    "SEQUENCE_ID",
    "RunningRows",
]

NUM_TOKENS, MAX_NUM_TOKENS, NUM_COMPUTED, PREFILL_TARGET, NUM_DRAFTS, NUM_ACCEPTED, GROUP, SEQUENCE_ID = range(8)
NUM_COUNTS = SEQUENCE_ID + 1

Rows = np.ndarray[Any, np.dtype[np.int64]]

_row = attrgetter("row")


class RunningRows:
    """Counts, tokens and block tables of the running sequences.

    A `Sequence` that is added keeps its counts and tokens here until it is removed: its attributes read and write the
    arrays.

    Args:
        max_num_seqs: rows.
        max_model_len: most tokens of a sequence; a row takes memory for the tokens that it has.
        block_size: tokens of a block.

    Attributes:
        counts: [max_num_seqs, NUM_COUNTS] int64; the columns have names, `NUM_TOKENS` and so on.
        tokens: [max_num_seqs, max_model_len] int32, known tokens and drafts behind them.
        tables: blocks of each.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.counts: np.ndarray[Any, np.dtype[np.int64]] = np.zeros((max_num_seqs, NUM_COUNTS), dtype=np.int64)
        self.tokens = _zeros_on_small_pages(max_num_seqs, max_model_len)
        self.tables = BlockTables(max_num_seqs, -(-max_model_len // block_size))
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that no sequence has."""
        return len(self._free)

    def add(self, seq: Sequence) -> None:
        """Give a sequence a row, which holds its counts, tokens and blocks from now on."""
        row = self._free[-1]
        seq.enter_row(row, self.counts[row], self.tokens[row])
        self._free.pop()
        self.tables.clear(row)
        self.tables.extend(row, seq.block_table)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence's row back."""
        self._free.append(seq.row)
        seq.leave_row()

    def add_blocks(self, seq: Sequence) -> None:
        """Learn of the blocks that a sequence got since the last time."""
        self.tables.extend(seq.row, seq.block_table)

    def of(self, seqs: Collection[Sequence]) -> Rows:
        """Return the rows of sequences, [seqs] int64."""
        rows = np.fromiter(map(_row, seqs), np.int64, len(seqs))
        assert not (rows < 0).any(), "a sequence without a row takes part in a step"
        return rows

    def decoding(self, seqs: Collection[Sequence]) -> Rows:
        """Return the rows of those sequences whose known tokens are computed but for the last."""
        rows = self.of(seqs)
        decoding: Rows = rows[self.counts[rows, NUM_COMPUTED] >= self.counts[rows, PREFILL_TARGET]]
        return decoding

    def draft_room(self, rows: Rows, most: int) -> Rows:
        """How many drafts, at most `most`, the next step may verify of each row.

        A step gives one token more than the drafts it accepts, so the last token of a sequence needs no draft.
        """
        room: Rows = (self.counts[rows, MAX_NUM_TOKENS] - self.counts[rows, NUM_TOKENS] - 1).clip(0, most)
        return room


def _zeros_on_small_pages(num_rows: int, num_columns: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[num_rows, num_columns] int32; numpy's large arrays have pages of 2 MB, whole ones for the least of rows."""
    memory = mmap.mmap(-1, max(1, num_rows * num_columns * 4))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.int32, count=num_rows * num_columns).reshape(num_rows, num_columns)
