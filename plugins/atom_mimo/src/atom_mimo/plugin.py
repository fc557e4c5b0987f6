"""Table of contents of the plugin: what it answers to each hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from atom_core import hookimpl
from atom_core.plugin import (
    AttentionBatch,
    AttentionLayer,
    CacheRequirements,
    Claim,
    GraphSupport,
    Kernel,
    LayoutPlugin,
    Op,
    PluginInfo,
    Rewind,
    TensorSpec,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["MODEL_TYPES", "MimoPlugin", "plugin"]

MODEL_TYPES = ("mimo_v2_flash",)


class MimoPlugin(LayoutPlugin):
    """MiMo-V2: full attention in paged blocks, sliding-window attention in a ring per request."""

    name: ClassVar[str] = "mimo"
    rewind: ClassVar[Rewind] = Rewind.OVERWRITE

    def layer_classes(self) -> tuple[type[AttentionLayer], ...]:
        """Full and sliding-window layers."""
        from atom_mimo.layer import FullLayer, WindowLayer

        return (FullLayer, WindowLayer)

    def paged_layout(
        self, layers: Sequence[Any], *, block_size: int, cache_dtype: torch.dtype, **_: Any
    ) -> Sequence[TensorSpec]:
        """Keys and values of full layers."""
        from atom_mimo.layout import paged_specs

        return paged_specs(layers, block_size, cache_dtype)

    def state_layout(
        self, layers: Sequence[Any], *, cache_dtype: torch.dtype, num_spec_tokens: int, **_: Any
    ) -> Sequence[TensorSpec]:
        """Rings of sliding-window layers."""
        from atom_mimo.layout import ring_specs

        return ring_specs(layers, cache_dtype, num_spec_tokens)

    def requirements(self, layers: Sequence[Any], *, max_num_batched_tokens: int, **_: Any) -> CacheRequirements:
        """Steps of equal rows can be captured; scales are kept beside float8 blocks; scratch memory."""
        from atom_mimo.layout import workspace_bytes

        return CacheRequirements(
            graph_support=GraphSupport.UNIFORM,
            float8_cache=True,
            workspace_bytes=workspace_bytes(layers, max_num_batched_tokens),
        )

    @hookimpl
    def atom_plugin_info(self) -> PluginInfo:
        """Who the plugin is."""
        return PluginInfo(self.name, "MiMo-V2: full attention, and sliding windows in rings.", contract_version=1)

    @hookimpl
    def atom_model_types(self) -> Mapping[str, Sequence[str]]:
        """Model types with rings."""
        return {self.name: MODEL_TYPES}

    @hookimpl
    def atom_ops(self) -> Sequence[Op]:
        """Attention over ring and new tokens, and writing the ring."""
        from atom_mimo.ops import OPS

        return OPS

    @hookimpl
    def atom_kernels(self) -> Sequence[Kernel]:
        """Kernels for the CPU and CUDA."""
        from atom_mimo.ops import KERNELS

        return KERNELS

    @hookimpl
    def atom_claim_layer(self, module: nn.Module, module_name: str, tp_size: int) -> Claim | None:
        """Claim the class that the plugin was made for."""
        from atom_mimo.claim import claim_layer

        return claim_layer(module, module_name, tp_size)

    @hookimpl
    def atom_build_metadata(self, layers: Sequence[AttentionLayer], batch: AttentionBatch) -> Mapping[str, Any]:
        """Split the step into decodes and chunks."""
        from atom_mimo.metadata import MimoMetadata

        return {self.name: MimoMetadata.build(batch, self.name)} if self._own(layers) else {}


plugin = MimoPlugin()
