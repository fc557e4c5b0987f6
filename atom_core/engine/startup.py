"""Every check that needs no weights: plugins, claims, state, and whether the caches fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atom_core.cache.plan import CacheFigures, CachePlan, choose_block_size, plan_cache
from atom_core.config import DEFAULT_BLOCK_SIZE, EngineConfig
from atom_core.engine.memory import cache_budget_bytes
from atom_core.engine.speculation import check_rewind
from atom_core.errors import ConfigError
from atom_core.models.binding import ClaimedLayers, claim_layers
from atom_core.models.loader import build_meta_model, resolve_config, resolve_device, resolve_dtype, weight_bytes
from atom_core.plugin.registry import PluginRegistry

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from atom_core.plugin.model_hooks import ModelHooks

__all__ = ["Inspection", "inspect_model", "make_registry"]

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")


@dataclass(frozen=True)
class Inspection:
    """What is known about a model before its weights load.

    Attributes:
        config: what the user set.
        registry: the plugins.
        model_config: the model's text config.
        dtype: of weights and activations, and of paged tensors.
        device: where it will run.
        claimed: the claimed layers, on the meta device.
        hooks: the manager of this model's plugins.
        max_model_len: most tokens of a request.
        block_size: tokens per block.
        figures: what the plugins need.
        weight_bytes: bytes of the weights on one rank.
        warnings: what the user should know.
    """

    config: EngineConfig
    registry: PluginRegistry
    model_config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    claimed: ClaimedLayers
    hooks: ModelHooks
    max_model_len: int
    block_size: int
    figures: CacheFigures
    weight_bytes: int
    warnings: tuple[str, ...]

    @property
    def has_state(self) -> bool:
        """Whether requests of this model need a group."""
        return self.figures.group_bytes > 0

    @property
    def checkpoint_interval(self) -> int | None:
        """Tokens between regular state checkpoints, whole blocks."""
        interval = self.config.state_checkpoint_interval
        return None if interval is None else -(-interval // self.block_size) * self.block_size

    def plan(self) -> CachePlan:
        """Plan the caches for the memory that the config names, or that is free now.

        Raises:
            CapacityError: the smallest useful cache does not fit.
        """
        plan = plan_cache(
            self.figures,
            budget_bytes=cache_budget_bytes(self.config, self.device, self.weight_bytes),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_blocks=self.config.max_blocks,
            checkpoint_share=self.config.state_checkpoint_share if self.config.enable_prefix_caching else 0.0,
        )
        return replace(plan, warnings=(*plan.warnings, *self._why_no_hits(plan)))

    def _why_no_hits(self, plan: CachePlan) -> tuple[str, ...]:
        """Say why no request can start from cached blocks, where the user asked for it and it cannot be."""
        if not self.config.enable_prefix_caching:
            return ()
        unable = [name for name, needs in self.figures.requirements.items() if not needs.prefix_cacheable]
        if unable:
            owners = ", ".join(self.registry.describe(name) for name in unable)
            return (f"no prefix cache hits: {owners} cannot start from cached blocks",)
        if not self.has_state or plan.num_checkpoints:
            return ()
        return (
            f"no prefix cache hits: there are no checkpoints of per-request state; one takes "
            f"{plan.checkpoint_bytes:,} bytes, and state_checkpoint_share {self.config.state_checkpoint_share} of what "
            f"is left of {plan.budget_bytes:,} bytes does not hold any; raise the memory or the share",
        )


def make_registry(config: EngineConfig) -> PluginRegistry:
    """Discover the plugins that the config lets in."""
    return PluginRegistry.discover(only=config.plugins, without=config.no_plugins)


def inspect_model(config: EngineConfig, registry: PluginRegistry) -> Inspection:
    """Claim the model's layers on the meta device and ask their plugins for everything that planning needs.

    Raises:
        AtomError: any of the startup checks fails.
    """
    model_config = resolve_config(config)
    dtype, device = resolve_dtype(config, model_config), resolve_device(config)
    max_model_len = _max_model_len(config, model_config)
    model = build_meta_model(model_config, dtype)
    claimed = claim_layers(model, registry, model_config, config.tensor_parallel_size)
    hooks = registry.model_hooks(set(claimed.owners.values()))
    common = {"layers": claimed.layers, "model_config": model_config}
    requirements = hooks.cache_requirements(
        **common,
        cache_dtype=dtype,
        num_spec_tokens=config.num_spec_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    block_size = choose_block_size(requirements, config.block_size, DEFAULT_BLOCK_SIZE)
    slot_bytes = hooks.per_req_cache_bytes(**common, cache_dtype=dtype, num_spec_tokens=config.num_spec_tokens)
    warnings = registry.check_stateful(model_config.model_type, slot_bytes)
    slots_per_req = hooks.slots_per_req(**common, num_spec_tokens=config.num_spec_tokens)
    hooks.check_slots(slot_bytes, slots_per_req, requirements, config.num_spec_tokens)
    figures = CacheFigures(
        requirements=requirements,
        block_bytes=hooks.block_bytes(**common, block_size=block_size, cache_dtype=dtype),
        slot_bytes=slot_bytes,
        slots_per_req=slots_per_req,
    )
    inspection = Inspection(
        config=config,
        registry=registry,
        model_config=model_config,
        dtype=dtype,
        device=device,
        claimed=claimed,
        hooks=hooks,
        max_model_len=max_model_len,
        block_size=block_size,
        figures=figures,
        weight_bytes=weight_bytes(model, config.tensor_parallel_size),
        warnings=(*claimed.warnings, *warnings),
    )
    check_rewind(config, inspection)
    return inspection


def _max_model_len(config: EngineConfig, model_config: PreTrainedConfig) -> int:
    lengths = [getattr(model_config, name, None) for name in _LENGTH_FIELDS]
    limit = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    if config.max_model_len is None:
        if limit is None:
            raise ConfigError(
                f"the config of {model_config.model_type} names no maximum length (looked for "
                f"{', '.join(_LENGTH_FIELDS)}); give max_model_len"
            )
        return limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model is made for at most {limit} tokens")
    return config.max_model_len
