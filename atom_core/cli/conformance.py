"""`atom conformance`: the invariants of a plugin, each passed, failed or skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from atom_core.cli.options import Json, print_json
from atom_core.errors import ConfigError

if TYPE_CHECKING:
    from atom_core.testing.runner import Outcome

__all__ = ["conformance"]

_STYLES = {"failed": "red", "expected": "yellow", "skipped": "yellow", "passed": "green"}
"""From the worst to the best: a row shows the worst of its configs."""


def conformance(
    plugin: Annotated[str, typer.Argument(help="The name of an installed plugin.", show_default=False)],
    thorough: Annotated[bool, typer.Option("--thorough", help="All models and many more examples.")] = False,
    as_json: Json = False,
) -> int:
    """Run the conformance kit on PLUGIN's tiny models and print a table of invariants; exit code 1 if one fails."""
    try:
        from atom_core.testing.runner import find_module, run_module
    except ModuleNotFoundError as error:
        if error.name not in ("hypothesis", "pytest"):
            raise
        raise ConfigError(f"{error.name} is not installed; run `pip install 'atom-core[testing]'`") from None
    from rich.console import Console

    module = find_module(plugin)
    profile = "thorough" if thorough else "quick"
    console = Console()
    with Console(stderr=True).status(f"{plugin}: {profile} profile") as status:
        outcomes = run_module(module, profile, lambda test: status.update(f"{plugin}: {test}"))
    if as_json:
        print_json([asdict(outcome) for outcome in outcomes])
    else:
        _print(console, plugin, profile, outcomes)
    return int(any(outcome.result == "failed" for outcome in outcomes))


def _print(console: object, plugin: str, profile: str, outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from atom_core.testing.conformance import INVARIANTS

    assert isinstance(console, Console), "the caller made it"
    seconds = sum(outcome.seconds for outcome in outcomes)
    table = Table(title=f"{plugin}: conformance, {profile} profile, {seconds:.0f} s", title_justify="left")
    for heading in ("invariant", "what", "result", "report"):
        table.add_column(heading, overflow="fold")
    rows = [(name, what, [item for item in outcomes if item.invariant == name]) for name, what in INVARIANTS.items()]
    rows.append(("own", "the plugin's own tests", [item for item in outcomes if item.invariant is None]))
    for name, what, items in rows:
        if items:
            worst = next(result for result in _STYLES if any(item.result == result for item in items))
            reports = dict.fromkeys(item.report for item in items if item.result == worst and item.report)
            table.add_row(name, what, f"[{_STYLES[worst]}]{worst}[/]", escape("\n".join(reports)))
    console.print(table)
