"""The class that plugins subclass: it cannot be weakened unseen, and says what it found in a line."""

import re
from pathlib import Path

import pytest

from atom_core.errors import ConfigError
from atom_core.testing import INVARIANTS, PROFILE_VARIABLE, AttentionConformance, Profile, Violation
from atom_core.testing import conformance as module
from atom_core.testing.conformance import invariant_of
from atom_core.testing.runner import run_class
from tests.mutants.paged import TestPaged as Paged
from tests.mutants.planted import MUTANTS
from tests.mutants.trial import PROPERTIES

DOCS = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
CAUSAL = next(mutant.conformance for mutant in MUTANTS if mutant.bug.startswith("per-sequence"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv(PROFILE_VARIABLE, "mutants")


def test_there_is_one_property_for_each_invariant():
    assert sorted(PROPERTIES, key=lambda name: int(name[1:])) == list(INVARIANTS)
    assert invariant_of("test_i04_chunking[plain]") == "I4"
    assert invariant_of("test_something_else") is None


@pytest.mark.parametrize("name", [*PROPERTIES.values(), "_check", "_subject", "pytest_generate_tests", "subject"])
def test_overriding_or_deleting_a_part_of_the_kit_is_an_error(name):
    with pytest.raises(ConfigError, match=f"TestWeak overrides {name} of AttentionConformance"):
        type("TestWeak", (Paged,), {name: lambda self, config_name: None})
    with pytest.raises(ConfigError, match="would weaken the kit"):
        type("TestWeak", (Paged,), {name: None})


def test_a_mixin_cannot_weaken_it_either():
    class Mixin:
        def test_i08_causality(self, config_name):
            pass

    with pytest.raises(ConfigError, match="overrides test_i08_causality"):
        type("TestWeak", (Mixin, Paged), {})


def test_a_property_that_is_replaced_later_is_found_when_the_class_is_collected():
    weak = type("TestWeak", (Paged,), {})
    weak.test_i08_causality = None
    with pytest.raises(ConfigError, match="overrides test_i08_causality"):
        run_class(weak, "mutants")


@pytest.mark.parametrize(
    "mark", [pytest.mark.skip, pytest.mark.xfail, pytest.mark.skipif(True, reason="slow")], ids=str
)
def test_a_mark_that_hides_properties_is_an_error(mark):
    with pytest.raises(ConfigError, match="would hide a property"):
        run_class(mark(type("TestHidden", (Paged,), {})), "mutants", only="I1")


def test_expected_failures_need_an_invariant_and_a_reason():
    with pytest.raises(ConfigError, match="names I16"):
        type("TestOdd", (Paged,), {"expected_failures": {"I16": "why"}})
    with pytest.raises(ConfigError, match="without a reason"):
        type("TestOdd", (Paged,), {"expected_failures": {"I9": ""}})


def test_an_expected_failure_shows_its_reason_and_what_was_found():
    expecting = type("TestExpecting", (CAUSAL,), {"expected_failures": {"I8": "bidirectional by design"}})
    (outcome,) = run_class(expecting, "mutants", only="I8")
    assert outcome.result == "expected"
    assert outcome.report.startswith("bidirectional by design (I8 causality: ")


def test_an_expected_failure_that_passes_is_a_failure():
    expecting = type("TestExpecting", (Paged,), {"expected_failures": {"I8": "bidirectional by design"}})
    (outcome,) = run_class(expecting, "mutants", only="I8")
    assert outcome.result == "failed"
    assert outcome.report.startswith("I8 holds, but is expected to fail: bidirectional by design")


def test_a_report_is_one_line_with_the_smallest_example(monkeypatch):
    """Shrinking ends at the shortest prompt that the bug shows in."""
    monkeypatch.setenv(PROFILE_VARIABLE, "quick")
    (outcome,) = run_class(CAUSAL, "quick", only="I8")
    assert outcome.result == "failed"
    assert re.fullmatch(
        r"I8 causality: changing the tokens from 1 on of a chunk of tokens 0 to 1 changes earlier outputs: it differs "
        r"at token 0, max error \S+, layers 0\.\.",
        outcome.report,
    )


def test_own_tests_run_on_every_config_with_everything_that_properties_use():
    class TestMore(Paged):
        def test_of_its_own(self, subject):
            prompt = subject.text(9)
            tokens, trace = subject.generated(prompt, 2)
            assert subject.driver(num_spec_tokens=2).states == {}
            assert trace.logits.shape == (10, subject.vocab_size) == subject.expected([*prompt, tokens[0]]).shape
            assert subject.engine(max_num_seqs=2).plan.block_size == subject.block_size

    outcomes = [outcome for outcome in run_class(TestMore, "mutants", only="own") if outcome.invariant is None]
    assert [(outcome.test, outcome.result) for outcome in outcomes] == [("test_of_its_own[tiny]", "passed")]


def test_a_plugin_of_kernels_alone_runs_the_kernels_alone():
    class TestKernels(AttentionConformance):
        plugin = Paged.plugin

        @classmethod
        def configs(cls):
            return {}

    outcomes = run_class(TestKernels, "mutants")
    assert {outcome.invariant: outcome.result for outcome in outcomes if outcome.result != "skipped"} == {
        "I12": "passed"
    }


def test_an_unknown_profile_is_an_error(monkeypatch):
    monkeypatch.setenv(PROFILE_VARIABLE, "slow")
    with pytest.raises(ConfigError, match="profiles: quick, thorough"):
        Profile.current()


def test_errors_of_the_core_are_violations_too():
    from tests.mutants.planted import OneLayerMore

    wrong = type("TestWrong", (Paged,), {"plugin": OneLayerMore()})
    with pytest.raises(Violation, match=r"^I4: LayoutError: plugin 'paged'"):
        wrong().test_i04_chunking("tiny")


def test_the_docs_list_what_a_subclass_may_set_and_every_invariant():
    table = DOCS.split("## What a subclass sets")[1].split("##")[0]
    listed = {name.split("(")[0] for name in re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)}
    assert listed == module._MAY_SET - {"wrap_core"}
    assert re.findall(r"^\| (I\d+) ", DOCS, flags=re.MULTILINE) == list(INVARIANTS)


def test_the_docs_name_the_public_parts():
    import atom_core.testing

    parts = DOCS.split("## Your own tests")[1]
    named = set(re.findall(r"`([A-Za-z_]+)`", parts))
    public = set(atom_core.testing.__all__) - {"AttentionConformance", "INVARIANTS", "PROFILE_VARIABLE", "Profile"}
    assert public - {"Subject"} <= named
