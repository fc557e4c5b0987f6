"""Entry point of `atom`: bad input gives one line on stderr and exit code 2, a traceback only with --debug."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any

import typer

import atom_core
from atom_core.cli.bench import bench_app
from atom_core.cli.check import check
from atom_core.cli.conformance import conformance
from atom_core.cli.generate import generate
from atom_core.cli.kernels import kernels
from atom_core.cli.new_plugin import new_plugin
from atom_core.cli.plan import plan
from atom_core.cli.plugins import plugins
from atom_core.errors import AtomError

__all__ = ["app", "main"]

_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
"""`ClickException`: typer exports only its subclasses, and brings a click of its own from 0.26 on."""

app = typer.Typer(
    name="atom",
    help="Serve language models whose attention types are plugins.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, plugins, kernels, check, plan, new_plugin, conformance):
    app.command()(command)
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"atom {atom_core.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve language models whose attention types are plugins."""


def main() -> None:
    """Run the command line and exit."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    debug = "--debug" in sys.argv
    try:
        code = app(standalone_mode=False)
    except (AtomError, _USAGE_ERROR) as error:
        if debug:
            raise
        _fail(str(error) if isinstance(error, AtomError) else error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    print(f"atom: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
