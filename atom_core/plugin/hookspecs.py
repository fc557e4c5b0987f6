"""Every hook of the contract, in the order in which the core calls them.

Hooks fan out: every plugin is asked, the results are collected and checked. An implementation may name any
subset of a hook's arguments. Hooks run once at startup, once when a model is built, or once per step; never
per layer per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atom_core.plugin.markers import hookspec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from atom_core.plugin.batch import AttentionBatch, StepBuffers
    from atom_core.plugin.layer import AttentionLayer
    from atom_core.plugin.ops import Kernel, KernelTable, Op
    from atom_core.plugin.types import CacheRequirements, Claim, KVCacheTensor, PluginInfo

__all__ = ["PER_MODEL_HOOKS", "PER_PLUGIN_HOOKS", "AtomSpecs"]

PER_PLUGIN_HOOKS = (
    "atom_plugin_info",
    "atom_model_types",
    "atom_ops",
    "atom_kernels",
    "atom_proposers",
    "atom_tensor_parallel_plan",
)
PER_MODEL_HOOKS = (
    "atom_claim_layer",
    "atom_cache_requirements",
    "atom_compute_block_bytes",
    "atom_allocate_kv_cache_tensors",
    "atom_compute_per_req_cache_bytes",
    "atom_slots_per_req",
    "atom_allocate_per_req_cache",
    "atom_build_kv_cache_tensor",
    "atom_build_metadata",
    "atom_step_finished",
)


class AtomSpecs:
    """The contract between the core and its plugins; docs/hooks.md has one entry per hook."""

    # Asked once, of every plugin.

    @hookspec
    def atom_plugin_info(self) -> PluginInfo:
        """Say who the plugin is. Called at discovery; required."""

    @hookspec
    def atom_model_types(self) -> Mapping[str, Sequence[str]]:
        """Register the model types whose requests need per-request state from this plugin.

        Called at discovery, often in a process that never builds a model: requests are marked stateful from
        this answer alone. A plugin with state for a model type that it did not register stops the startup.

        Returns:
            The plugin's name to transformers `model_type`s.
        """

    @hookspec
    def atom_ops(self) -> Sequence[Op]:
        """Define ops: names, references in plain torch, tolerances, sample inputs. Called at discovery."""

    @hookspec
    def atom_kernels(self) -> Sequence[Kernel]:
        """Bring kernels for any op, the plugin's own or another plugin's. Called at discovery."""

    @hookspec
    def atom_proposers(self) -> Mapping[str, str]:
        """Bring speculative proposers. Called when the engine looks for the proposer that the user named.

        Returns:
            The proposer's name to the import path of its factory, which makes a `Proposer`.
        """

    @hookspec
    def atom_tensor_parallel_plan(self, model_config: PreTrainedConfig, tp_size: int) -> Mapping[str, Any]:
        """Add to or replace entries of the model's own tensor-parallel plan. Called before weights load.

        Args:
            model_config: the model's config.
            tp_size: ranks.

        Returns:
            Module name pattern to a plan style of transformers, or a style object.
        """

    # Asked per model.

    @hookspec
    def atom_claim_layer(
        self, module: nn.Module, module_name: str, model_config: PreTrainedConfig, tp_size: int
    ) -> Claim | None:
        """Offer to own a module. Called for every module outside claimed ones, parents first; may be on `meta`.

        Args:
            module: the candidate; its config, if it has one, is its own.
            module_name: dotted name in the model.
            model_config: the model's (text) config.
            tp_size: ranks that share the model; a layer counts its own rank's heads.

        Returns:
            A claim, or `None` when the module is foreign.

        Raises:
            LayerError: the module is the plugin's but has something that it cannot express.
        """

    @hookspec
    def atom_cache_requirements(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> Mapping[str, CacheRequirements]:
        """Say what the plugin needs from the cache. Called once the layers are claimed.

        Args:
            layers: all claimed layers of the model; find yours by their class.
            model_config: the model's config.
            cache_dtype: dtype of paged tensors.
            num_spec_tokens: most draft tokens of a request and step.
            max_num_batched_tokens: most tokens of a step.
            max_model_len: most tokens of a request.

        Returns:
            The plugin's name to its requirements.
        """

    @hookspec
    def atom_compute_block_bytes(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> Mapping[str, int]:
        """Compute the bytes of one block over all of the plugin's layers, on this rank.

        Returns:
            The plugin's name to bytes; leave it out or return 0 without paged tensors.
        """

    @hookspec
    def atom_allocate_kv_cache_tensors(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        num_blocks: int,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
    ) -> Mapping[str, Tensor]:
        """Allocate the paged tensors. Called once, after planning.

        Returns:
            `plugin.tensor` to a tensor `[layers, num_blocks, ...]`; the bytes must equal
            num_blocks x the declared block bytes.
        """

    @hookspec
    def atom_compute_per_req_cache_bytes(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
    ) -> Mapping[str, int]:
        """Compute the bytes of one state slot over all of the plugin's layers, on this rank.

        Returns:
            The plugin's name to bytes; leave it out or return 0 without state.
        """

    @hookspec
    def atom_slots_per_req(
        self, layers: Sequence[AttentionLayer], model_config: PreTrainedConfig, num_spec_tokens: int
    ) -> Mapping[str, int]:
        """Say how many contiguous slots one request needs: `1 + num_spec_tokens` to rewind by slots, else 1.

        Returns:
            The plugin's name to slots.
        """

    @hookspec
    def atom_allocate_per_req_cache(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        num_slots: Mapping[str, int],
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
        device: torch.device,
    ) -> Mapping[str, Tensor]:
        """Allocate the state tensors. Called once, after planning.

        The core writes initial values or a restored checkpoint into a slot when a request leases it.

        Args:
            layers: all claimed layers.
            model_config: the model's config.
            num_slots: by plugin, groups x slots per request + checkpoint slots.
            cache_dtype: dtype of activations, also where paged tensors have another.
            num_spec_tokens: most draft tokens of a request and step.
            device: where.

        Returns:
            `plugin.tensor` to a tensor `[layers, num_slots, ...]`; the bytes must equal
            num_slots x the declared slot bytes.
        """

    @hookspec
    def atom_build_kv_cache_tensor(
        self,
        layer: AttentionLayer,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        tensors: Mapping[str, Tensor],
        kernels: KernelTable,
        block_size: int,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
    ) -> KVCacheTensor | None:
        """Build one layer's views of the cache tensors and bind them onto it. Called once per layer.

        Args:
            layer: the layer.
            layers: all claimed layers.
            model_config: the model's config.
            tensors: all tensors of all plugins, by full name.
            kernels: where the layer selects its kernels.
            block_size: tokens per block.
            cache_dtype: dtype of paged tensors.
            num_spec_tokens: most draft tokens of a request and step.

        Returns:
            What was bound, or `None` when the layer is foreign.
        """

    @hookspec
    def atom_build_metadata(
        self, layers: Sequence[AttentionLayer], batch: AttentionBatch, buffers: StepBuffers
    ) -> Mapping[str, Any]:
        """Build what the plugin's layers need in a step beyond the batch. Called once per step.

        A decode step may be captured as a device graph: the hook is called with a batch of padding alone, outside the
        capture, and its answer is what the layers see while they are captured, and so in every replay. Before each
        replay the hook is called again, with the same maxima and the same tensors, filled anew; that answer is
        dropped. So for plugins whose `graph_support` is not `never`, what the answer holds of a step of decodes alone
        is of three kinds: tensors of the batch and views of them, persistent buffers that every call fills and
        uploads, and Python values that follow from the batch's maxima and counts. Scratch that a layer puts into the
        answer while it is captured belongs to the graph and is computed again in every replay.

        Args:
            layers: all layers of the model.
            batch: the step.
            buffers: where persistent buffers come from, at addresses that stay.

        Returns:
            The plugin's name to an object; layers read it as `step.metadata[name]`.
        """

    @hookspec
    def atom_step_finished(self, stats: Mapping[str, Any]) -> None:
        """Observe a finished step. Called after every step with the step's figures."""
