"""The plugin: who it is, and its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atom_core import hookimpl
from atom_core.plugin import Kernel, PluginInfo

if TYPE_CHECKING:
    import torch

__all__ = ["SdpaPlugin", "plugin", "supports"]


def supports(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    """Any device and dtype, where torch's fused attention applies: plain causal masks, heads of one size.

    The kernel computes the other cases too, but unfused, as the reference does: there is nothing to gain by it.
    """
    if facts["window"] is not None or facts["chunk"] is not None:
        return "torch has no fused attention within a window or a chunk"
    if facts["head_dim"] != facts["v_head_dim"]:
        return f"torch has no fused attention for keys of {facts['head_dim']} and values of {facts['v_head_dim']}"
    return True


class SdpaPlugin:
    """Brings a kernel and nothing else: no layers, no caches, no ops."""

    @hookimpl
    def atom_plugin_info(self) -> PluginInfo:
        """Who the plugin is."""
        return PluginInfo("sdpa", "mha.prefill by torch's scaled_dot_product_attention.", contract_version=1)

    @hookimpl
    def atom_kernels(self) -> Sequence[Kernel]:
        """Above the reference (-1000), below every kernel that atom-mha brings for a device of its own (10, 20)."""
        return [Kernel("mha.prefill", "sdpa", "atom_sdpa.prefill:prefill", supports=supports, priority=0)]


plugin = SdpaPlugin()
