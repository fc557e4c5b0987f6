"""AttentionConformance: what a plugin's tests subclass; every invariant is one property with a name and a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from atom_core.errors import ConfigError
from atom_core.plugin.registry import PluginRegistry
from atom_core.testing.models import lively_model, stock_model
from atom_core.testing.profile import Profile
from atom_core.testing.properties import kernels, layout, pools, serving, steps, writes
from atom_core.testing.report import Violation
from atom_core.testing.subject import Subject

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

__all__ = ["INVARIANTS", "NOT_TRIED", "AttentionConformance", "invariant_of"]

NOT_TRIED = "not tried"
"""Name of the pytest property under which a passed test says what it could not try, and why."""

INVARIANTS: Mapping[str, str] = {
    "I1": "declared bytes = allocated bytes",
    "I2": "writes of layers and requests never overlap",
    "I3": "NaN in unused caches changes nothing",
    "I4": "one shot = any chunking = token by token",
    "I5": "the rest of the batch changes nothing",
    "I6": "preempted = never preempted, reused = fresh",
    "I7": "prefix hit = cold",
    "I8": "later tokens never change earlier outputs",
    "I9": "drafts with any acceptance = sequential",
    "I10": "padding changes nothing",
    "I11": "pools keep their promises and leak nothing",
    "I12": "every kernel = its reference",
    "I13": "sharded = unsharded",
    "I14": "output = transformers' own",
    "I15": "every step gets on",
}
"""By name, each invariant in a few words."""

_MAY_SET = frozenset(
    "plugin needs configs make_model oracle tolerance max_tokens num_quick_configs expected_failures wrap_core".split()
)


def invariant_of(test_name: str) -> str | None:
    """The invariant of a property's test, `I4` for `test_i04_chunking[plain]`; `None` for any other test."""
    number = test_name.removeprefix("test_i")[:2]
    return f"I{int(number)}" if test_name.startswith("test_i") and number.isdecimal() else None


