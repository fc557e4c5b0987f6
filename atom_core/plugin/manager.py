"""pluggy managers: made with the contract's specs, and split so that answers can be attributed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import pluggy

from atom_core.plugin.hookspecs import PER_MODEL_HOOKS, PER_PLUGIN_HOOKS, AtomSpecs
from atom_core.plugin.markers import PROJECT

__all__ = ["HOOKS", "callers_by_plugin", "hook_arguments", "make_manager", "plain_implementers"]

HOOKS = (*PER_PLUGIN_HOOKS, *PER_MODEL_HOOKS)


def hook_arguments(hook: str) -> tuple[str, ...]:
    """The arguments of a hook of the contract, in order."""
    parameters = inspect.signature(getattr(AtomSpecs, hook)).parameters
    return tuple(name for name in parameters if name != "self")


def make_manager(plugins: Mapping[str, object]) -> pluggy.PluginManager:
    """Make a manager that holds these plugins, by name.

    Raises:
        pluggy.PluginValidationError: an implementation does not fit its spec.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(AtomSpecs)
    for name, plugin in plugins.items():
        manager.register(plugin, name=name)
    manager.check_pending()
    return manager


def plain_implementers(manager: pluggy.PluginManager, hook: str) -> frozenset[str]:
    """Names of the plugins that answer a hook themselves, rather than only wrap it."""
    implementations = getattr(manager.hook, hook).get_hookimpls()
    return frozenset(i.plugin_name for i in implementations if not (i.wrapper or i.hookwrapper))


def callers_by_plugin(manager: pluggy.PluginManager, hook: str) -> dict[str, pluggy.HookCaller]:
    """Split a hook into one caller per plugin that answers it, so that the answers are attributable.

    Each caller has every plugin that only wraps the hook around it; a wrapper runs once per plugin asked.
    """
    answering = plain_implementers(manager, hook)
    registered = dict(manager.list_name_plugin())
    wrapping = {
        implementation.plugin_name: implementation.plugin
        for implementation in getattr(manager.hook, hook).get_hookimpls()
        if implementation.plugin_name not in answering
    }
    return {
        name: getattr(make_manager({name: plugin, **wrapping}).hook, hook)
        for name, plugin in registered.items()
        if name in answering
    }
