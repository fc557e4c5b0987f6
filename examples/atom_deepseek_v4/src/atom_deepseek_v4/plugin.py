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
    LayoutPlugin,
    Op,
    PluginInfo,
    Rewind,
    StepBuffers,
    TensorSpec,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["MODEL_TYPES", "DeepseekV4Plugin", "plugin"]

MODEL_TYPES = ("deepseek_v4",)


class DeepseekV4Plugin(LayoutPlugin):
    """DeepSeek-V4: a window in a ring per request, and compressed entries in paged blocks."""

    name: ClassVar[str] = "deepseek_v4"
    rewind: ClassVar[Rewind] = Rewind.OVERWRITE

    def layer_classes(self) -> tuple[type[AttentionLayer], ...]:
        """All three kinds derive from the sliding-window layer."""
        from atom_deepseek_v4.layer import WindowLayer

        return (WindowLayer,)

    def paged_layout(
        self, layers: Sequence[Any], *, block_size: int, cache_dtype: torch.dtype, **_: Any
    ) -> Sequence[TensorSpec]:
        """Compressed entries, and the indexers' keys of these."""
        from atom_deepseek_v4.layout import paged_specs

        return paged_specs(layers, block_size, cache_dtype)

    def state_layout(
        self, layers: Sequence[Any], *, cache_dtype: torch.dtype, num_spec_tokens: int, **_: Any
    ) -> Sequence[TensorSpec]:
        """Rings: the window, and what the compressors and indexers have not compressed yet."""
        from atom_deepseek_v4.layout import state_specs

        return state_specs(layers, cache_dtype, num_spec_tokens)

    def requirements(
        self, layers: Sequence[Any], *, max_num_batched_tokens: int, max_model_len: int, **_: Any
    ) -> CacheRequirements:
        """Blocks of whole compression windows, and scratch memory; the rest is as usual."""
        from atom_deepseek_v4.layout import requirements

        return requirements(layers, max_num_batched_tokens, max_model_len)

    @hookimpl
    def atom_plugin_info(self) -> PluginInfo:
        """Who the plugin is."""
        return PluginInfo(
            self.name, "DeepSeek-V4: sliding windows, compressed sparse and heavily compressed layers.", 1
        )

    @hookimpl
    def atom_model_types(self) -> Mapping[str, Sequence[str]]:
        """Model types with per-request state."""
        return {self.name: MODEL_TYPES}

    @hookimpl
    def atom_ops(self) -> Sequence[Op]:
        """Compressing, selecting, attending, and writing rings."""
        from atom_deepseek_v4.ops import OPS

        return OPS

    @hookimpl
    def atom_claim_layer(self, module: nn.Module, module_name: str) -> Claim | None:
        """Claim the class that the plugin was made for."""
        from atom_deepseek_v4.claim import claim_layer

        return claim_layer(module, module_name)

    @hookimpl
    def atom_build_metadata(
        self, layers: Sequence[AttentionLayer], batch: AttentionBatch, buffers: StepBuffers
    ) -> Mapping[str, Any]:
        """Where each token's state goes, and which compression windows the step closes."""
        from atom_deepseek_v4.metadata import StepMetadata

        own = self._own(layers)
        return {self.name: StepMetadata.build(own, batch, buffers, self.name)} if own else {}


plugin = DeepseekV4Plugin()