class AttentionConformance:
    """The invariants of DESIGN section 6 for one plugin; subclass it in `PACKAGE/conformance.py`.

    A subclass sets what is listed here and nothing else of the kit: a property that it overrides or deletes is an
    error when the class is made.

    Attributes:
        plugin: the plugin object.
        needs: further plugins that the models need: names of installed ones, or plugin objects.
        tolerance: largest error of float32 logits, relative to the largest logit or 1.
        max_tokens: longest text that properties try; make it pass every window and a few blocks.
        num_quick_configs: the quick profile runs the first so many configs, the thorough one all.
        expected_failures: by invariant (`I9`), why it does not hold; it must then fail, and the reason is shown.
    """

    plugin: ClassVar[Any]
    needs: ClassVar[Sequence[Any]] = ()
    tolerance: ClassVar[float] = 2e-4
    max_tokens: ClassVar[int] = 64
    num_quick_configs: ClassVar[int] = 2
    expected_failures: ClassVar[Mapping[str, str]] = {}

    _subjects: ClassVar[dict[tuple[str, str], Subject]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a class that weakens the kit.

        Raises:
            ConfigError: it overrides or deletes a property, or names an invariant that there is not.
        """
        super().__init_subclass__(**arguments)
        cls._subjects = {}
        cls._require_whole()
        unknown = sorted(set(cls.expected_failures) - set(INVARIANTS))
        if unknown or not all(cls.expected_failures.values()):
            raise ConfigError(
                f"{cls.__name__}.expected_failures names {', '.join(unknown) or 'an invariant without a reason'}; "
                f"expected invariants from I1 to I15, each with a reason"
            )

    @classmethod
    def configs(cls) -> Mapping[str, PreTrainedConfig]:
        """Tiny transformers configs of the plugin's models by name, the most telling ones first.

        A plugin that brings nothing but kernels returns none; then only I12 runs.
        """
        raise NotImplementedError(f"{cls.__name__} must implement configs()")

    def make_model(self, config: PreTrainedConfig) -> nn.Module:
        """Build a float32 model with random weights that make every part matter."""
        return lively_model(config)

    def oracle(self, model: nn.Module) -> nn.Module:
        """Make what gives the right logits: a copy of the model with transformers' own attention.

        Override it for attention that transformers does not have: put plain modules into a copy of the model.
        """
        return stock_model(model)

    def wrap_core(self, part: Any) -> None:
        """Take an engine, a scheduler or a block manager that the kit made, before it is used.

        For tests of the kit itself, which plant bugs there; a plugin leaves it alone.
        """

    def test_i01_bytes(self, config_name: str) -> None:
        """I1: declared bytes = allocated bytes, for every config, dtype and shard."""
        self._check("I1", config_name, layout.declared_bytes)

    def test_i02_writes(self, config_name: str) -> None:
        """I2: two layers' writes never overlap; two requests' writes never overlap."""
        self._check("I2", config_name, writes.disjoint_writes)

    def test_i03_poison(self, config_name: str) -> None:
        """I3: caches filled with NaN before use change nothing."""
        self._check("I3", config_name, steps.poison)

    def test_i04_chunking(self, config_name: str) -> None:
        """I4: one-shot prefill = any chunking of it = token-by-token decode."""
        self._check("I4", config_name, steps.chunking)

    def test_i05_batch(self, config_name: str) -> None:
        """I5: a request's output depends neither on what else is in the batch nor on its place in it."""
        self._check("I5", config_name, steps.batch_invariance)

    def test_i06_preemption(self, config_name: str) -> None:
        """I6: preempt and resume = never preempted. Finish and reuse of the group = fresh engine."""
        self._check("I6", config_name, serving.preemption)

    def test_i07_prefix(self, config_name: str) -> None:
        """I7: prefix hit = cold, for every prompt length modulo block size and prompts sharing any prefix."""
        self._check("I7", config_name, serving.prefix_hits, unless=serving.uncacheable)

    def test_i08_causality(self, config_name: str) -> None:
        """I8: perturbing a later token never changes an earlier output."""
        self._check("I8", config_name, steps.causality)

    def test_i09_drafts(self, config_name: str) -> None:
        """I9: verify k drafts with any acceptance = sequential decode; also a spec step before one without drafts."""
        self._check("I9", config_name, steps.verification, unless=steps.unsupported_drafts)

    def test_i10_padding(self, config_name: str, record_property: Callable[[str, object], None]) -> None:
        """I10: garbage in padding rows changes nothing; graph replay = eager."""

        def check(subject: Subject) -> None:
            steps.padding(subject)
            reason = serving.graph_replay(subject)
            _tell(record_property, [reason] if reason else [])

        self._check("I10", config_name, check)

    def test_i11_pools(self, config_name: str) -> None:
        """I11: `can_allocate` keeps its promise, a refusal has no side effects, nothing leaks."""
        self._check("I11", config_name, pools.allocation)

    def test_i12_kernels(self, config_name: str | None, record_property: Callable[[str, object], None]) -> None:
        """I12: every kernel of an op = its reference within tolerance; indices past 2^31 elements are right."""

        def check(subject: Subject | None) -> None:
            not_tried: list[str] = []
            if subject is None or config_name == next(iter(self.configs())):
                cases = {} if subject is None else subject.driver().kernel_cases
                registry, seeds = PluginRegistry.of(self._plugins()), Profile.current().seeds
                not_tried += kernels.kernels_equal_references(registry, self._plugin_name(), seeds, cases)
            reason = None if subject is None else kernels.large_offsets(subject)
            _tell(record_property, [*not_tried, *([reason] if reason else [])])

        self._check("I12", config_name, check)

    def test_i13_sharding(self, config_name: str, record_property: Callable[[str, object], None]) -> None:
        """I13: sharded over ranks = unsharded, as far as the layouts tell."""

        def check(subject: Subject) -> None:
            _tell(record_property, layout.sharded_bytes(subject))

        self._check("I13", config_name, check)

    def test_i14_oracle(self, config_name: str) -> None:
        """I14: output = transformers' own for the same weights."""
        self._check("I14", config_name, serving.oracle)

    def test_i15_progress(self, config_name: str) -> None:
        """I15: every row has a token, every running request gets on, no step is empty while there is work."""
        self._check("I15", config_name, pools.progress)

    @pytest.fixture
    def subject(self, config_name: str) -> Subject:
        """One model under test with its plugins; for a subclass's own tests, which it may add."""
        return self._subject(config_name)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every property on every config."""
        if "config_name" not in metafunc.fixturenames:
            return
        hiding = {mark.name for mark in metafunc.definition.iter_markers()} & {"skip", "skipif", "xfail"}
        if hiding and invariant_of(metafunc.function.__name__):
            raise ConfigError(
                f"{type(self).__name__} is marked {', '.join(sorted(hiding))}, which would hide a property; use "
                f"expected_failures with a reason"
            )
        self._require_whole()
        names = list(self.configs())
        if not Profile.current().all_configs:
            names = names[: self.num_quick_configs]
        if names:
            metafunc.parametrize("config_name", names)
            return
        needs_none = metafunc.function.__name__ == "test_i12_kernels"
        marks = () if needs_none else (pytest.mark.skip(reason="needs a model, and the plugin has none"),)
        metafunc.parametrize("config_name", [pytest.param(None, id="no model", marks=marks)])

    @classmethod
    def _require_whole(cls) -> None:
        for name, own in vars(AttentionConformance).items():
            if name in _MAY_SET or name.startswith("__") or name == "_subjects":
                continue
            if any(name in vars(base) and vars(base)[name] is not own for base in cls.__mro__):
                raise ConfigError(
                    f"{cls.__name__} overrides {name} of AttentionConformance, which would weaken the kit; a property "
                    f"that does not hold goes into expected_failures with its reason. A subclass may set: "
                    f"{', '.join(sorted(_MAY_SET - {'wrap_core'}))}"
                )

    def _check(
        self,
        invariant: str,
        config_name: str | None,
        check: Callable[[Any], Any],
        unless: Callable[[Subject], str | None] | None = None,
    ) -> None:
        """Run one property on one config, and see to expected failures; whatever goes wrong is a violation."""
        expected = self.expected_failures.get(invariant)
        try:
            subject = None if config_name is None else self._subject(config_name)
            reason = unless(subject) if unless is not None and subject is not None else None
            if reason is None:
                check(subject)
        except Exception as error:
            if expected is not None:
                pytest.xfail(f"{expected} ({error})")
            if isinstance(error, Violation):
                raise
            raise Violation(f"{invariant}: {type(error).__name__}: {error}") from error
        if reason is not None:
            pytest.skip(reason)
        if expected is not None:
            pytest.fail(f"{invariant} holds, but is expected to fail: {expected}; take it out of expected_failures")

    def _subject(self, config_name: str) -> Subject:
        profile = Profile.current()
        key = config_name, profile.name
        if key not in self._subjects:
            self._subjects[key] = Subject(
                name=config_name,
                plugin=self._plugin_name(),
                plugins=self._plugins(),
                model=self.make_model(self.configs()[config_name]),
                make_oracle=self.oracle,
                wrap=self.wrap_core,
                tolerance=self.tolerance,
                max_tokens=self.max_tokens,
                profile=profile,
            )
        return self._subjects[key]

    def _plugin_name(self) -> str:
        name: str = self.plugin.atom_plugin_info().name
        return name

    def _plugins(self) -> dict[str, object]:
        plugins = {self._plugin_name(): self.plugin}
        installed = [item for item in self.needs if isinstance(item, str)]
        found = PluginRegistry.discover(only=installed) if installed else None
        for item in self.needs:
            if isinstance(item, str):
                assert found is not None, "a name was looked up"
                plugins[item] = found.require(item).plugin
            else:
                plugins[item.atom_plugin_info().name] = item
        return plugins


def _tell(record_property: Callable[[str, object], None], notes: Sequence[str]) -> None:
    """Say what could not be tried: in the report of the test, and in what it prints."""
    for note in notes:
        record_property(NOT_TRIED, note)
        print(f"not tried: {note}")
