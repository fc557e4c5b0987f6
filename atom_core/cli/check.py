"""`atom check`: every startup check, and which plugin owns which layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_core.cli.options import (
    CacheDtype,
    CacheMemory,
    Device,
    DraftModel,
    Dtype,
    Json,
    KernelChoices,
    MaxModelLen,
    MaxNumSeqs,
    Memory,
    Model,
    NoPlugins,
    NumSpecTokens,
    RandomWeights,
    Speculation,
    engine_config,
    print_json,
)

if TYPE_CHECKING:
    from atom_core.cache.plan import CachePlan
    from atom_core.engine.startup import Inspection

__all__ = ["check"]


def check(
    model: Model,
    dtype: Dtype = "auto",
    cache_dtype: CacheDtype = "auto",
    device: Device = "auto",
    memory: Memory = None,
    cache_memory: CacheMemory = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    random_weights: RandomWeights = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    num_spec_tokens: NumSpecTokens = 0,
    no_plugin: NoPlugins = None,
    kernel: KernelChoices = None,
    as_json: Json = False,
) -> None:
    """Run every startup check for MODEL, without its weights, and show which plugin owns which layer."""
    from atom_core.engine.startup import inspect_model, make_registry

    config = engine_config(
        model=model,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
        memory=memory,
        cache_memory=cache_memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        random_weights=random_weights,
        speculation=speculation,
        draft_model=draft_model,
        num_spec_tokens=num_spec_tokens,
        no_plugins=no_plugin,
        kernels=kernel,
    )
    registry = make_registry(config)
    registry.kernel_table(config.kernels).check_signatures()
    inspection = inspect_model(config, registry)
    plan = inspection.plan()
    if as_json:
        print_json(_as_dict(inspection, plan))
    else:
        _print(inspection, plan)


def _as_dict(inspection: Inspection, plan: CachePlan) -> dict[str, Any]:
    return {
        "model_type": inspection.model_config.model_type,
        "stateful": inspection.registry.is_stateful(inspection.model_config.model_type),
        "layers": [*_layers(inspection, ""), *(_layers(inspection.draft, "draft/") if inspection.draft else ())],
        "warnings": [*inspection.warnings, *plan.warnings],
        "plan": plan.to_dict(),
    }


def _layers(inspection: Inspection, role: str) -> list[dict[str, str]]:
    return [
        {
            "module": f"{role}{layer.module_name}",
            "class": type(inspection.claimed.modules[layer.module_name]).__name__,
            "plugin": inspection.claimed.owners[layer.module_name],
            "layer": type(layer).__name__,
        }
        for layer in inspection.claimed.layers
    ]


def _print(inspection: Inspection, plan: CachePlan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{inspection.model_config.model_type}: layers and their plugins")
    for heading in ("module", "class", "plugin", "layer"):
        table.add_column(heading, overflow="fold")
    for row in _as_dict(inspection, plan)["layers"]:
        table.add_row(row["module"], row["class"], row["plugin"], row["layer"])
    console.print(table)
    state = "per-request state" if inspection.has_state else "no per-request state"
    checks = (
        f"{len(inspection.claimed.layers)} layers, each with one owner",
        "no unclaimed module takes a cache",
        f"{state}; model type {'registered' if inspection.has_state else 'needs no registration'}",
        "every kernel has its op's signature",
        f"caches fit: {plan.num_blocks} blocks of {plan.block_size} tokens"
        + (f", {plan.num_groups} groups of state" if plan.num_groups else ""),
    )
    for line in checks:
        console.print(f"[green]ok[/green]  {line}")
    for warning in (*inspection.warnings, *plan.warnings):
        console.print(f"[yellow]warning[/yellow]  {warning}")
