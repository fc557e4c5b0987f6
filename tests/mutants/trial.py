"""Trying one invariant on one class of the kit, without pytest around it."""

from __future__ import annotations

import inspect

import pytest

from atom_core.testing import INVARIANTS, AttentionConformance, Violation

__all__ = ["report_of", "reports_of"]

PROPERTIES = {f"I{int(name[6:8])}": name for name in sorted(vars(AttentionConformance)) if name.startswith("test_i")}


def report_of(conformance: type[AttentionConformance], invariant: str) -> str | None:
    """The violation that a property finds on all configs; `None` where it passes or does not apply."""
    name = PROPERTIES[invariant]
    wanted = inspect.signature(getattr(conformance, name)).parameters
    arguments = {"record_property": lambda *_: None} if "record_property" in wanted else {}
    for config_name in conformance.configs():
        try:
            getattr(conformance(), name)(config_name, **arguments)
        except Violation as violation:
            return str(violation).splitlines()[0]
        except pytest.skip.Exception:
            continue
    return None


def reports_of(conformance: type[AttentionConformance]) -> dict[str, str]:
    """By invariant, the violations of all properties that fail."""
    found = {invariant: report_of(conformance, invariant) for invariant in INVARIANTS}
    return {invariant: report for invariant, report in found.items() if report is not None}
