"""Options that several subcommands share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from atom_core.config import EngineConfig
from atom_core.errors import ConfigError

__all__ = [
    "CacheMemory",
    "Device",
    "Dtype",
    "Json",
    "KernelChoices",
    "MaxModelLen",
    "MaxNumSeqs",
    "Memory",
    "Model",
    "NoPlugins",
    "RandomWeights",
    "engine_config",
    "forced_kernels",
    "print_json",
]

Model = Annotated[
    str,
    typer.Argument(help="A directory, a Hugging Face id, a .gguf file, a config.json, or 'demo'.", show_default=False),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Memory = Annotated[
    str | None, typer.Option(help="Bytes for weights and caches, such as 80GiB.", show_default="what is free")
]
CacheMemory = Annotated[str | None, typer.Option(help="Bytes for the caches alone.", show_default="from --memory")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Most tokens of a request.", show_default="the model's own limit")
]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests that run at once.")]
RandomWeights = Annotated[
    int | None,
    typer.Option("--random-weights", metavar="SEED", help="Random weights from this seed.", show_default="off"),
]
NoPlugins = Annotated[
    list[str] | None, typer.Option("--no-plugin", metavar="NAME", help="Leave a plugin out; repeatable.")
]
KernelChoices = Annotated[
    list[str] | None, typer.Option("--kernel", metavar="OP=NAME", help="Force a kernel of an op; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def forced_kernels(choices: list[str] | None) -> dict[str, str]:
    """Read `OP=NAME` options.

    Raises:
        ConfigError: an option is not of this form.
    """
    forced = {}
    for choice in choices or ():
        op, separator, name = choice.partition("=")
        if not (op and separator and name):
            raise ConfigError(f"--kernel takes OP=NAME, found {choice!r}")
        forced[op] = name
    return forced


def engine_config(**fields: Any) -> EngineConfig:
    """Make an `EngineConfig`, turning the list options into its types."""
    fields["no_plugins"] = tuple(fields.get("no_plugins") or ())
    fields["kernels"] = forced_kernels(fields.get("kernels"))
    return EngineConfig(**fields)


def print_json(value: Any) -> None:
    """Print a value for programs, exactly once and alone on stdout."""
    typer.echo(json.dumps(value, indent=2, default=str))
