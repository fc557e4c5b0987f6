"""Mask: which keys a query sees."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mask"]


@dataclass(frozen=True)
class Mask:
    """A causal mask: query position i sees key position j when j <= i, and within the limits below.

    The two limits are those of transformers' `sliding_window_overlay` and `chunked_overlay`.

    Attributes:
        window: with W, only j > i - W; the window counts the query itself.
        chunk: with C, only j // C == i // C.
    """

    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        if self.window is not None:
            return f"window of {self.window}"
        return "causal" if self.chunk is None else f"chunks of {self.chunk}"
