"""`atom kernels`: ops, their kernels, and who brought them."""

from __future__ import annotations

from atom_core.cli.options import Json, KernelChoices, NoPlugins, forced_kernels, print_json

__all__ = ["kernels"]


def kernels(no_plugin: NoPlugins = None, kernel: KernelChoices = None, as_json: Json = False) -> None:
    """List every op with its kernels, highest priority first."""
    from atom_core.plugin.registry import PluginRegistry

    table = PluginRegistry.discover(without=tuple(no_plugin or ())).kernel_table(forced_kernels(kernel))
    rows = [
        {
            "op": name,
            "summary": op.summary,
            "kernel": candidate.name,
            "priority": candidate.priority,
            "owner": owner,
            "forced": table.forced.get(name) == candidate.name,
        }
        for name, (op, _) in sorted(table.ops.items())
        for candidate, owner in table.kernels[name]
    ]
    if as_json:
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table()
    for heading in ("op", "kernel", "priority", "from"):
        shown.add_column(heading, overflow="fold")
    for row in rows:
        name = f"{row['kernel']} (forced)" if row["forced"] else str(row["kernel"])
        shown.add_row(str(row["op"]), name, str(row["priority"]), str(row["owner"]))
    Console().print(shown)
