"""The plugin: a table of contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from atom_core import hookimpl
from atom_core.plugin import LayoutPlugin, PluginInfo

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig

    from atom_core.plugin import (
        AttentionBatch,
        AttentionLayer,
        CacheRequirements,
        Claim,
        Kernel,
        Op,
        StepBuffers,
        TensorSpec,
    )

__all__ = ["MlaPlugin", "plugin"]


class MlaPlugin(LayoutPlugin):
    """Latent attention of the DeepSeek line: paged latents, paged index keys, no state."""

    name: ClassVar[str] = "mla"

    @hookimpl
    def atom_plugin_info(self) -> PluginInfo:
        """Name and summary."""
        return PluginInfo(
            self.name, "multi-head latent attention, dense and sparse (DeepSeek V2, V3, V3.2, GLM)", contract_version=1
        )

    @hookimpl
    def atom_ops(self) -> Sequence[Op]:
        """Ops `mla.*`."""
        from atom_mla.ops import OPS

        return OPS

    @hookimpl
    def atom_kernels(self) -> Sequence[Kernel]:
        """Kernels that are faster than the references."""
        from atom_mla.ops import KERNELS

        return KERNELS

    @hookimpl
    def atom_tensor_parallel_plan(self, model_config: PreTrainedConfig, tp_size: int) -> Mapping[str, Any]:
        """Shard the heads; the latent and the indexer stay whole on every rank."""
        from atom_mla.families import tensor_parallel_plan

        return tensor_parallel_plan(model_config, tp_size)

    @hookimpl
    def atom_claim_layer(self, module: nn.Module, module_name: str, tp_size: int) -> Claim | None:
        """Claim known latent attention classes, and unknown ones whose code equals a known one's."""
        from atom_mla.claims import claim_layer

        return claim_layer(module, module_name, tp_size)

    @hookimpl
    def atom_build_metadata(
        self, layers: Sequence[AttentionLayer], batch: AttentionBatch, buffers: StepBuffers
    ) -> Mapping[str, Any]:
        """What kind of step this is."""
        from atom_mla.metadata import LatentMetadata

        return {self.name: LatentMetadata.build(batch)}

    def layer_classes(self) -> tuple[type[AttentionLayer], ...]:
        """Every layer is a `LatentLayer`."""
        from atom_mla.layer import LatentLayer

        return (LatentLayer,)

    def paged_layout(
        self,
        layers: Sequence[AttentionLayer],
        *,
        model_config: PreTrainedConfig,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> Sequence[TensorSpec]:
        """Latents of every layer, index keys of layers that have an indexer."""
        from atom_mla.layout import paged_layout

        return paged_layout(layers, block_size, cache_dtype)

    def requirements(
        self,
        layers: Sequence[AttentionLayer],
        *,
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> CacheRequirements:
        """Any block size; scratch memory of the largest step; graphs: a decode step's launches depend on its shape."""
        from atom_mla.layout import requirements

        return requirements(layers, max_num_batched_tokens, max_model_len)


plugin = MlaPlugin()
