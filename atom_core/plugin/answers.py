"""Answers: the hooks that every plugin is asked once, each answer with the plugin that gave it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atom_core.errors import AtomError, DiscoveryError, PluginError
from atom_core.plugin.discovery import PluginRecord
from atom_core.plugin.inspection import stateful_types
from atom_core.plugin.manager import callers_by_plugin

if TYPE_CHECKING:
    import pluggy

__all__ = ["Answers"]


class Answers:
    """Asks the loaded plugins and checks what they return.

    Args:
        manager: holds the loaded plugins.
        records: by name, the record of each.
    """

    def __init__(self, manager: pluggy.PluginManager, records: Mapping[str, PluginRecord]) -> None:
        self._manager = manager
        self._records = records

    def ask(self, hook: str, **arguments: object) -> Iterator[tuple[PluginRecord, Any]]:
        """Ask every plugin that implements a hook, separately.

        Raises:
            PluginError: a plugin failed; the message names it.
        """
        for name, caller in callers_by_plugin(self._manager, hook).items():
            record = self._records[name]
            try:
                answers = caller(**arguments)
            except AtomError:
                raise
            except Exception as error:
                raise PluginError(f"{record.describe()}: {hook} failed: {type(error).__name__}: {error}") from error
            for answer in answers:
                yield record, answer

    def items(self, hook: str, kind: type[Any]) -> Iterator[tuple[PluginRecord, Any]]:
        """Ask for sequences of one type, and chain them.

        Raises:
            PluginError: an answer is something else.
        """
        for record, answer in self.ask(hook):
            if not isinstance(answer, Sequence) or not all(isinstance(item, kind) for item in answer):
                raise _wrong(record, hook, answer, f"a sequence of {kind.__name__}")
            for item in answer:
                yield record, item

    def merged(self, hook: str, noun: str, is_valid: Callable[[Any], bool], **arguments: object) -> Mapping[str, Any]:
        """Ask for mappings, and merge them.

        Args:
            hook: the hook.
            noun: what a key is called in messages.
            is_valid: whether a value is acceptable.
            arguments: the hook's arguments.

        Raises:
            PluginError: an answer is no mapping from strings to valid values, or two disagree on a key.
        """
        merged: dict[str, tuple[Any, PluginRecord]] = {}
        for record, answer in self.ask(hook, **arguments):
            if not isinstance(answer, Mapping):
                raise _wrong(record, hook, answer, f"a mapping by {noun}")
            for key, value in answer.items():
                if not isinstance(key, str) or not is_valid(value):
                    raise _wrong(record, hook, {key: value}, f"a {noun} and its value, two strings")
                if key in merged and merged[key][0] != value:
                    raise PluginError(
                        f"{noun} {key!r} of {hook} is brought by {merged[key][1].describe()} and by "
                        f"{record.describe()}; leave one out with --no-plugin NAME"
                    )
                merged[key] = (value, record)
        return {key: value for key, (value, _) in merged.items()}

    def model_types(self) -> dict[str, frozenset[str]]:
        """Ask for the stateful model types, by plugin.

        Raises:
            PluginError: a plugin answered for another name, or not with a collection of strings.
        """
        registered: dict[str, frozenset[str]] = {}
        for record, answer in self.ask("atom_model_types"):
            try:
                model_types = stateful_types(record.name, answer)
            except DiscoveryError as error:
                raise PluginError(f"{record.describe()}: {error}") from error
            registered[record.name] = registered.get(record.name, frozenset()) | model_types
        return registered


def _wrong(record: PluginRecord, hook: str, found: object, expected: str) -> PluginError:
    return PluginError(
        f"{record.describe()}: {hook} returned {found!r}, expected {expected}; fix the plugin or leave it out "
        f"with --no-plugin {record.name}"
    )
