"""`atom plugins`: what is installed, and why something does not load."""

from __future__ import annotations

from atom_core.cli.options import Json, NoPlugins, print_json

__all__ = ["plugins"]


def plugins(no_plugin: NoPlugins = None, as_json: Json = False) -> None:
    """List the installed plugins with their state, and the reason where one does not load."""
    from atom_core.plugin.registry import PluginRegistry

    registry = PluginRegistry.discover(without=tuple(no_plugin or ()))
    stateful = registry.stateful_model_types()
    rows = [
        {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "status": str(record.status),
            "summary": record.summary,
            "stateful_model_types": sorted(stateful.get(record.name, ())),
            "hooks": list(record.hooks),
            "reason": record.reason,
        }
        for record in registry.records
    ]
    if as_json:
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("plugin", "distribution", "status", "what"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        what = row["reason"] or row["summary"]
        table.add_row(str(row["name"]), f"{row['distribution']} {row['version']}", str(row["status"]), str(what))
    Console().print(table)
