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
    Kernel,
    LayoutPlugin,
    Op,
    PluginInfo,
    TensorSpec,
)
from atom_gdn.supports import by_triton, graph_support, on_cpu

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MODEL_TYPES", "GdnPlugin", "plugin"]

MODEL_TYPES = (
    "lara_mini",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
_KERNELS = "atom_gdn.kernels"
_TOLERANCE = {"float32": (2e-5, 2e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)}


class GdnPlugin(LayoutPlugin):
    """Gated delta net: a convolution state and a recurrent state per request, nothing paged.

    Args:
        state_dtype: `float32` or `bfloat16` for the recurrent state; `None` asks ATOM_GDN_STATE_DTYPE, then float32.
    """

    name: ClassVar[str] = "gdn"

    def __init__(self, state_dtype: str | None = None) -> None:
        self.state_dtype = state_dtype

    def layer_classes(self) -> tuple[type[AttentionLayer], ...]:
        """The base of the plugin's layers."""
        from atom_gdn.layer import GatedDeltaNetLayer

        return (GatedDeltaNetLayer,)

    def state_layout(self, layers: Sequence[Any], **_: Any) -> Sequence[TensorSpec]:
        """Convolution and recurrent state."""
        from atom_gdn.layout import recurrent_dtype, state_specs

        return state_specs(layers, recurrent_dtype(self.state_dtype))

    def requirements(self, layers: Sequence[Any], *, max_num_batched_tokens: int, **_: Any) -> CacheRequirements:
        """Scratch memory, and decode steps as graphs."""
        from atom_gdn.layout import workspace_bytes

        scratch = workspace_bytes(layers, max_num_batched_tokens)
        return CacheRequirements(graph_support=graph_support(layers), workspace_bytes=scratch)

    @hookimpl
    def atom_plugin_info(self) -> PluginInfo:
        """Who the plugin is."""
        return PluginInfo(
            self.name, "Gated delta net linear attention, for hybrids with softmax attention.", contract_version=1
        )

    @hookimpl
    def atom_model_types(self) -> Mapping[str, Sequence[str]]:
        """Model types with gated delta net layers."""
        return {self.name: MODEL_TYPES}

    @hookimpl
    def atom_ops(self) -> Sequence[Op]:
        """Convolution and delta rule for chunks, and both in one for decodes."""
        return [
            _op("causal_conv", "Causal convolution and SiLU over chunks, continued from slots.", "conv_state"),
            _op("chunk_delta_rule", "Gated delta rule over chunks, continued from slots.", "recurrent_state"),
            _op("decode", "Both for rows of a few tokens, a slot per token.", "conv_state", "recurrent_state"),
        ]

    @hookimpl
    def atom_kernels(self) -> Sequence[Kernel]:
        """Kernels for the CPU and in Triton."""
        modules = {"causal_conv": "torch_cpu", "chunk_delta_rule": "torch_cpu_chunks", "decode": "torch_cpu"}
        return [
            *(
                Kernel(f"gdn.{name}", "torch_cpu", f"{_KERNELS}.{module}:{name}", on_cpu, priority=10)
                for name, module in modules.items()
            ),
            *(
                Kernel(
                    f"gdn.{name}",
                    "triton",
                    f"{_KERNELS}.triton_ops:{name}",
                    by_triton,
                    priority=10,
                    capturable=name == "decode",
                )
                for name in modules
            ),
        ]

    @hookimpl
    def atom_claim_layer(self, module: nn.Module, module_name: str, tp_size: int) -> Claim | None:
        """Claim the classes that the plugin was made for."""
        from atom_gdn.claim import claim_layer

        return claim_layer(module, module_name, tp_size)

    @hookimpl
    def atom_build_metadata(self, layers: Sequence[AttentionLayer], batch: AttentionBatch) -> Mapping[str, Any]:
        """Split the step into decodes and chunks."""
        from atom_gdn.metadata import GdnMetadata

        return {self.name: GdnMetadata.build(batch, self.name)} if self._own(layers) else {}


def _op(name: str, summary: str, *states: str) -> Op:
    reference, samples = f"{_KERNELS}.reference:{name}", f"{_KERNELS}.samples:sample_{name}"
    return Op(f"gdn.{name}", reference, _TOLERANCE, samples, summary, mutates=(*states, "out"))


plugin = GdnPlugin()
