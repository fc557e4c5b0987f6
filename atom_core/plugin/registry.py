"""PluginRegistry: the plugins of this process, and everything that they are asked once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from atom_core.errors import DiscoveryError, PluginError, StatefulModelTypeError
from atom_core.plugin.answers import Answers
from atom_core.plugin.claims import Claims
from atom_core.plugin.core_ops import CORE, CORE_OPS
from atom_core.plugin.discovery import (
    PluginRecord,
    PluginStatus,
    blocked_record,
    find_installed,
    load_record,
    normalize_distribution,
)
from atom_core.plugin.inspection import inspect_plugin
from atom_core.plugin.known_layers import dedicated_distribution
from atom_core.plugin.manager import callers_by_plugin, make_manager, plain_implementers
from atom_core.plugin.model_hooks import ModelHooks
from atom_core.plugin.ops import Kernel, KernelTable, Op

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from atom_core.plugin.types import Claim

__all__ = ["PLUGINS_VARIABLE", "PluginRecord", "PluginRegistry", "PluginStatus"]

PLUGINS_VARIABLE = "ATOM_PLUGINS"
_log = logging.getLogger(__name__)


class PluginRegistry:
    """The plugins that were found, and the answers of those that are loaded.

    Attributes:
        records: every plugin that was found, in order of names.
        manager: a pluggy manager that holds the loaded plugins.
    """

    def __init__(self, records: Sequence[PluginRecord]) -> None:
        self.records = tuple(records)
        self._by_name = {record.name: record for record in self.records}
        self._loaded = [record for record in self.records if record.status is PluginStatus.LOADED]
        self.manager = make_manager({record.name: record.plugin for record in self._loaded})
        self._answers = Answers(self.manager, self._by_name)
        self._descriptions = {record.name: record.describe() for record in self.records}

    @classmethod
    def discover(
        cls, *, only: Sequence[str] | None = None, without: Sequence[str] = (), path: Sequence[str] | None = None
    ) -> PluginRegistry:
        """Find the installed plugins and import those that are not blocked.

        Args:
            only: names of the plugins to use; `None` for those in the environment variable ATOM_PLUGINS, or
                all where that is not set.
            without: names of plugins to leave out.
            path: directories to search for distributions; `None` for `sys.path`.

        Raises:
            DiscoveryError: two plugins or two distributions share a name, or an unknown plugin is named.
        """
        installed = find_installed(path)
        known = [plugin.name for plugin in installed]
        selected, source = _selection(only)
        _require_known(selected or (), f"in {source}", known)
        for name in without:
            _require_known((name,), f"by --no-plugin {name}", known)
        records = []
        for plugin in installed:
            if plugin.name in without:
                records.append(blocked_record(plugin, f"left out by --no-plugin {plugin.name}"))
            elif selected is not None and plugin.name not in selected:
                records.append(blocked_record(plugin, f"not in {source}"))
            else:
                records.append(load_record(plugin))
        return cls(records)

    @classmethod
    def of(cls, plugins: Mapping[str, object]) -> PluginRegistry:
        """Take plugin objects that are not installed, for tests and notebooks.

        Args:
            plugins: by name.

        Raises:
            DiscoveryError: a plugin does not pass the checks of discovery.
        """
        records = []
        for name, plugin in plugins.items():
            try:
                info, hooks = inspect_plugin(name, plugin)
            except DiscoveryError as error:
                raise DiscoveryError(f"plugin {name!r} (not installed) is broken: {error}") from error
            records.append(PluginRecord(name, None, None, info.summary, PluginStatus.LOADED, None, plugin, hooks))
        return cls(records)

    def record(self, name: str) -> PluginRecord:
        """Return what discovery found under a name.

        Raises:
            DiscoveryError: there is no such plugin; lists the known.
        """
        _require_known((name,), "", list(self._by_name))
        return self._by_name[name]

    def require(self, name: str) -> PluginRecord:
        """Return the record of a plugin that is loaded.

        Raises:
            DiscoveryError: it is unknown, broken or blocked, with the reason.
        """
        record = self.record(name)
        if record.status is not PluginStatus.LOADED:
            raise DiscoveryError(_why_unusable(record))
        return record

    def describe(self, plugin: str | object) -> str:
        """Name plugin, distribution and version as error messages do.

        Args:
            plugin: a plugin's name, or a loaded plugin object.
        """
        if isinstance(plugin, str):
            return self.record(plugin).describe()
        for record in self._loaded:
            if record.plugin is plugin:
                return record.describe()
        return f"plugin object {plugin!r} (not registered)"

    def identity(self) -> tuple[tuple[str, str], ...]:
        """Names and versions of the loaded plugins, for ranks to compare."""
        return tuple((record.name, record.version or "not installed") for record in self._loaded)

    def unavailable(self, name: str) -> str | None:
        """Say why a plugin is not at hand.

        Args:
            name: a plugin's name or a distribution's.

        Returns:
            That it is missing, broken (why) or blocked (how); `None` when it is loaded.
        """
        wanted = normalize_distribution(name)
        found = [
            record
            for record in self.records
            if record.name == name
            or (record.distribution is not None and normalize_distribution(record.distribution) == wanted)
        ]
        return _reasons(found) if found else f"{name!r} is not installed"

    def advice(self, distribution: str) -> str:
        """Say what to do so that a distribution's plugin serves a model, in one sentence.

        Args:
            distribution: the one that is known to claim a layer that nobody claimed.
        """
        reason = self.unavailable(distribution)
        if reason is None:
            return f"{distribution} is known to claim this class, but the installed version does not; upgrade it."
        if reason.endswith("is not installed"):
            return f"{distribution} is known to claim this class; run `pip install {distribution}`."
        return f"{distribution} is known to claim this class, but {reason}."

    def not_dedicated(self, class_name: str, owner: str) -> str | None:
        """Say that a generic claim won because the plugin made for a class is not at hand.

        Args:
            class_name: of the claimed module.
            owner: the plugin that claimed it generically.

        Returns:
            A warning; `None` where no other distribution is known to be made for the class.
        """
        distribution = dedicated_distribution(class_name)
        if distribution is None or self.record(owner).distribution in (None, distribution):
            return None
        return (
            f"{class_name} is served by the generic attention of {self.describe(owner)}; {distribution} is made for it "
            f"and may keep far less per token, but {self.unavailable(distribution) or 'it does not claim it'}"
        )

    def asked(self) -> str:
        """Name the plugins that are asked to claim layers, and those that are not with the reason."""
        asked = ", ".join(self._descriptions[name] for name in self._claims.plugins) or "none"
        unusable = _reasons(self.records)
        return f"{asked} (not asked: {unusable})" if unusable else asked

    def claim_layer(
        self, module: nn.Module, module_name: str, model_config: PreTrainedConfig, tp_size: int
    ) -> tuple[str, Claim] | None:
        """Ask every plugin for a module and decide who owns it: an exact claim beats generic ones.

        Args:
            module: the candidate.
            module_name: its dotted name in the model.
            model_config: the model's (text) config.
            tp_size: ranks that share the model.

        Returns:
            The owner's name and its claim, or `None` when the module is foreign to every plugin.

        Raises:
            ClaimError: two plugins claim the module with equal rank.
            LayerError: a plugin refuses the module and none claims it exactly.
            PluginError: a plugin failed, or returned something else than a claim.
        """
        return self._claims.owner(module, module_name, model_config, tp_size)

    def model_hooks(self, owners: Collection[str]) -> ModelHooks:
        """Make the hooks of one model.

        Args:
            owners: names of the plugins that own its layers; plugins that claim no layers at all (wrappers and
                observers) are added.
        """
        owning = {self.require(name).name for name in owners}
        claimants = plain_implementers(self.manager, "atom_claim_layer")
        members = {
            record.name: record.plugin
            for record in self._loaded
            if record.name in owning or record.name not in claimants
        }
        return ModelHooks(make_manager(members), self._descriptions, frozenset(owning))

    def stateful_model_types(self) -> Mapping[str, frozenset[str]]:
        """By plugin, the model types whose requests need per-request state from it.

        Raises:
            PluginError: a plugin answered for another name, or not with a collection of strings.
        """
        return self._stateful_model_types

    def is_stateful(self, model_type: str) -> bool:
        """Whether requests of this model type need per-request state."""
        return any(model_type in model_types for model_types in self._stateful_model_types.values())

    def check_stateful(self, model_type: str, per_req_bytes: Mapping[str, int]) -> list[str]:
        """Compare the state that plugins want for a model with what they registered.

        Args:
            model_type: the model's `model_type`.
            per_req_bytes: by plugin, bytes of one slot.

        Returns:
            Warnings: plugins that registered the model type and want no state for it.

        Raises:
            StatefulModelTypeError: a plugin wants state and did not register the model type.
        """
        for name, num_bytes in per_req_bytes.items():
            registered = self._stateful_model_types.get(name, frozenset())
            if num_bytes > 0 and model_type not in registered:
                raise StatefulModelTypeError(
                    f"{self.describe(name)} has {num_bytes} bytes of per-request state for model type "
                    f"{model_type!r}, which it did not register; registered: {_listed(registered)}. Requests are "
                    f"marked stateful from the registered model types alone: these would get no slot and read "
                    f"another request's state. Add {model_type!r} to what its atom_model_types returns: "
                    f"{json.dumps({name: sorted({*registered, model_type})})}"
                )
        return [
            f"{self.describe(name)} registered model type {model_type!r} as stateful, but has no per-request state "
            f"for this model; its requests are marked stateful all the same"
            for name, registered in self._stateful_model_types.items()
            if model_type in registered and per_req_bytes.get(name, 0) == 0
        ]

    def kernel_table(self, forced: Mapping[str, str] | None = None) -> KernelTable:
        """Collect ops and kernels. Kernels for an op whose plugin is not loaded are left aside.

        Args:
            forced: op name to kernel name, from `--kernel`.

        Raises:
            PluginError: an answer is no sequence of ops or kernels, or an op lacks its plugin's name.
            KernelError: names collide, or a name does not exist.
        """
        ops = list(self._answers.items("atom_ops", Op))
        for record, op in ops:
            if not op.name.startswith(f"{record.name}."):
                raise PluginError(
                    f"{record.describe()}: atom_ops defines {op.name!r}; the name of an op starts with its plugin's, "
                    f"for example {record.name + '.' + op.name.rpartition('.')[2]!r}"
                )
        kernels = []
        loaded = {record.name for record in self._loaded} | {CORE}
        for record, kernel in self._answers.items("atom_kernels", Kernel):
            if kernel.op.partition(".")[0] in loaded:
                kernels.append((kernel, record.describe()))
            else:
                _log.info(
                    "kernel %s of %s is left aside: the plugin of op %s is not loaded",
                    kernel.name,
                    record.describe(),
                    kernel.op,
                )
        owned = [(op, record.describe()) for record, op in ops] + [(op, "the core") for op in CORE_OPS]
        return KernelTable.build(owned, kernels, forced)

    def proposers(self) -> Mapping[str, str]:
        """Speculative proposers of all plugins: name to import path.

        Raises:
            PluginError: an answer is no mapping of strings, or two plugins bring one name.
        """
        return self._answers.merged("atom_proposers", "proposer", lambda value: isinstance(value, str))

    def tensor_parallel_plan(self, model_config: PreTrainedConfig, tp_size: int) -> Mapping[str, Any]:
        """Entries of all plugins that add to or replace the model's own plan.

        Raises:
            PluginError: an answer is no mapping from patterns, or two plugins disagree on a pattern.
        """
        arguments = {"model_config": model_config, "tp_size": tp_size}
        return self._answers.merged(
            "atom_tensor_parallel_plan", "pattern", lambda value: value is not None, **arguments
        )

    @cached_property
    def _claims(self) -> Claims:
        return Claims(callers_by_plugin(self.manager, "atom_claim_layer"), self._descriptions)

    @cached_property
    def _stateful_model_types(self) -> Mapping[str, frozenset[str]]:
        return MappingProxyType(self._answers.model_types())


def _selection(only: Sequence[str] | None) -> tuple[tuple[str, ...] | None, str]:
    if only is not None:
        return tuple(only), f"plugins={','.join(only)}"
    value = os.environ.get(PLUGINS_VARIABLE, "").strip()
    if not value:
        return None, ""
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    return names, f"{PLUGINS_VARIABLE}={','.join(names)}"


def _require_known(names: Sequence[str], where: str, known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            named = f"plugin {name!r}, named {where}," if where else f"plugin {name!r}"
            raise DiscoveryError(f"{named} is not installed; installed: {_listed(known)}")


def _why_unusable(record: PluginRecord) -> str:
    verb = "is broken" if record.status is PluginStatus.BROKEN else "is blocked"
    return f"{record.describe()} {verb}: {record.reason}"


def _reasons(records: Sequence[PluginRecord]) -> str | None:
    unusable = [record for record in records if record.status is not PluginStatus.LOADED]
    return "; ".join(_why_unusable(record) for record in unusable) or None


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
