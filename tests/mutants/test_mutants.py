"""Every planted bug is caught by the invariant that should catch it, and nothing is caught in the right twins."""

import re
from pathlib import Path

import pytest

from atom_core.testing import INVARIANTS, PROFILE_VARIABLE
from tests.mutants.planted import MUTANTS, TWINS
from tests.mutants.trial import report_of

TABLE = Path(__file__).parents[2] / "docs" / "mutants.md"
NAMED_IN_THE_ISSUE = """
state not reset on reuse; resumes from a recycled slot; num_computed ignored (always starts fresh); conv tail of a short
chunk taken from the wrong rows; write through the read slot; window off by one; window ring exactly the window with
drafts in flight; sink added twice; key and value dims swapped when equal; per-layer as_strided aliasing; int32 offset
overflow; bytes declared without the scale tensor; allocates one layer too many; future chunk tokens visible in sparse
selection; per-sequence instead of per-token causal bound; batch order assumed sorted; padding rows written to block 0;
plain requests dropped from the slot list so that rows shift; sharded head count rounded down; prefix hit without
restoring state; checkpoint published before its bytes are copied; fork sharing one mutable slot; metadata kept from the
last step; claims a module that is not its own
"""


@pytest.fixture(autouse=True)
def profile(monkeypatch):
    monkeypatch.setenv(PROFILE_VARIABLE, "mutants")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_a_planted_bug_is_caught_by_its_invariant(mutant):
    report = report_of(mutant.conformance, mutant.invariant)
    assert report is not None, "the bug lives"
    assert report.startswith(f"{mutant.invariant} "), report


@pytest.mark.parametrize("invariant", INVARIANTS)
@pytest.mark.parametrize("twin", TWINS)
def test_nothing_is_caught_in_a_right_twin(twin, invariant):
    assert report_of(TWINS[twin], invariant) is None


def test_the_bugs_that_the_issue_names_are_there():
    named = [bug.strip() for bug in " ".join(NAMED_IN_THE_ISSUE.split()).split(";")]
    assert [mutant.bug for mutant in MUTANTS if mutant.named] == named
    assert len(named) == 24


def test_every_invariant_catches_something():
    assert {mutant.invariant for mutant in MUTANTS} == set(INVARIANTS)


def test_every_mutant_is_another_class_than_its_twin_in_one_thing():
    for mutant in MUTANTS:
        assert mutant.twin in TWINS.values()
        own = {name for name in vars(mutant.conformance) if not name.startswith("__") and name != "_subjects"}
        assert own in ({"plugin"}, {"wrap_core"}), mutant.bug


def test_the_table_in_the_docs_is_of_these_mutants():
    """`python scripts/mutants_table.py` writes it; what it says was caught includes what must be caught."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (I\d+) \| (.+?) \| ", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    names = {twin: name for name, twin in TWINS.items()}
    assert [row[:3] for row in rows] == [(mutant.bug, names[mutant.twin], mutant.invariant) for mutant in MUTANTS]
    for bug, _, invariant, caught in rows:
        assert invariant in caught.split(", "), bug
