"""`atom plan`: how a model's memory would be divided, on the meta device, without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from atom_core.cli.options import (
    Dtype,
    Json,
    MaxModelLen,
    MaxNumSeqs,
    Memory,
    Model,
    NoPlugins,
    engine_config,
    print_json,
)

if TYPE_CHECKING:
    from atom_core.cache.plan import CachePlan
    from atom_core.engine.startup import Inspection

__all__ = ["plan", "plan_dict", "plan_table"]


def plan(
    model: Model,
    memory: Memory = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per block.", show_default="the least that fits")
    ] = None,
    num_spec_tokens: Annotated[int, typer.Option(help="Draft tokens per request and step.")] = 0,
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share the model.")] = 1,
    dtype: Dtype = "auto",
    no_plugin: NoPlugins = None,
    as_json: Json = False,
) -> None:
    """Show how MODEL's memory would be divided: weights, blocks, state; no weights are read."""
    from dataclasses import replace

    from atom_core.engine.startup import inspect_model, make_registry

    config = engine_config(
        model=model,
        memory=memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        num_spec_tokens=num_spec_tokens,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        no_plugins=no_plugin,
        random_weights=0,
    )
    registry = make_registry(config)
    inspection = inspect_model(config, registry)
    whole = inspection
    if tensor_parallel_size > 1:
        alone = replace(config, tensor_parallel_size=1, block_size=inspection.block_size)
        whole = inspect_model(alone, registry)
    found = inspection.plan()
    if as_json:
        print_json(plan_dict(inspection, found, whole))
        return
    from rich.console import Console

    console = Console()
    console.print(plan_table(inspection, found))
    if whole is not inspection:
        console.print(f"on each of {tensor_parallel_size} ranks")
        for name, shares in _shares(inspection, whole).items():
            for part, share in shares.items():
                console.print(f"  {name} {part}: {_share_words(share, tensor_parallel_size)}")
    for warning in (*inspection.warnings, *found.warnings):
        console.print(f"[yellow]warning[/yellow]  {warning}")


def _shares(inspection: Inspection, whole: Inspection) -> dict[str, dict[str, float]]:
    """By plugin, the part that one rank holds of a block and of a slot, 1.0 where each rank holds all of it."""
    parts = {
        "block": (inspection.figures.block_bytes, whole.figures.block_bytes),
        "slot": (inspection.figures.slot_bytes, whole.figures.slot_bytes),
    }
    return {
        name: {part: mine.get(name, 0) / of_all[name] for part, (mine, of_all) in parts.items() if of_all.get(name)}
        for name in inspection.figures.requirements
    }


def _share_words(share: float, tp_size: int) -> str:
    if share == 1:
        return "replicated, every rank holds all of it"
    divided = "divided" if share * tp_size == 1 else "partly divided, partly replicated"
    return f"{divided}, a rank holds {share:.4g} of it"


def plan_dict(inspection: Inspection, found: CachePlan, whole: Inspection | None = None) -> dict[str, Any]:
    """The plan for programs: what each plugin needs, and the division.

    Args:
        inspection: of the model on one rank.
        found: its plan.
        whole: the inspection for a single rank, against which shares are given; `inspection` itself by default.
    """
    figures = inspection.figures
    shares = _shares(inspection, whole or inspection)
    return {
        "model_type": inspection.model_config.model_type,
        "weight_bytes": inspection.weight_bytes,
        "block_size": inspection.block_size,
        "bytes_per_token": sum(figures.block_bytes.values()) / inspection.block_size,
        "plugins": {
            name: {
                "block_bytes": figures.block_bytes.get(name, 0),
                "slot_bytes": figures.slot_bytes.get(name, 0),
                "slots_per_req": figures.slots_per_req.get(name, 0),
                "rank_share": shares[name],
            }
            for name in figures.requirements
        },
        "plan": found.to_dict(),
        "warnings": [*inspection.warnings, *found.warnings],
    }


def plan_table(inspection: Inspection, found: CachePlan) -> Any:
    """The plan for people, a `rich` table."""
    from rich.table import Table

    from atom_core.engine.memory import format_bytes

    table = Table(title=f"memory plan of {inspection.model_config.model_type}")
    for heading, justify in (("part", "left"), ("count", "right"), ("each", "right"), ("total", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_row("weights", "", "", format_bytes(inspection.weight_bytes))
    table.add_row(
        f"blocks of {found.block_size} tokens",
        f"{found.num_blocks:,}",
        format_bytes(found.block_bytes),
        format_bytes(found.num_blocks * found.block_bytes),
    )
    if found.num_groups:
        table.add_row(
            "groups of state",
            f"{found.num_groups:,}",
            format_bytes(found.group_bytes),
            format_bytes(found.num_groups * found.group_bytes),
        )
    if found.num_checkpoints:
        table.add_row(
            "state checkpoints",
            f"{found.num_checkpoints:,}",
            format_bytes(found.checkpoint_bytes),
            format_bytes(found.num_checkpoints * found.checkpoint_bytes),
        )
    if found.workspace_bytes:
        table.add_row("workspace", "", "", format_bytes(found.workspace_bytes))
    longest = f"{found.max_model_len:,}"
    table.add_row("tokens in blocks", f"{found.num_blocks * found.block_size:,}", f"longest request {longest}", "")
    return table
