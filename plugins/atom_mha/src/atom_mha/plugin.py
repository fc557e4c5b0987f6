"""The plugin's table of contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from atom_core import hookimpl
from atom_core.plugin import (
    AttentionBatch,
    CacheRequirements,
    Claim,
    GraphSupport,
    Kernel,
    LayoutPlugin,
    Op,
    PluginInfo,
    StepBuffers,
    TensorSpec,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig

    from atom_core.plugin import AttentionLayer
    from atom_mha.layer import MhaLayer
    from atom_mha.step_plan import StepPlan

__all__ = ["MhaPlugin", "plugin"]


class MhaPlugin(LayoutPlugin):
    """Grouped-query softmax attention: causal, windowed or chunked, for any module of transformers."""

    name: ClassVar[str] = "mha"

    @hookimpl
    def atom_plugin_info(self) -> PluginInfo:
        """Say who the plugin is."""
        return PluginInfo(
            "mha", "Grouped-query softmax attention: causal, window, chunk; soft-cap and sinks.", contract_version=1
        )

    @hookimpl
    def atom_ops(self) -> Sequence[Op]:
        """The ops of `ops`."""
        from atom_mha.ops import OPS

        return OPS

    @hookimpl
    def atom_kernels(self) -> Sequence[Kernel]:
        """The kernels of `ops`."""
        from atom_mha.ops import KERNELS

        return KERNELS

    @hookimpl
    def atom_claim_layer(
        self, module: nn.Module, module_name: str, model_config: PreTrainedConfig, tp_size: int
    ) -> Claim | None:
        """Claim any causal self attention with query, key and value projections."""
        from atom_mha.claim import claim

        return claim(module, module_name, model_config, tp_size)

    @hookimpl
    def atom_build_metadata(
        self, layers: Sequence[AttentionLayer], batch: AttentionBatch, buffers: StepBuffers
    ) -> Mapping[str, StepPlan]:
        """Cut the batch into runs."""
        from atom_mha.step_plan import StepPlan

        return {self.name: StepPlan.build(batch)}

    def layer_classes(self) -> tuple[type[AttentionLayer], ...]:
        """The one layer class."""
        from atom_mha.layer import MhaLayer

        return (MhaLayer,)

    def requirements(  # type: ignore[override]
        self,
        layers: Sequence[MhaLayer],
        *,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        **_: Any,
    ) -> CacheRequirements:
        """Any block size; what a decode step launches depends on its shape alone; a float8 cache has scales."""
        from atom_mha.layout import workspace_bytes

        return CacheRequirements(
            graph_support=GraphSupport.UNIFORM,
            float8_cache=True,
            workspace_bytes=workspace_bytes(
                layers, cache_dtype, max_num_batched_tokens, max_model_len, num_spec_tokens
            ),
        )

    def paged_layout(
        self,
        layers: Sequence[MhaLayer],  # type: ignore[override]
        *,
        model_config: PreTrainedConfig,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> Sequence[TensorSpec]:
        """Keys and values, and their scales."""
        from atom_mha.layout import paged_layout

        return paged_layout(layers, block_size, cache_dtype)


plugin = MhaPlugin()
