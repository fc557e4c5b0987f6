"""NgramProposer: a sequence goes on as it did the last time its latest tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atom_core.plugin.proposer import DraftRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["NgramProposer"]

_SIZES = (3, 2)


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
    """A sequence's tokens, and where each short run of them was last followed by another token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        tokens, followed = self._tokens, self._followed
        for token in token_ids[len(tokens) :].tolist():
            end = len(tokens)
            for size in _SIZES:
                if end >= size:
                    followed[tuple(tokens[end - size :])] = end
            tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens; where the copy reaches the end of the sequence it goes on with itself."""
        tokens = self._tokens
        for size in _SIZES:
            start = self._followed.get(tuple(tokens[-size:]))
            if start is not None:
                period = len(tokens) - start
                known = tokens[start : start + count]
                return [known[index % period] for index in range(count)]
        return []
