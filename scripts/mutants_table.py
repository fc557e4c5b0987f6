"""Write docs/mutants.md: what each invariant of the conformance kit catches in plugins with a planted bug.

Run from the repository's root: `python scripts/mutants_table.py`. Takes a few minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

HEAD = """# What the kit catches

Written by `python scripts/mutants_table.py`; a test compares it with the list of mutants.

A mutant is a small right plugin (its twin, in `tests/mutants/`) with one planted bug; bugs of the core are planted into
the engine, the scheduler or the block manager that the kit makes. *Must* is the invariant that has to catch it, *caught
by* are all that did when every property ran. Often more than one does: a plugin that sees future tokens, for example,
also changes with the chunking. A plugin whose bytes are wrong is refused by the core itself at startup, so that every
property that starts an engine fails with the core's message. The twins pass everything.

| planted bug | twin | must | caught by | report of that invariant |
|---|---|---|---|---|
"""


def main() -> None:
    """Run every invariant on every mutant and write the table."""
    from atom_core.testing import PROFILE_VARIABLE
    from tests.mutants.planted import MUTANTS, TWINS
    from tests.mutants.trial import reports_of

    os.environ[PROFILE_VARIABLE] = "mutants"
    names = {twin: name for name, twin in TWINS.items()}
    lines = []
    for name, twin in TWINS.items():
        found = reports_of(twin)
        if found:
            raise SystemExit(f"the {name} twin, which is right, is caught: {found}")
    for mutant in MUTANTS:
        found = reports_of(mutant.conformance)
        report = found.get(mutant.invariant)
        if report is None:
            raise SystemExit(
                f"{mutant.bug!r} is not caught by {mutant.invariant}, but by {', '.join(found) or 'nothing'}"
            )
        shown = report if len(report) < 240 else f"{report[:237]}..."
        columns = (mutant.bug, names[mutant.twin], mutant.invariant, ", ".join(found), shown.replace("|", "\\|"))
        lines.append(f"| {' | '.join(columns)} |\n")
        print(f"{mutant.bug}: {', '.join(found)}", flush=True)
    (ROOT / "docs" / "mutants.md").write_text(HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
