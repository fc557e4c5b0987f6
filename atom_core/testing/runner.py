"""Running a plugin's conformance module outside of its tests, and what came of it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from atom_core.errors import ConfigError
from atom_core.plugin.discovery import find_installed
from atom_core.plugin.registry import PluginRegistry
from atom_core.testing.conformance import NOT_TRIED, AttentionConformance, invariant_of
from atom_core.testing.profile import PROFILE_VARIABLE

__all__ = ["Outcome", "find_module", "run_class", "run_module"]


@dataclass(frozen=True)
class Outcome:
    """What came of one property on one config.

    Attributes:
        invariant: `I1` to `I15`; `None` for a test that the plugin added.
        test: the test's name with the config.
        result: `passed`, `failed`, `skipped` or `expected` (failed, as its plugin says).
        report: the violation, the reason, or what could not be tried; empty for plain success.
        seconds: how long it took.
    """

    invariant: str | None
    test: str
    result: str
    report: str
    seconds: float


def find_module(plugin: str) -> ModuleType:
    """Import the module `conformance` of the package that holds a plugin's entry point.

    Raises:
        DiscoveryError: there is no such plugin, or it is broken.
        ConfigError: its package has no such module, or the module no subclass of `AttentionConformance`.
    """
    PluginRegistry.discover(only=None).require(plugin)
    entry = next(found.entry_point for found in find_installed(None) if found.name == plugin)
    module = importlib.import_module(entry.module)
    package = entry.module if hasattr(module, "__path__") else entry.module.rpartition(".")[0]
    if not package:
        raise ConfigError(
            f"plugin {plugin!r} is in the module {entry.module}, which is in no package; put it into a package, with "
            f"the module conformance beside it, see docs/conformance.md"
        )
    name = f"{package}.conformance"
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(
            f"plugin {plugin!r} has no module {name}; expected one with a subclass of AttentionConformance that names "
            f"its tiny models, see docs/conformance.md"
        ) from None
    if not _classes(found):
        raise ConfigError(f"{name} has no subclass of AttentionConformance whose name starts with Test")
    return found


def run_module(module: ModuleType, profile: str, on_start: Callable[[str], None]) -> list[Outcome]:
    """Run every property of the classes of a conformance module.

    Args:
        module: from `find_module`.
        profile: `quick` or `thorough`.
        on_start: told the name of each test as it starts.

    Raises:
        ConfigError: the module cannot be collected.
    """
    return [outcome for item in _classes(module) for outcome in run_class(item, profile, on_start)]


def run_class(
    conformance: type[AttentionConformance],
    profile: str,
    on_start: Callable[[str], None] = lambda _: None,
    only: str | None = None,
) -> list[Outcome]:
    """Run the properties of one class.

    Args:
        conformance: a subclass of `AttentionConformance`.
        profile: `quick` or `thorough`.
        on_start: told the name of each test as it starts.
        only: the one invariant to run, `I4`, or `own` for the tests that the plugin added; all when `None`.

    Raises:
        ConfigError: the class cannot be collected.
    """
    watcher = _Watcher(conformance, on_start, only)
    arguments = ["-p", "no:terminal", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", os.curdir]
    with _environment({PROFILE_VARIABLE: profile, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}):
        code = pytest.main([*arguments, __file__], plugins=[watcher])
    if watcher.problem is not None:
        raise ConfigError(f"{conformance.__name__} cannot be run: {watcher.problem}")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not watcher.outcomes:
        raise ConfigError(f"{conformance.__name__} ran no property (pytest exit code {int(code)})")
    return watcher.outcomes


class _Watcher:
    """A pytest plugin: collects one class, and keeps what its tests gave."""

    def __init__(
        self, conformance: type[AttentionConformance], on_start: Callable[[str], None], only: str | None
    ) -> None:
        self._class = conformance
        self._on_start = on_start
        self._only = only
        self.outcomes: list[Outcome] = []
        self.problem: str | None = None

    def pytest_collect_file(self, file_path: Any, parent: Any) -> Any:
        """Collect the class in place of this file."""
        collector = _ClassFile.from_parent(parent, path=file_path)
        collector.conformance = self._class
        return collector

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember why nothing could be collected."""
        if report.failed:
            self.problem = str(report.longrepr).strip().splitlines()[-1]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the invariant that was asked for."""
        if self._only is not None:
            items[:] = [item for item in items if (invariant_of(item.name) or "own") == self._only]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell that a test starts."""
        self._on_start(nodeid.rpartition("::")[2])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep the outcome, with the text of the exception alone."""
        report = yield
        if report.when == "call" or report.outcome != "passed":
            result: str = report.outcome
            text = "; ".join(str(value) for name, value in item.user_properties if name == NOT_TRIED)
            if hasattr(report, "wasxfail"):
                result, text = "expected", report.wasxfail.removeprefix("reason: ")
            elif call.excinfo is not None:
                text = str(call.excinfo.value) or type(call.excinfo.value).__name__
            outcome = Outcome(
                invariant_of(item.name), item.name, result, text.splitlines()[0] if text else "", report.duration
            )
            self.outcomes.append(outcome)
        return report


class _ClassFile(pytest.Module):
    """A module that has one class, whatever file it was made from."""

    conformance: type[AttentionConformance]

    def _getobj(self) -> ModuleType:
        module = ModuleType("conformance")
        module.__dict__["Test"] = self.conformance  # a name that pytest collects
        return module


def _classes(module: ModuleType) -> list[type[AttentionConformance]]:
    return [
        item
        for name, item in vars(module).items()
        if name.startswith("Test") and isinstance(item, type) and issubclass(item, AttentionConformance)
    ]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
