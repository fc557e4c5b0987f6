"""The checks that a plugin object must pass; each failure says what to change."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pluggy

from atom_core.errors import DiscoveryError
from atom_core.plugin.manager import HOOKS, callers_by_plugin, hook_arguments, make_manager, plain_implementers
from atom_core.plugin.markers import CONTRACT_VERSION, HOOK_PREFIX, PROJECT
from atom_core.plugin.types import PluginInfo

__all__ = ["inspect_plugin", "stateful_types"]


def inspect_plugin(name: str, plugin: object) -> tuple[PluginInfo, tuple[str, ...]]:
    """Check a plugin object against the contract.

    Args:
        name: the entry point's name.
        plugin: what the entry point loaded.

    Returns:
        What the plugin says about itself, and the hooks that it implements or wraps.

    Raises:
        DiscoveryError: the first check that failed.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise DiscoveryError(f"the name {name!r} may hold only letters, digits, '_' and '-'")
    if inspect.isclass(plugin):
        raise DiscoveryError(
            f"the entry point names the class {plugin.__qualname__}; name an instance, "
            f"for example `plugin = {plugin.__qualname__}()`"
        )
    hooks = _check_hooks(plugin)
    if not hooks:
        raise DiscoveryError(
            f"the entry point loads an object of type {type(plugin).__name__} that implements no hook; "
            f"name an object or a module whose functions are decorated with @hookimpl"
        )
    try:
        manager = make_manager({name: plugin})
    except pluggy.PluginValidationError as error:
        raise DiscoveryError(" ".join(str(error).split())) from error
    info = _check_info(name, manager)
    for answer in _ask(name, manager, "atom_model_types"):
        stateful_types(name, answer)
    return info, hooks


def stateful_types(name: str, answer: object) -> frozenset[str]:
    """Read what a plugin returned from `atom_model_types`.

    Raises:
        DiscoveryError: it names another plugin, or is no mapping to collections of strings.
    """
    fault = DiscoveryError(
        f"atom_model_types returned {answer!r}, expected a mapping from the plugin's own name, "
        f'{{"{name}": ["model_type", ...]}}'
    )
    if not isinstance(answer, Mapping) or set(answer) - {name}:
        raise fault
    model_types = answer.get(name, ())
    if isinstance(model_types, str) or not isinstance(model_types, Collection):
        raise fault
    if not all(isinstance(model_type, str) and model_type for model_type in model_types):
        raise fault
    return frozenset(model_types)


def _check_hooks(plugin: object) -> tuple[str, ...]:
    parser = pluggy.PluginManager(PROJECT)
    implemented = set()
    for attribute in dir(plugin):
        options: Mapping[str, Any] | None = parser.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            if attribute.startswith(HOOK_PREFIX) and not _is_module(plugin, attribute):
                raise DiscoveryError(_undecorated(attribute))
            continue
        hook = options.get("specname") or attribute
        if hook in HOOKS:
            _check_parameters(hook, getattr(plugin, attribute))
            implemented.add(hook)
        elif not options.get("optionalhook"):
            raise DiscoveryError(_unknown_hook(hook))
    return tuple(hook for hook in HOOKS if hook in implemented)


def _is_module(plugin: object, attribute: str) -> bool:
    """Whether the attribute is an imported module, as `atom_core` is in a plugin that is itself a module."""
    return inspect.ismodule(inspect.getattr_static(plugin, attribute, None))


def _undecorated(attribute: str) -> str:
    if attribute in HOOKS:
        return f"{attribute} is not decorated with @hookimpl, so it would never be called"
    return _unknown_hook(attribute)


def _unknown_hook(hook: str) -> str:
    close = difflib.get_close_matches(hook, HOOKS, n=1) or difflib.get_close_matches(HOOK_PREFIX + hook, HOOKS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"hooks: {', '.join(HOOKS)}"
    return f"{hook} is not a hook; {hint}"


def _check_parameters(hook: str, function: Any) -> None:
    known = hook_arguments(hook)
    for fault in _parameter_faults(function, known):
        raise DiscoveryError(f"{hook} {fault}; arguments of the hook: {', '.join(known) or 'none'}")


def _parameter_faults(function: Any, known: tuple[str, ...]) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield f"takes {parameter}, which is never filled: arguments are passed by the names that are declared"
        elif parameter.name not in known:
            close = difflib.get_close_matches(parameter.name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            yield f"takes an argument {parameter.name!r} that the hook does not have{hint}"
        elif parameter.kind is parameter.KEYWORD_ONLY:
            yield f"takes {parameter.name!r} by keyword only, which pluggy does not pass"
        elif parameter.default is not parameter.empty:
            yield f"gives {parameter.name!r} a default, so that pluggy may leave it out of the call"


def _check_info(name: str, manager: pluggy.PluginManager) -> PluginInfo:
    if name not in plain_implementers(manager, "atom_plugin_info"):
        raise DiscoveryError("atom_plugin_info is missing; every plugin must implement it")
    answers = _ask(name, manager, "atom_plugin_info")
    info = answers[0] if answers else None
    if not isinstance(info, PluginInfo):
        raise DiscoveryError(f"atom_plugin_info returned {info!r}, expected a PluginInfo")
    if info.contract_version != CONTRACT_VERSION:
        older = "the plugin" if info.contract_version < CONTRACT_VERSION else "atom-core"
        raise DiscoveryError(
            f"it was written for version {info.contract_version} of the contract, this atom-core has version "
            f"{CONTRACT_VERSION}; upgrade {older}"
        )
    if info.name != name:
        raise DiscoveryError(
            f"its entry point is named {name!r}, but atom_plugin_info says {info.name!r}; the two must be equal"
        )
    return info


def _ask(name: str, manager: pluggy.PluginManager, hook: str) -> list[Any]:
    caller = callers_by_plugin(manager, hook).get(name)
    try:
        return [] if caller is None else list(caller())
    except Exception as error:  # plugin code
        raise DiscoveryError(f"{hook} failed: {type(error).__name__}: {error}") from error
