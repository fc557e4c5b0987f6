"""Which distribution serves a layer class, from the data file beside this module; for messages only."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

__all__ = ["dedicated_distribution", "distribution_for"]


@dataclass(frozen=True)
class _KnownLayers:
    distribution: str
    classes: tuple[str, ...]
    children: frozenset[str]
    exceptions: tuple[str, ...]

    def match(self, class_name: str, children: Collection[str] | None) -> bool:
        if not any(fnmatchcase(class_name, pattern) for pattern in self.classes):
            return False
        if any(fnmatchcase(class_name, pattern) for pattern in self.exceptions):
            return False
        return children is None or self.children <= set(children)


def distribution_for(class_name: str, children: Collection[str] | None = None) -> str | None:
    """Name the distribution to install for a layer class.

    Args:
        class_name: the class of the module that nobody claims.
        children: names of the module's children, where they are known; a generic pattern asks for some.

    Returns:
        A distribution's name, or `None` when the class is not known.
    """
    for known in _known_layers():
        if known.match(class_name, children):
            return known.distribution
    return None


def dedicated_distribution(class_name: str) -> str | None:
    """Name the distribution that was made for this very class, or `None` when none is known."""
    return next((known.distribution for known in _known_layers() if class_name in known.classes), None)


@cache
def _known_layers() -> tuple[_KnownLayers, ...]:
    text = files("atom_core.plugin").joinpath("known_layers.toml").read_text(encoding="utf-8")
    return tuple(
        _KnownLayers(
            distribution=entry["distribution"],
            classes=tuple(entry["classes"]),
            children=frozenset(entry.get("children", ())),
            exceptions=tuple(entry.get("except", ())),
        )
        for entry in tomllib.loads(text)["layers"]
    )
