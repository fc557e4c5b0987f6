"""A plot of text: the share of its limit that each case of an op reaches."""

from __future__ import annotations

__all__ = ["Bars"]

_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"


class Bars:
    """Shares of a limit by case, in the order in which they are added; `str` draws them."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._shares: dict[str, float] = {}

    def add(self, case: str, share: float) -> None:
        """Add a case, or give it another share, from 0 to 1."""
        self._shares[case] = share

    def __str__(self) -> str:
        wide = max(len(self._title), *map(len, self._shares)) + 2
        scale = "".join(f"{percent:<{_WIDTH // 4}}" for percent in (0, 25, 50, 75)) + "100%"
        return "\n".join(
            [f"{self._title:{wide}}{scale}", *(f"{case:{wide}}{_bar(x)}" for case, x in self._shares.items())]
        )


def _bar(share: float) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * _WIDTH * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip() + f" {share:.0%}"
