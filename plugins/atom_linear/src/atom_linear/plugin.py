"""The plugin's table of contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from atom_core import hookimpl
from atom_core.plugin import Kernel, PluginInfo

if TYPE_CHECKING:
    import torch

__all__ = ["LinearPlugin", "plugin"]

_MAX_ELEMENTS = 2**28


class LinearPlugin:
    """Nothing but kernels."""

    @hookimpl
    def atom_plugin_info(self) -> PluginInfo:
        """Say who the plugin is."""
        return PluginInfo("linear", "Linear layers of a single row and of few rows with experts.", contract_version=1)

    @hookimpl
    def atom_kernels(self) -> Sequence[Kernel]:
        """The Triton kernels."""
        return [
            Kernel(
                "core.linear_row",
                "triton",
                "atom_linear.kernels.row:linear_row",
                supports=_supports_row,
                priority=10,
                capturable=True,
                joins="atom_linear.joins:join_rows",
            ),
            Kernel(
                "core.expert_rows",
                "triton",
                "atom_linear.kernels.experts:expert_rows",
                supports=_supports,
                priority=10,
                capturable=True,
            ),
        ]


def _supports(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    if device.type != "cuda":
        return f"runs on CUDA devices only, not on {device}"
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    dtype = dtypes["weight"]
    if not dtype.is_floating_point or dtype.itemsize not in (2, 4):
        return f"needs weights of 16 or 32 bit floating point, not {dtype}"
    return True


def _supports_row(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    elements = facts["in_features"] * facts["out_features"]
    if elements > _MAX_ELEMENTS:
        return f"cuBLAS is faster for {elements:,} elements; this kernel is for at most {_MAX_ELEMENTS:,}"
    return _supports(device, dtypes, facts)


plugin = LinearPlugin()
