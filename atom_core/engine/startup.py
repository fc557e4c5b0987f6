"""Every check that needs no weights: plugins, claims, state, and whether the caches fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atom_core.cache.plan import CacheFigures, CachePlan, choose_block_size, plan_cache, with_draft_names
from atom_core.config import DEFAULT_BLOCK_SIZE, DRAFT_MODEL, MTP, EngineConfig
from atom_core.engine.memory import cache_budget_bytes
from atom_core.engine.speculation import check_rewind
from atom_core.errors import ConfigError
from atom_core.models.binding import ClaimedLayers, claim_layers
from atom_core.models.loader import (
    build_meta_model,
    resolve_cache_dtype,
    resolve_config,
    resolve_device,
    resolve_dtype,
    weight_bytes,
)
from atom_core.models.mtp import build_mtp
from atom_core.plugin.registry import PluginRegistry

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn
    from transformers import PreTrainedConfig

    from atom_core.plugin.model_hooks import ModelHooks
    from atom_core.plugin.types import CacheRequirements

__all__ = ["Inspection", "draft_config", "inspect_model", "make_registry"]

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")


@dataclass(frozen=True)
class Inspection:
    """What is known about a model before its weights load.

    Attributes:
        config: what the user set.
        registry: the plugins.
        model_config: the model's text config.
        dtype: of weights and activations, and of what slots keep of them.
        cache_dtype: of paged tensors.
        device: where it will run.
        claimed: the claimed layers, on the meta device.
        hooks: the manager of this model's plugins.
        max_model_len: most tokens of a request.
        block_size: tokens per block.
        figures: what the plugins need for this role alone.
        weight_bytes: bytes of the weights on one rank.
        warnings: what the user should know.
        draft: the same of a second role that drafts: a draft model, or this model's own layers for it.
    """

    config: EngineConfig
    registry: PluginRegistry
    model_config: PreTrainedConfig
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    claimed: ClaimedLayers
    hooks: ModelHooks
    max_model_len: int
    block_size: int
    figures: CacheFigures
    weight_bytes: int
    warnings: tuple[str, ...]
    draft: Inspection | None = None

    @property
    def all_figures(self) -> CacheFigures:
        """What the plugins of all roles need: one block and one group hold a request's tokens of every role."""
        return self.figures if self.draft is None else self.figures.with_draft(self.draft.figures)

    @property
    def has_state(self) -> bool:
        """Whether requests need a group, in any role."""
        return self.all_figures.group_bytes > 0

    @property
    def is_stateful(self) -> bool:
        """Whether the model type of any role is registered as stateful."""
        roles = (self,) if self.draft is None else (self, self.draft)
        return any(role.registry.is_stateful(role.model_config.model_type) for role in roles)

    @property
    def all_weight_bytes(self) -> int:
        """Bytes of the weights of all roles."""
        return self.weight_bytes + (0 if self.draft is None else self.draft.weight_bytes)

    @property
    def checkpoint_interval(self) -> int | None:
        """Tokens between regular state checkpoints, whole blocks."""
        interval = self.config.state_checkpoint_interval
        return None if interval is None else -(-interval // self.block_size) * self.block_size

    def plan(self, budget_bytes: int | None = None) -> CachePlan:
        """Plan the caches.

        Args:
            budget_bytes: what they may take; from what the config names, or from what is free now, when `None`.

        Raises:
            CapacityError: the smallest useful cache does not fit.
        """
        if budget_bytes is None:
            budget_bytes = cache_budget_bytes(self.config, self.device, self.all_weight_bytes)
        plan = plan_cache(
            self.all_figures,
            budget_bytes=budget_bytes,
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
        roles = (self,) if self.draft is None else (self, self.draft)
        needs_by_name = [item for role in roles for item in role.figures.requirements.items()]
        unable = list(dict.fromkeys(name for name, needs in needs_by_name if not needs.prefix_cacheable))
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
    model = build_meta_model(model_config, resolve_dtype(config, model_config))
    target = _claim(config, registry, model_config, model, _max_model_len(config, model_config))
    drafting = _claim_drafting(target, model)
    drafting_requirements = {} if drafting is None else drafting.requirements
    requirements = with_draft_names(target.requirements, drafting_requirements)
    block_size = choose_block_size(requirements, config.block_size, DEFAULT_BLOCK_SIZE)
    draft = None if drafting is None else drafting.inspection(block_size)
    if draft is not None and config.speculation == MTP:
        draft = replace(draft, warnings=())  # its model type is the model's own
    inspection = target.inspection(block_size, draft)
    for role in (inspection, draft):
        if role is not None:
            check_rewind(config, role)
            _check_float8(role)
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


@dataclass(frozen=True)
class _ClaimedRole:
    """What is known about one role before the block size is."""

    config: EngineConfig
    registry: PluginRegistry
    model_config: PreTrainedConfig
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    max_model_len: int
    claimed: ClaimedLayers
    hooks: ModelHooks
    requirements: Mapping[str, CacheRequirements]
    weight_bytes: int

    def inspection(self, block_size: int, draft: Inspection | None = None) -> Inspection:
        """Ask for everything that depends on the block size."""
        num_spec_tokens = self.config.num_spec_tokens
        common = {"layers": self.claimed.layers, "model_config": self.model_config}
        slot_bytes = self.hooks.per_req_cache_bytes(**common, cache_dtype=self.dtype, num_spec_tokens=num_spec_tokens)
        warnings = self.registry.check_stateful(self.model_config.model_type, slot_bytes)
        slots_per_req = self.hooks.slots_per_req(**common, num_spec_tokens=num_spec_tokens)
        self.hooks.check_slots(slot_bytes, slots_per_req, self.requirements, num_spec_tokens)
        figures = CacheFigures(
            requirements=self.requirements,
            block_bytes=self.hooks.block_bytes(**common, block_size=block_size, cache_dtype=self.cache_dtype),
            slot_bytes=slot_bytes,
            slots_per_req=slots_per_req,
        )
        return Inspection(
            config=self.config,
            registry=self.registry,
            model_config=self.model_config,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            device=self.device,
            claimed=self.claimed,
            hooks=self.hooks,
            max_model_len=self.max_model_len,
            block_size=block_size,
            figures=figures,
            weight_bytes=self.weight_bytes,
            warnings=(*self.claimed.warnings, *warnings, *(() if draft is None else draft.warnings)),
            draft=draft,
        )


def _claim(
    config: EngineConfig,
    registry: PluginRegistry,
    model_config: PreTrainedConfig,
    model: nn.Module,
    max_model_len: int,
) -> _ClaimedRole:
    """Claim the layers of one role's meta model."""
    dtype = resolve_dtype(config, model_config)
    cache_dtype = resolve_cache_dtype(config, dtype)
    claimed = claim_layers(model, registry, model_config, config.tensor_parallel_size)
    hooks = registry.model_hooks(set(claimed.owners.values()))
    requirements = hooks.cache_requirements(
        layers=claimed.layers,
        model_config=model_config,
        cache_dtype=cache_dtype,
        num_spec_tokens=config.num_spec_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    return _ClaimedRole(
        config=config,
        registry=registry,
        model_config=model_config,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=resolve_device(config),
        max_model_len=max_model_len,
        claimed=claimed,
        hooks=hooks,
        requirements=requirements,
        weight_bytes=weight_bytes(model, config.tensor_parallel_size),
    )


def _claim_drafting(target: _ClaimedRole, model: nn.Module) -> _ClaimedRole | None:
    """Claim the layers of the role that drafts, if the config names one.

    Raises:
        ConfigError: the draft model has another vocabulary or is made for fewer tokens, or the model has no layers
            to draft with.
    """
    config, registry = target.config, target.registry
    if config.speculation == MTP:
        layers = build_mtp(model, target.model_config)
        role = _claim(config, registry, layers.config, layers, target.max_model_len)
        return replace(role, dtype=target.dtype, weight_bytes=weight_bytes(layers.layers))
    if config.speculation != DRAFT_MODEL:
        return None
    config = draft_config(config, target.max_model_len)
    model_config = resolve_config(config)
    found, expected = model_config.vocab_size, target.model_config.vocab_size
    if found != expected:
        raise ConfigError(
            f"the draft model's vocabulary has {found} tokens, the model's has {expected}; a draft model shares the "
            f"model's tokenizer"
        )
    try:
        max_model_len = _max_model_len(config, model_config)
    except ConfigError as error:
        raise ConfigError(f"the draft model does not reach as far as the model: {error}") from error
    draft = build_meta_model(model_config, resolve_dtype(config, model_config))
    return _claim(config, registry, model_config, draft, max_model_len)


def _check_float8(inspection: Inspection) -> None:
    """Refuse a float8 cache that a plugin would fill without scales."""
    if inspection.cache_dtype.itemsize > 1:
        return
    for name, needs in inspection.figures.requirements.items():
        if inspection.figures.block_bytes.get(name) and not needs.float8_cache:
            raise ConfigError(
                f"cache_dtype is {inspection.config.cache_dtype}, but {inspection.registry.describe(name)} does not "
                "say that its caches can be float8 (float8_cache in its requirements); take cache_dtype auto"
            )


def draft_config(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """The config of the draft model that `config` names."""
    return replace(
        config,
        model=config.draft_model,
        draft_model=None,
        speculation=None,
        revision=None,
        tokenizer=None,
        skip_tokenizer=True,
        max_model_len=max_model_len,
    )
