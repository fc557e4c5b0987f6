"""Options that several subcommands share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from atom_core.config import EngineConfig
from atom_core.errors import ConfigError

__all__ = [
    "CacheDtype",
    "CacheMemory",
    "Device",
    "DraftModel",
    "Dtype",
    "Eager",
    "Json",
    "KernelChoices",
    "MaxModelLen",
    "MaxNumSeqs",
    "Memory",
    "MemoryFraction",
    "Model",
    "NoPlugins",
    "NumSpecTokens",
    "RandomWeights",
    "Speculation",
    "engine_config",
    "forced_kernels",
    "print_json",
]

Model = Annotated[
    str,
    typer.Argument(help="A directory, a Hugging Face id, a .gguf file, a config.json, or 'demo'.", show_default=False),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
CacheDtype = Annotated[
    str, typer.Option(help="Of paged caches: auto, bfloat16, float8_e4m3fn, ...", show_default="that of --dtype")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Memory = Annotated[
    str | None, typer.Option(help="Bytes for weights and caches, such as 80GiB.", show_default="what is free")
]
CacheMemory = Annotated[str | None, typer.Option(help="Bytes for the caches alone.", show_default="from --memory")]
MemoryFraction = Annotated[
    float | None,
    typer.Option(help="Share of the free memory for weights and caches.", show_default="0.9 on a GPU, 0.25 else"),
]
Eager = Annotated[bool, typer.Option("--eager", help="No captured decode graphs, nothing compiled, no overlap.")]
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
Speculation = Annotated[
    str | None,
    typer.Option(help="Guess tokens: ngram, mtp, or the name of a plugin's proposer.", show_default="off"),
]
DraftModel = Annotated[
    str | None, typer.Option(help="A smaller model of the same vocabulary that guesses tokens.", show_default="none")
]
NumSpecTokens = Annotated[
    int, typer.Option(help="Draft tokens per request and step.", show_default="4 where tokens are guessed")
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
