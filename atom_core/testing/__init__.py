"""The conformance kit: `AttentionConformance`, which a plugin's tests subclass, and what such tests are made of.

Needs the extra `testing` (`pip install atom-core[testing]`). docs/conformance.md explains it.
"""

from atom_core.plugin.registry import PluginRegistry
from atom_core.testing import strategies
from atom_core.testing.batch import Request, Row, build_batch
from atom_core.testing.conformance import INVARIANTS, AttentionConformance
from atom_core.testing.driver import StepDriver, StepResult
from atom_core.testing.models import lively_model, stock_logits, stock_model, tiny
from atom_core.testing.poison import Poisoner
from atom_core.testing.profile import PROFILE_VARIABLE, Profile
from atom_core.testing.report import Trace, Violation, difference
from atom_core.testing.subject import Subject

__all__ = [
    "INVARIANTS",
    "PROFILE_VARIABLE",
    "AttentionConformance",
    "PluginRegistry",
    "Poisoner",
    "Profile",
    "Request",
    "Row",
    "StepDriver",
    "StepResult",
    "Subject",
    "Trace",
    "Violation",
    "build_batch",
    "difference",
    "lively_model",
    "stock_logits",
    "stock_model",
    "strategies",
    "tiny",
]
