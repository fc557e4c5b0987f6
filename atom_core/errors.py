"""Every error that Atom raises on purpose.

    AtomError
    ├── ConfigError                 an option is wrong, or two do not fit together
    ├── PluginError                 something about a plugin; names plugin, distribution, version
    │   ├── DiscoveryError          duplicate names, unknown plugin named, broken plugin needed
    │   ├── ClaimError              a layer has no owner, or two
    │   ├── StatefulModelTypeError  per-request state for a model type nobody registered
    │   ├── LayoutError             declared and allocated bytes differ, or a tensor is missing
    │   └── KernelError             no kernel for an op, or the forced one refuses
    ├── LayerError                  a layer met something it does not know
    ├── ModelError                  a model cannot be found, read or used
    ├── CapacityError               the memory budget cannot hold the smallest useful cache
    ├── RequestError                one request is unacceptable; others go on
    └── EngineError                 an invariant of the engine does not hold

A message says what happened, what was found, what was expected, who is responsible and what to do.
"""

from __future__ import annotations

__all__ = [
    "AtomError",
    "CapacityError",
    "ClaimError",
    "ConfigError",
    "DiscoveryError",
    "EngineError",
    "KernelError",
    "LayerError",
    "LayoutError",
    "ModelError",
    "PluginError",
    "RequestError",
    "StatefulModelTypeError",
]


class AtomError(Exception):
    """Base of all errors that Atom raises on purpose; the CLI prints these in one line."""


class ConfigError(AtomError):
    """An option has a bad value, or two options do not fit together."""


class PluginError(AtomError):
    """Something about a plugin; the message names plugin, distribution and version."""


class DiscoveryError(PluginError):
    """Plugins could not be found or told apart, or a needed one is broken or blocked."""


class ClaimError(PluginError):
    """A layer that needs an owner has none, or has two of equal rank."""


class StatefulModelTypeError(PluginError):
    """A plugin has per-request state for a model type that it did not register."""


class LayoutError(PluginError):
    """Tensors that a plugin allocated are not what it declared."""


class KernelError(PluginError):
    """No kernel supports an op here, or the forced one refuses."""


class LayerError(AtomError):
    """A layer met a keyword, a mask kind or a shape that it does not know."""


class ModelError(AtomError):
    """A model cannot be found, read or used."""


class CapacityError(AtomError):
    """The memory budget cannot hold the smallest useful cache."""


class RequestError(AtomError):
    """One request is unacceptable; the others are not affected."""


class EngineError(AtomError):
    """An invariant of the engine does not hold; a bug in the core or in a plugin."""
