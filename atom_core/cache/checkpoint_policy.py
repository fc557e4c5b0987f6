"""CheckpointPolicy: after which tokens a state is worth keeping."""

from __future__ import annotations

from collections import OrderedDict

from atom_core.cache.cached_sequence import Track

__all__ = ["CheckpointPolicy"]

_MAX_REFUSED_BOUNDARIES = 256


class CheckpointPolicy:
    """Where checkpoints are taken.

    Worth one are multiples of the interval, the last block boundary before a prompt's last token, and boundaries
    where a sequence had to compute a shared prefix again for want of a checkpoint.

    Args:
        block_size: tokens per block.
        interval: tokens between regular checkpoints, a multiple of the block size, or `None`.
    """

    def __init__(self, block_size: int, interval: int | None) -> None:
        self._block_size = block_size
        self._interval = interval
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    def next_boundary(self, track: Track, start: int, end: int) -> int:
        """The first token count in `start + 1 .. end` that is worth a checkpoint, or `end`."""
        if start < track.prompt_boundary_tokens < end:
            end = track.prompt_boundary_tokens
        if self._interval is not None:
            end = min(end, (start // self._interval + 1) * self._interval)
        if self._refused:
            for index in range(start // self._block_size, min(end // self._block_size, len(track.hashes))):
                if track.hashes[index] in self._refused:
                    return (index + 1) * self._block_size
        return end

    def is_regular_boundary(self, num_tokens: int) -> bool:
        """Whether so many tokens are a multiple of the interval."""
        return self._interval is not None and num_tokens % self._interval == 0

    def may_pass_boundary(self, start: int, end: int) -> bool:
        """Whether a state after `start + 1 .. end` generated tokens may be worth a checkpoint; quick."""
        return bool(self._refused) or (self._interval is not None and end // self._interval > start // self._interval)

    def is_boundary(self, track: Track, num_tokens: int) -> bool:
        """Whether the state after `num_tokens` tokens, whole published blocks, is worth a checkpoint."""
        return (
            num_tokens == track.prompt_boundary_tokens
            or self.is_regular_boundary(num_tokens)
            or track.hashes[num_tokens // self._block_size - 1] in self._refused
        )

    def remember_refused(self, block_hash: bytes) -> None:
        """Note that a shared prefix ends here and had no checkpoint."""
        self._refused[block_hash] = None
        self._refused.move_to_end(block_hash)
        if len(self._refused) > _MAX_REFUSED_BOUNDARIES:
            self._refused.popitem(last=False)

    def forget_refused(self, block_hash: bytes) -> None:
        """Note that this boundary is served."""
        self._refused.pop(block_hash, None)
