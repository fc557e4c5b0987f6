"""`atom new-plugin`: a working package to start an attention type from.

The template is rendered with jinja2, which the core depends on anyway. What copier and cookiecutter add (questions,
and updates of a package that was generated earlier) has no use here: there is one question, and the generated code is
meant to be rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atom_core.errors import ConfigError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["new_plugin", "render_plugin"]

_LONGEST_NAME = 24
"""So that no generated line is too long."""

_NameArgument = Annotated[
    str, typer.Argument(help="The plugin's name, a lower-case identifier such as 'banded'.", show_default=False)
]
_Directory = Annotated[
    Path | None, typer.Option(help="Where the package goes: a new or empty directory.", show_default="atom-NAME")
]


def new_plugin(name: _NameArgument, directory: _Directory = None) -> None:
    """Make the package of a new plugin: plain causal attention that works, with tests, to change into your own."""
    _check_name(name)
    target = Path(_distribution(name)) if directory is None else directory
    _check_target(target)
    files = render_plugin(name)
    for path, text in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    typer.echo(f"{len(files)} files in {target}. Next:\n  cd {target}\n  pip install -e '.[dev]'\n  pytest")


def render_plugin(name: str) -> dict[str, str]:
    """Render the template.

    Args:
        name: the plugin's name, checked.

    Returns:
        By path in the package, with slashes, the text of every file.
    """
    from jinja2 import Environment, StrictUndefined

    import atom_core
    from atom_core.plugin import CONTRACT_VERSION

    words = [word.capitalize() for word in name.split("_") if word]
    values = {
        "name": name,
        "package": _package(name),
        "distribution": _distribution(name),
        "camel": "".join(words),
        "title": " ".join([words[0], *(word.lower() for word in words[1:])]),
        "core_version": atom_core.__version__,
        "contract": CONTRACT_VERSION,
    }
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    root = resources.files("atom_core") / "templates" / "plugin"
    return {
        path.replace("PACKAGE", _package(name)): environment.from_string(source).render(values)
        for path, source in _sources(root, "")
    }


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    """Paths of the generated files with `PACKAGE` in them, and their templates; `dot_` stands for a leading dot."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = re.sub("^dot_", ".", entry.name)
        if entry.is_dir():
            yield from _sources(entry, f"{prefix}{name}/")
        elif name.endswith(".jinja"):
            yield prefix + name.removesuffix(".jinja"), entry.read_text(encoding="utf-8")


def _check_name(name: str) -> None:
    """Check that a plugin can have this name here.

    Raises:
        ConfigError: it is no lower-case identifier, too long, or taken.
    """
    from atom_core.plugin.discovery import find_installed

    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"{name!r} cannot be a plugin's name here; expected lower-case letters, digits and single underscores, "
            f"a letter first, at most {_LONGEST_NAME} characters, for example 'banded'"
        )
    for plugin in find_installed(None):
        if plugin.name == name:
            raise ConfigError(f"a plugin named {name!r} is installed already: {plugin.place()}; choose another name")
    if find_spec(_package(name)) is not None:
        raise ConfigError(
            f"the package would be named {_package(name)!r}, and a package of this name can be imported already; "
            f"choose another name than {name!r}"
        )


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file; expected a new or empty directory, give one with --directory")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; give a new or empty directory with --directory")


def _package(name: str) -> str:
    return f"atom_{name}"


def _distribution(name: str) -> str:
    return f"atom-{name.replace('_', '-')}"
