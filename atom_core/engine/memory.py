"""How many bytes the caches may take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from atom_core.config import EngineConfig, parse_bytes
from atom_core.errors import CapacityError

if TYPE_CHECKING:
    import torch

__all__ = ["available_bytes", "cache_budget_bytes", "format_bytes", "memory_limit_bytes"]

_DEFAULT_FRACTION = {"cuda": 0.9, "cpu": 0.25}


def cache_budget_bytes(config: EngineConfig, device: torch.device, weight_bytes: int) -> int:
    """Return the bytes for caches and workspace.

    Args:
        config: `cache_memory` is the answer itself, `memory` includes the weights; else the free memory counts.
        device: where the caches will be.
        weight_bytes: bytes of the weights, which are not loaded yet.

    Raises:
        CapacityError: the weights alone are larger than the memory.
    """
    if config.cache_memory is not None:
        return parse_bytes(config.cache_memory)
    total, origin = memory_limit_bytes(config, device, available_bytes(device))
    if total <= weight_bytes:
        raise CapacityError(
            f"the weights take {format_bytes(weight_bytes)}, but there are {format_bytes(total)} for weights and "
            f"caches ({origin}); give more with memory= or memory_fraction="
        )
    return total - weight_bytes


def memory_limit_bytes(config: EngineConfig, device: torch.device, free_bytes: int) -> tuple[int, str]:
    """Return the bytes for weights, workspace and caches together, and where the figure comes from.

    Args:
        config: `memory` is the answer itself, else a share of what is free.
        device: where.
        free_bytes: free before anything is loaded.
    """
    if config.memory is not None:
        return parse_bytes(config.memory), "memory"
    fraction = config.memory_fraction or _DEFAULT_FRACTION[device.type]
    return int(free_bytes * fraction), f"{fraction} of {format_bytes(free_bytes)} free on {device}"


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of a device's memory."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return free
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def format_bytes(num_bytes: int) -> str:
    """Write bytes for people: `1.5 GiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
