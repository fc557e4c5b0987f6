"""Atom: an LLM inference engine whose attention types are plugins. Importing it loads nothing heavy."""

from typing import TYPE_CHECKING

from atom_core.config import EngineConfig
from atom_core.engine.sampling import SamplingParams
from atom_core.plugin.markers import hookimpl

if TYPE_CHECKING:
    from atom_core.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__", "hookimpl"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from atom_core.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
