"""The pluggy markers and the contract's version."""

from __future__ import annotations

import pluggy

__all__ = ["CONTRACT_VERSION", "ENTRY_POINT_GROUP", "HOOK_PREFIX", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "atom_core"
ENTRY_POINT_GROUP = "atom_core"
HOOK_PREFIX = "atom_"
CONTRACT_VERSION = 1
"""Raised when a hook changes so that a plugin written before would misbehave."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
