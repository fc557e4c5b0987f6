"""`atom plan`: how a model's memory would be divided, on the meta device, without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from atom_core.cli.options import (
    CacheDtype,
    DraftModel,
    Dtype,
    Json,
    MaxModelLen,
    MaxNumSeqs,
    Memory,
    Model,
    NoPlugins,
    NumSpecTokens,
    Speculation,
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
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    num_spec_tokens: NumSpecTokens = 0,
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share the model.")] = 1,
    dtype: Dtype = "auto",
    cache_dtype: CacheDtype = "auto",
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
        speculation=speculation,
        draft_model=draft_model,
        num_spec_tokens=num_spec_tokens,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
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
    """By plugin and role, the part of a block and of a slot that one rank holds, 1.0 where each rank holds all."""
    parts = {
        "block": (inspection.all_figures.block_bytes, whole.all_figures.block_bytes),
        "slot": (inspection.all_figures.slot_bytes, whole.all_figures.slot_bytes),
    }
    return {
        name: {part: mine.get(name, 0) / of_all[name] for part, (mine, of_all) in parts.items() if of_all.get(name)}
        for name in inspection.all_figures.requirements
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
    figures = inspection.all_figures
    shares = _shares(inspection, whole or inspection)
    return {
        "model_type": inspection.model_config.model_type,
        "weight_bytes": inspection.all_weight_bytes,
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

    def add(part: str, count: int, sizes: list[int]) -> None:
        """Add a row, and where a second role drafts one for each role below it."""
        table.add_row(part, f"{count:,}", format_bytes(sum(sizes)), format_bytes(count * sum(sizes)))
        for role, size in zip(("model", "draft"), sizes, strict=False) if len(sizes) > 1 else ():
            table.add_row(f"  of the {role}", "", format_bytes(size), format_bytes(count * size))

    roles = [inspection] if inspection.draft is None else [inspection, inspection.draft]
    title = " and ".join(dict.fromkeys(role.model_config.model_type for role in roles))
    table = Table(title=f"memory plan of {title}")
    for heading, justify in (("part", "left"), ("count", "right"), ("each", "right"), ("total", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_row("weights", "", "", format_bytes(inspection.all_weight_bytes))
    for role in roles[1:]:
        table.add_row("  of the draft", "", "", format_bytes(role.weight_bytes))
    figures = [role.figures for role in roles]
    add(f"blocks of {found.block_size} tokens", found.num_blocks, [each.bytes_per_block for each in figures])
    if found.num_groups:
        add("groups of state", found.num_groups, [each.group_bytes for each in figures])
    if found.num_checkpoints:
        add("state checkpoints", found.num_checkpoints, [each.checkpoint_bytes for each in figures])
    if found.workspace_bytes:
        table.add_row("workspace", "", "", format_bytes(found.workspace_bytes))
    longest = f"{found.max_model_len:,}"
    table.add_row("tokens in blocks", f"{found.num_blocks * found.block_size:,}", f"longest request {longest}", "")
    return table
