"""NgramDrafter: a sequence goes on as it did the last time its latest tokens occurred."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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
        max_num_seqs: most running sequences.
        max_model_len: most tokens of one.
    """

    def __init__(self, num_spec_tokens: int, max_num_seqs: int, max_model_len: int) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._index = NgramIndex(max_num_seqs, max_model_len + num_spec_tokens)
        self._owners: Array = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_written: Array = np.zeros(max_num_seqs, dtype=np.int64)

    def set_drafts(self, running: Iterable[TokenSequence]) -> None:
        """Look up each sequence's last tokens in itself."""
        seqs = [seq for seq in running if seq.num_computed_tokens >= seq.prefill_target]
        if not seqs:
            return
        count = len(seqs)
        rows = np.fromiter((seq.row for seq in seqs), np.int64, count)
        lengths = np.fromiter((seq.num_tokens for seq in seqs), np.int64, count)
        ids = np.fromiter((seq.id for seq in seqs), np.int64, count)
        limits = np.fromiter((seq.max_num_tokens for seq in seqs), np.int64, count)
        self._take_tokens(seqs, rows, lengths, ids)
        starts = self._index.occurrences(rows, lengths)
        room = np.minimum(limits - lengths - 1, self._num_spec_tokens)
        num_drafts = np.where(starts > 0, np.maximum(room, 0), 0).tolist()
        if not any(num_drafts):
            for seq in seqs:
                seq.num_draft_tokens = 0
            return
        self._num_written[rows] = self._num_spec_tokens
        drafts = self._index.copy(rows, lengths, starts, self._num_spec_tokens)
        for seq, number, tokens in zip(seqs, num_drafts, drafts, strict=True):
            if number:
                seq.set_drafts(tokens[:number])
            else:
                seq.num_draft_tokens = 0

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

    def _take_tokens(self, seqs: Sequence[TokenSequence], rows: Array, lengths: Array, ids: Array) -> None:
        """Give the index the tokens that it does not know.

        Of a sequence that it knows this is the last one: those before it are the drafts that it wrote itself.
        """
        index = self._index
        num_gained = lengths - index.lengths[rows]
        strange = np.flatnonzero((self._owners[rows] != ids) | (num_gained > 1 + self._num_written[rows]))
        self._num_written[rows] = 0
        for place in strange.tolist():
            index.tokens[rows[place], : lengths[place]] = seqs[place].token_ids
        if len(strange):
            index.clear(rows[strange])
            self._owners[rows] = ids
        last = np.fromiter((seq.last_token_id for seq in seqs), np.int32, len(seqs))
        index.tokens[rows, lengths - 1] = last
        index.extend(rows, lengths)


class NgramIndex:
    """The tokens of rows, and for each two and each three of them where they were last followed by another one.

    An entry is found by a hash of its tokens, in a table for each row where a later entry may take the place of another
    one. What a table says is believed only after a look at the tokens themselves; so rows need not be wiped, and the
    memory, 4 bytes a token and 8 for each table, is touched only as far as rows have tokens.

    Args:
        num_rows: rows.
        max_tokens: most tokens of a row.

    Attributes:
        tokens: [num_rows, max_tokens] int32; the caller writes them, then calls `extend`.
        lengths: [num_rows], tokens of each row that are indexed.
    """

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self.tokens: Array = np.zeros((num_rows, max_tokens), dtype=np.int32)
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

    def copy(self, rows: Array, lengths: Array, starts: Array, count: int) -> Array:
        """Write the tokens from `starts` on behind those of the rows; a copy that reaches its row's end repeats itself.

        Returns:
            [rows, count] int32, what was written.
        """
        steps = np.arange(count) % np.maximum(lengths - starts, 1)[:, None]
        copied: Array = self.tokens[rows[:, None], starts[:, None] + steps]
        self.tokens[rows[:, None], lengths[:, None] + np.arange(count)] = copied
        return copied

    def _tokens_before(self, rows: Array, ends: Array) -> Array:
        """[ends, 3] int32, the tokens before each end, the last one first; whatever there is where there are fewer."""
        before: Array = self.tokens[rows[:, None], np.maximum(ends[:, None] - _BACK, 0)]
        return before

    def _hash(self, grams: Array, length: int) -> Array:
        """Hash the last `length` tokens of each gram."""
        packed = grams[:, 0].astype(np.uint64)
        for back in range(1, length):
            packed = packed << _TOKEN_BITS | grams[:, back].astype(np.uint64)
        hashed: Array = (packed * _GOLDEN >> self._shift).astype(np.int64)
        return hashed
