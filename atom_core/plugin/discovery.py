"""Finding installed plugins, and the checks that each one must pass before it is used."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import importlib_metadata

from atom_core.errors import DiscoveryError
from atom_core.plugin.inspection import inspect_plugin
from atom_core.plugin.markers import ENTRY_POINT_GROUP

__all__ = [
    "InstalledPlugin",
    "PluginRecord",
    "PluginStatus",
    "blocked_record",
    "find_installed",
    "load_record",
    "normalize_distribution",
]


class PluginStatus(StrEnum):
    """What discovery made of a plugin."""

    LOADED = "loaded"
    BROKEN = "broken"
    """It cannot be used; an error once a model needs it."""
    BLOCKED = "blocked"
    """The user left it out; its module is not imported."""


@dataclass(frozen=True)
class PluginRecord:
    """One plugin as discovery found it.

    Attributes:
        name: the entry point's name.
        distribution: the distribution that brought it; `None` for an object that is not installed.
        version: the distribution's version; `None` for an object that is not installed.
        summary: the plugin's own line; empty unless it is loaded.
        status: what discovery made of it.
        reason: why it is broken or blocked.
        plugin: the plugin object; `None` unless it is loaded.
        hooks: names of the hooks that it implements or wraps.
    """

    name: str
    distribution: str | None
    version: str | None
    summary: str
    status: PluginStatus
    reason: str | None
    plugin: object | None
    hooks: tuple[str, ...]

    def describe(self) -> str:
        """Name plugin, distribution and version, as error messages do."""
        origin = "not installed" if self.distribution is None else f"{self.distribution} {self.version}"
        return f"plugin {self.name!r} ({origin})"


@dataclass(frozen=True)
class InstalledPlugin:
    """One entry point of the group, not imported yet.

    Attributes:
        name: the entry point's name.
        entry_point: how to load it.
        distribution: the distribution's name as it spells it.
        version: the distribution's version.
        location: directory that holds the distribution's metadata.
    """

    name: str
    entry_point: importlib_metadata.EntryPoint
    distribution: str
    version: str
    location: Path

    def place(self) -> str:
        """Name distribution, version and location."""
        return f"{self.distribution} {self.version} at {self.location}"


@dataclass(frozen=True)
class _Distribution:
    name: str
    version: str
    location: Path
    editable_source: Path | None
    entry_points: tuple[importlib_metadata.EntryPoint, ...]

    def is_same_as(self, other: _Distribution) -> bool:
        """Whether two metadata directories describe one installation.

        A directory can be on the path twice, and an editable installation has metadata in the environment as
        well as beside its source. Equal versions at unrelated places are two copies of the code.
        """
        if self.version != other.version or self._points() != other._points():
            return False
        return self.location == other.location or self._is_source_of(other) or other._is_source_of(self)

    def _points(self) -> set[tuple[str, str]]:
        return {(point.name, point.value) for point in self.entry_points}

    def _is_source_of(self, other: _Distribution) -> bool:
        return self.editable_source is not None and other.location.is_relative_to(self.editable_source)


def normalize_distribution(name: str) -> str:
    """Spell a distribution's name in its one normal form, as PEP 503 has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_installed(path: Sequence[str] | None) -> list[InstalledPlugin]:
    """List the entry points of the group, sorted by name; imports none of them.

    Args:
        path: directories to search; `None` for `sys.path`.

    Raises:
        DiscoveryError: two distributions have one name, or two plugins have.
    """
    found: dict[str, InstalledPlugin] = {}
    for distribution in _distributions(sys.path if path is None else path):
        for point in distribution.entry_points:
            plugin = InstalledPlugin(point.name, point, distribution.name, distribution.version, distribution.location)
            if point.name in found:
                raise DiscoveryError(
                    f"plugin name {point.name!r} is used twice: by {found[point.name].place()} and by "
                    f"{plugin.place()}; a plugin's name is unique, uninstall one of the two"
                )
            found[point.name] = plugin
    return sorted(found.values(), key=lambda plugin: plugin.name)


def load_record(installed: InstalledPlugin) -> PluginRecord:
    """Import a plugin and check it; whatever goes wrong is recorded, not raised."""
    try:
        plugin = installed.entry_point.load()
    except Exception as error:  # any code may run at import
        value = installed.entry_point.value
        return _unused(installed, PluginStatus.BROKEN, f"importing {value!r} failed: {type(error).__name__}: {error}")
    try:
        info, hooks = inspect_plugin(installed.name, plugin)
    except DiscoveryError as error:
        return _unused(installed, PluginStatus.BROKEN, str(error))
    except Exception as error:  # looking at attributes may run plugin code
        return _unused(installed, PluginStatus.BROKEN, f"checking it failed: {type(error).__name__}: {error}")
    return PluginRecord(
        installed.name,
        installed.distribution,
        installed.version,
        info.summary,
        PluginStatus.LOADED,
        None,
        plugin,
        hooks,
    )


def blocked_record(installed: InstalledPlugin, reason: str) -> PluginRecord:
    """Record that the user left a plugin out."""
    return _unused(installed, PluginStatus.BLOCKED, reason)


def _unused(installed: InstalledPlugin, status: PluginStatus, reason: str) -> PluginRecord:
    return PluginRecord(installed.name, installed.distribution, installed.version, "", status, reason, None, ())


def _distributions(path: Sequence[str]) -> list[_Distribution]:
    found: dict[str, _Distribution] = {}
    for metadata in importlib_metadata.distributions(path=list(path)):
        points = tuple(metadata.entry_points.select(group=ENTRY_POINT_GROUP))
        if not points:
            continue
        location = Path(str(metadata.locate_file(""))).resolve()
        name, version = _name_and_version(metadata, location)
        distribution = _Distribution(
            name=name,
            version=version,
            location=location,
            editable_source=_editable_source(metadata),
            entry_points=points,
        )
        other = found.setdefault(normalize_distribution(distribution.name), distribution)
        if not other.is_same_as(distribution):
            raise DiscoveryError(
                f"distribution {other.name!r} is installed twice: version {other.version} at {other.location} and "
                f"version {distribution.version} at {distribution.location}; uninstall one, or take its "
                f"directory off the path"
            )
    return [found[name] for name in sorted(found)]


def _name_and_version(metadata: Any, location: Path) -> tuple[str, str]:
    try:
        name, version = metadata.name, metadata.version
    except (FileNotFoundError, KeyError):
        name, version = "", ""
    if not name or not version:
        raise DiscoveryError(
            f"a distribution at {location} brings plugins, but its metadata has no name or no version; reinstall it"
        )
    return name, version


def _editable_source(metadata: Any) -> Path | None:
    """Directory that an editable installation points to, from its direct_url.json (PEP 610)."""
    origin = metadata.origin
    directory = getattr(origin, "dir_info", None)
    if not getattr(directory, "editable", False):
        return None
    return Path(url2pathname(urlparse(origin.url).path)).resolve()
