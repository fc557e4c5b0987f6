"""Real throw-away distributions in a temporary directory, as pip would leave them there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata

from atom_core.plugin.registry import PluginRegistry

REPOSITORY = Path(__file__).parents[2]

PLUGIN = """
from atom_core import hookimpl
from atom_core.plugin import PluginInfo

class Plugin:
    @hookimpl
    def atom_plugin_info(self):
        return PluginInfo(name={name!r}, summary="A plugin for a test.", contract_version=1)
{hooks}
plugin = Plugin()
"""


def plugin_source(name: str, hooks: str = "", *, head: str = "") -> str:
    """Source of a module with an object `plugin`; `hooks` are further methods, `head` goes first."""
    return head + PLUGIN.format(name=name, hooks=textwrap.indent(textwrap.dedent(hooks), "    "))


@dataclass(frozen=True)
class Site:
    """A directory of installed distributions."""

    root: Path

    def install(
        self,
        distribution: str,
        plugins: Mapping[str, str],
        files: Mapping[str, str],
        *,
        version: str = "0.1.0",
        metadata: str = "dist-info",
        editable_source: Path | None = None,
    ) -> None:
        """Write a distribution.

        Args:
            distribution: its name.
            plugins: entry points, name to `module:attribute`.
            files: file name to source; nothing where the source is elsewhere.
            version: its version.
            metadata: `dist-info`, or `egg-info` as setuptools leaves it beside a source.
            editable_source: where an editable installation points to.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for name, source in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(source)
        stem = distribution.replace("-", "_")
        is_wheel = metadata == "dist-info"
        info = self.root / (f"{stem}-{version}.dist-info" if is_wheel else f"{stem}.egg-info")
        info.mkdir()
        fields = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / ("METADATA" if is_wheel else "PKG-INFO")).write_text(fields)
        points = "".join(f"{name} = {value}\n" for name, value in plugins.items())
        (info / "entry_points.txt").write_text(f"[atom_core]\n{points}")
        if is_wheel:
            (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
        if editable_source is not None:
            origin = {"url": editable_source.as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(origin))

    def install_plugin(self, name: str, source: str | None = None, *, version: str = "0.1.0") -> None:
        """Install `atom-NAME`, one module `atom_NAME_plugin` with the plugin `NAME`."""
        module = f"atom_{name}_plugin"
        files = {f"{module}.py": plugin_source(name) if source is None else source}
        self.install(f"atom-{name}", {name: f"{module}:plugin"}, files, version=version)

    def discover(self, *, only: tuple[str, ...] | None = None, without: tuple[str, ...] = ()) -> PluginRegistry:
        """Run discovery over this directory alone."""
        with importable(self.root):
            return PluginRegistry.discover(only=only, without=without, path=[str(self.root)])

    def run(self, code: str, **environment: str) -> str:
        """Run Python code in a process that sees this directory, and return what it printed."""
        path = os.pathsep.join([str(self.root), str(REPOSITORY)])
        variables = {**os.environ, "PYTHONPATH": path, **environment}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def importable(*roots: Path) -> Iterator[None]:
    """Put directories on `sys.path`; on exit forget them and every module that came from them."""
    before = list(sys.path)
    sys.path[:0] = [str(root) for root in roots]
    importlib.invalidate_caches()
    importlib_metadata.MetadataPathFinder.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and any(Path(file).is_relative_to(root) for root in roots):
                del sys.modules[name]
