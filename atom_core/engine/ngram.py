"""NgramDrafter: a sequence goes on as it did the last time its latest tokens occurred."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atom_core.engine.running_rows import NUM_DRAFTS, NUM_TOKENS, SEQUENCE_ID, RunningRows
from atom_core.engine.speculation import Speculator

if TYPE_CHECKING:
    from atom_core.engine.model_runner import StepOutput
    from atom_core.engine.scheduled_batch import CheckpointSave, Fork, ScheduledBatch
    from atom_core.engine.sequence import Sequence as TokenSequence

__all__ = ["NgramDrafter", "NgramIndex"]

Array = np.ndarray[Any, Any]

_LENGTHS = (3, 2)
_BACK = np.arange(1, 4)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: multiplicative hashing, Knuth vol. 3, 6.4
_TOKEN_BITS = np.uint64(21)


class NgramDrafter(Speculator):
    """Copies what followed the latest earlier occurrence of a sequence's last three tokens, or else two.

    This is prompt lookup (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding) over prompt and output,
    for all sequences at once. Each token is indexed once, so that a step costs the same at any length.

    Args:
        num_spec_tokens: most drafts of a sequence and step.
        rows: the running sequences.
    """

    def __init__(self, num_spec_tokens: int, rows: RunningRows) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._rows = rows
        self._index = NgramIndex(rows.tokens)
        self._owners: Array = np.full(len(rows.tokens), -1, dtype=np.int64)

    def set_drafts(self, running: Collection[TokenSequence]) -> None:
        """Look up each sequence's last tokens in itself."""
        index, counts = self._rows.decoding(running), self._rows.counts
        if not len(index):
            return
        ids, lengths = counts[index, SEQUENCE_ID], counts[index, NUM_TOKENS]
        strange = self._owners[index] != ids
        if strange.any():
            self._index.clear(index[strange])
            self._owners[index] = ids
        self._index.extend(index, lengths)
        starts = self._index.occurrences(index, lengths)
        num_drafts = np.where(starts > 0, self._rows.draft_room(index, self._num_spec_tokens), 0)
        counts[index, NUM_DRAFTS] = num_drafts
        if num_drafts.any():
            self._index.copy(index, lengths, starts, num_drafts)

    def draft(self, batch: ScheduledBatch) -> None:
        """Leave the drafts as they are."""

    def follow(self, batch: ScheduledBatch, result: StepOutput) -> None:
        """Wait for the tokens until the next drafts are set."""

    def save_states(self, saves: Sequence[CheckpointSave]) -> None:
        """Keep no state of tokens that others may share."""

    def copy_forks(self, forks: Sequence[Fork]) -> None:
        """Learn of the new samples when the next drafts are set."""

    def release(self, seq: TokenSequence) -> None:
        """Leave the sequence's tokens to whoever gets its row."""


class NgramIndex:
    """The tokens of rows, and for each two and each three of them where they were last followed by another one.

    An entry is found by a hash of its tokens, in a table for each row where a later entry may take the place of another
    one. What a table says is believed only after a look at the tokens themselves; so rows need not be wiped. Each table
    takes 8 to 16 bytes for each token that a row may have; hashes scatter, so nearly all of that is soon used.

    Args:
        tokens: [num_rows, max_tokens] int32; the caller writes them, then calls `extend`.

    Attributes:
        lengths: [num_rows], tokens of each row that are indexed.
    """

    def __init__(self, tokens: Array) -> None:
        num_rows, max_tokens = tokens.shape
        self._tokens = tokens
        self.lengths: Array = np.zeros(num_rows, dtype=np.int64)
        bits = (2 * max_tokens - 1).bit_length()
        self._shift = np.uint64(64 - bits)
        self._followed: dict[int, Array] = {
            length: np.zeros((num_rows, 1 << bits), dtype=np.int32) for length in _LENGTHS
        }

    def clear(self, rows: Array) -> None:
        """Forget the tokens of rows."""
        self.lengths[rows] = 0

    def extend(self, rows: Array, lengths: Array) -> None:
        """Index the tokens that were written behind those that are indexed.

        Args:
            rows: without repetition.
            lengths: tokens of each now.
        """
        known = self.lengths[rows]
        counts = lengths - known
        self.lengths[rows] = lengths
        ends = np.cumsum(counts)
        if not ends[-1]:
            return
        positions = np.arange(ends[-1]) + np.repeat(known - ends + counts, counts)
        of_row = np.repeat(rows, counts)
        grams = self._tokens_before(of_row, positions)
        for length, followed in self._followed.items():
            inside = slice(None) if known.min() >= length else positions >= length
            followed[of_row[inside], self._hash(grams[inside], length)] = positions[inside]

    def occurrences(self, rows: Array, lengths: Array) -> Array:
        """Where the last tokens of rows were followed by another token the last time before; 0 for nowhere."""
        grams = self._tokens_before(rows, lengths)
        found = np.zeros(len(rows), dtype=np.int64)
        for length, followed in reversed(self._followed.items()):
            place = followed[rows, self._hash(grams, length)].astype(np.int64)
            right = (place >= length) & (place < lengths) & (lengths >= length)
            right &= (self._tokens_before(rows, place) == grams)[:, :length].all(axis=1)
            found = np.where(right, place, found)
        return found

    def copy(self, rows: Array, lengths: Array, starts: Array, counts: Array) -> None:
        """Write the tokens from `starts` on behind those of the rows, `counts` of each; they may repeat themselves."""
        steps = np.arange(counts.max())
        inside = steps < counts[:, None]
        source = starts[:, None] + steps % np.maximum(lengths - starts, 1)[:, None]
        target = lengths[:, None] + steps
        of_row = np.broadcast_to(rows[:, None], inside.shape)[inside]
        self._tokens[of_row, target[inside]] = self._tokens[of_row, source[inside]]

    def _tokens_before(self, rows: Array, ends: Array) -> Array:
        """[ends, 3] int32, the tokens before each end, the last one first; whatever there is where there are fewer."""
        before: Array = self._tokens[rows[:, None], np.maximum(ends[:, None] - _BACK, 0)]
        return before

    def _hash(self, grams: Array, length: int) -> Array:
        """Hash the last `length` tokens of each gram."""
        packed = grams[:, 0].astype(np.uint64)
        for back in range(1, length):
            packed = packed << _TOKEN_BITS | grams[:, back].astype(np.uint64)
        hashed: Array = (packed * _GOLDEN >> self._shift).astype(np.int64)
        return hashed
