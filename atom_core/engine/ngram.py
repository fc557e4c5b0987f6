"""NgramProposer: a sequence goes on as it did the last time its latest tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atom_core.plugin.proposer import DraftRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["NgramProposer"]


class NgramProposer:
    """Copies what followed the latest earlier occurrence of a sequence's last three tokens, or else two.

    This is prompt lookup (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding) over prompt and output.
    Each token is indexed once, so that a step costs the same at any length.
    """

    def __init__(self, **_: Any) -> None:
        self._histories: dict[int, _History] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Look up each sequence's last tokens in itself."""
        drafts = []
        for request in requests:
            history = self._histories.get(request.sequence_id)
            if history is None:
                history = self._histories[request.sequence_id] = _History()
            history.extend(request.token_ids)
            drafts.append(history.continuation(request.max_drafts))
        return drafts

    def release(self, sequence_id: int) -> None:
        """Drop the sequence's index."""
        self._histories.pop(sequence_id, None)


class _History:
    """A sequence's tokens, and where each two and each three of them were last followed by another token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last = (-1, -1, -1)  # what pads a start is followed once only, and so never found again
        self._followed: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        end = len(self._tokens)
        new = token_ids[end:].tolist()
        followed = self._followed
        first, second, third = self._last
        for token in new:
            followed[second, third] = end
            followed[first, second, third] = end
            first, second, third = second, third, token
            end += 1
        self._tokens += new
        self._last = (first, second, third)

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens; where the copy reaches the end of the sequence it goes on with itself."""
        start = self._followed.get(self._last) or self._followed.get(self._last[1:])
        if start is None:
            return []
        known = self._tokens[start : start + count]
        if len(known) == count:
            return known
        period = len(self._tokens) - start
        return [known[index % period] for index in range(count)]
