"""Planning the cache: from byte figures and limits to counts; a pure function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from atom_core.errors import CapacityError, ConfigError, EngineError

if TYPE_CHECKING:
    from atom_core.plugin.types import CacheRequirements

__all__ = [
    "TYPICAL_REQUEST_TOKENS",
    "CacheFigures",
    "CachePlan",
    "choose_block_size",
    "least_over_ranks",
    "plan_cache",
    "with_draft_names",
]

_DRAFT = "draft/"
_T = TypeVar("_T")
TYPICAL_REQUEST_TOKENS = 2048
"""Tokens that each group after the first brings along as blocks, where blocks and groups compete for memory."""


@dataclass(frozen=True)
class CacheFigures:
    """What the plugins declared for one model, one block size and one rank; every mapping is by plugin.

    Attributes:
        requirements: what each plugin needs from the cache.
        block_bytes: bytes of one block over the plugin's layers.
        slot_bytes: bytes of one state slot over the plugin's layers.
        slots_per_req: slots of one request; of no meaning for a plugin without slot bytes.
    """

    requirements: Mapping[str, CacheRequirements]
    block_bytes: Mapping[str, int]
    slot_bytes: Mapping[str, int]
    slots_per_req: Mapping[str, int]

    def with_draft(self, draft: CacheFigures) -> CacheFigures:
        """Add the figures of a second role that drafts, under names of its own: one block, one group for both."""
        return CacheFigures(
            requirements=with_draft_names(self.requirements, draft.requirements),
            block_bytes=with_draft_names(self.block_bytes, draft.block_bytes),
            slot_bytes=with_draft_names(self.slot_bytes, draft.slot_bytes),
            slots_per_req=with_draft_names(self.slots_per_req, draft.slots_per_req),
        )

    @property
    def state_slots_per_req(self) -> dict[str, int]:
        """Slots of one request, of the plugins that have state."""
        return {plugin: self.slots_per_req[plugin] for plugin, size in self.slot_bytes.items() if size}

    @property
    def group_bytes(self) -> int:
        """Bytes of one request's state."""
        return sum(self.slot_bytes[plugin] * slots for plugin, slots in self.state_slots_per_req.items())

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: one slot of each plugin."""
        return sum(self.slot_bytes.values())

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all plugins."""
        return sum(self.block_bytes.values())

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory of the largest step over all plugins."""
        return sum(needs.workspace_bytes for needs in self.requirements.values())

    @property
    def prefix_cacheable(self) -> bool:
        """Whether every plugin can start from a shared prefix."""
        return all(needs.prefix_cacheable for needs in self.requirements.values())


@dataclass(frozen=True)
class CachePlan:
    """How many blocks, groups and checkpoints there are, and what one of each weighs on this rank.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks in all.
        num_groups: requests with per-request state that can run at once; 0 for a model without state.
        num_checkpoints: state checkpoints in all.
        block_bytes: bytes of one block.
        group_bytes: bytes of one request's state.
        checkpoint_bytes: bytes of one checkpoint.
        workspace_bytes: bytes kept for the plugins' workspace and whatever else was fixed before the plan.
        budget_bytes: what workspace and caches were planned to fit in.
        max_model_len: most tokens of a request.
        slots_per_req: slots of one request, of the plugins that have state.
        warnings: what a user should know, one sentence each.
    """

    block_size: int
    num_blocks: int
    num_groups: int
    num_checkpoints: int
    block_bytes: int
    group_bytes: int
    checkpoint_bytes: int
    workspace_bytes: int
    budget_bytes: int
    max_model_len: int
    slots_per_req: Mapping[str, int]
    warnings: tuple[str, ...] = ()

    def of_role(self, *, draft: bool) -> CachePlan:
        """The plan as one role sees it: the slots of its own plugins, under their own names."""
        slots = self.slots_per_req.items()
        own = {name.removeprefix(_DRAFT): count for name, count in slots if name.startswith(_DRAFT) == draft}
        return replace(self, slots_per_req=own)

    @property
    def total_bytes(self) -> int:
        """Bytes of workspace, blocks, groups and checkpoints."""
        return (
            self.workspace_bytes
            + self.num_blocks * self.block_bytes
            + self.num_groups * self.group_bytes
            + self.num_checkpoints * self.checkpoint_bytes
        )

    @property
    def tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.block_size

    def max_per_req_cache_slots(self, plugin: str) -> int:
        """Slots that running requests can lease from a plugin: groups x slots per request."""
        return self.num_groups * self.slots_per_req.get(plugin, 0)

    def num_slots(self, plugin: str) -> int:
        """Slots of a plugin's state tensors: those of requests, then one per checkpoint."""
        return self.max_per_req_cache_slots(plugin) + (self.num_checkpoints if plugin in self.slots_per_req else 0)

    def to_dict(self) -> dict[str, Any]:
        """Every field and total as plain values, for `--json`."""
        fields = asdict(self)
        fields["slots_per_req"] = dict(self.slots_per_req)
        fields["warnings"] = list(self.warnings)
        slots = {plugin: self.num_slots(plugin) for plugin in self.slots_per_req}
        return {**fields, "total_bytes": self.total_bytes, "tokens": self.tokens, "num_slots": slots}


def with_draft_names(target: Mapping[str, _T], draft: Mapping[str, _T]) -> dict[str, _T]:
    """Join what is by plugin for two roles of a model; the names of the role that drafts begin with `draft/`."""
    return {**target, **{f"{_DRAFT}{plugin}": value for plugin, value in draft.items()}}


def choose_block_size(requirements: Mapping[str, CacheRequirements], requested: int | None, default: int) -> int:
    """Choose the least block size that suits every plugin and is not below the default, or check a requested one.

    Args:
        requirements: by plugin.
        requested: tokens per block that the user asked for.
        default: least tokens per block where the user asked for nothing.

    Raises:
        ConfigError: `requested` is not a multiple of what some plugin needs.
    """
    multiple = math.lcm(*(needs.block_size_multiple for needs in requirements.values()))
    if requested is None:
        return -(-default // multiple) * multiple
    if requested >= 1 and requested % multiple == 0:
        return requested
    against = [
        f"{plugin} needs a multiple of {needs.block_size_multiple}"
        for plugin, needs in requirements.items()
        if requested % needs.block_size_multiple
    ]
    below = requested // multiple * multiple
    fitting = " and ".join(str(size) for size in (below, below + multiple) if size > 0)
    raise ConfigError(
        f"block size {requested} does not fit this model: {', '.join(against) or 'it must be positive'}; "
        f"the next block sizes that fit: {fitting}"
    )


def plan_cache(
    figures: CacheFigures,
    *,
    budget_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    checkpoint_share: float = 0.0,
    max_blocks: int | None = None,
    fixed_bytes: int = 0,
) -> CachePlan:
    """Plan the cache that fits a budget.

    The first group comes with the blocks of a request of `max_model_len` tokens, each further group with the blocks
    of a request of `TYPICAL_REQUEST_TOKENS` tokens, up to `max_num_seqs` groups; the share of what is left goes to
    checkpoints, the rest to blocks. A larger budget never gives fewer groups, nor fewer blocks to as many groups.

    Args:
        figures: what the plugins declared, for this block size.
        budget_bytes: bytes for caches, workspace and `fixed_bytes`; weights are already taken off.
        block_size: tokens per block, from `choose_block_size`.
        max_model_len: most tokens of a request.
        max_num_seqs: most requests that run at once, and so the most groups.
        checkpoint_share: part of the bytes left after the groups that checkpoints get, 0 to 1.
        max_blocks: most blocks; enough for `max_num_seqs` requests of `max_model_len` tokens when `None`.
        fixed_bytes: further bytes to keep free, activations for example; counted as workspace.

    Raises:
        ConfigError: `max_blocks` cannot hold one request, or `checkpoint_share` is no share.
        CapacityError: the budget does not hold one group and the blocks of one request of `max_model_len` tokens.
    """
    request_blocks = -(-max_model_len // block_size)
    if max_blocks is None:
        max_blocks = max_num_seqs * request_blocks
    if max_blocks < request_blocks:
        raise ConfigError(
            f"max_blocks is {max_blocks}, but one request of max_model_len {max_model_len} tokens needs "
            f"{request_blocks} blocks of {block_size}; raise max_blocks or lower max_model_len"
        )
    if not 0 <= checkpoint_share <= 1:
        raise ConfigError(f"checkpoint_share must be between 0 and 1, found {checkpoint_share}")
    workspace_bytes = figures.workspace_bytes + fixed_bytes
    available = budget_bytes - workspace_bytes
    least = figures.group_bytes + request_blocks * figures.bytes_per_block
    if available < least:
        raise CapacityError(_does_not_fit(figures, budget_bytes, workspace_bytes, block_size, max_model_len))
    further_blocks = min(request_blocks, -(-TYPICAL_REQUEST_TOKENS // block_size))
    num_groups = 0
    if figures.group_bytes:
        # Either every further group brings its blocks, or the blocks are at their limit and groups alone cost.
        beside_growing = 1 + (available - least) // (figures.group_bytes + further_blocks * figures.bytes_per_block)
        beside_all = (available - max_blocks * figures.bytes_per_block) // figures.group_bytes
        num_groups = min(max_num_seqs, max_blocks, max(beside_growing, beside_all))
    num_blocks = min(max_blocks, request_blocks + max(num_groups - 1, 0) * further_blocks)
    left = available - num_groups * figures.group_bytes - num_blocks * figures.bytes_per_block
    with_checkpoints = figures.prefix_cacheable and figures.checkpoint_bytes > 0
    # In integers: a float share of terabytes would round, and a larger budget could then give fewer blocks.
    for_checkpoints = left * round(checkpoint_share * 10**6) // 10**6 if with_checkpoints else 0
    if figures.bytes_per_block:
        further = (left - for_checkpoints) // figures.bytes_per_block
        if with_checkpoints:  # no more than one for each block is of use: blocks get the rest of the share
            one_each = left - num_blocks * figures.checkpoint_bytes
            further = max(further, one_each // (figures.bytes_per_block + figures.checkpoint_bytes))
        num_blocks = min(max_blocks, num_blocks + further)
    else:
        num_blocks = max_blocks
    num_checkpoints = min(num_blocks, for_checkpoints // figures.checkpoint_bytes) if with_checkpoints else 0
    plan = CachePlan(
        block_size=block_size,
        num_blocks=num_blocks,
        num_groups=num_groups,
        num_checkpoints=num_checkpoints,
        block_bytes=figures.bytes_per_block,
        group_bytes=figures.group_bytes,
        checkpoint_bytes=figures.checkpoint_bytes,
        workspace_bytes=workspace_bytes,
        budget_bytes=budget_bytes,
        max_model_len=max_model_len,
        slots_per_req=figures.state_slots_per_req,
    )
    return replace(plan, warnings=_warnings(plan, max_num_seqs))


def least_over_ranks(plans: Sequence[CachePlan]) -> CachePlan:
    """Lower every count of a plan to the least over all ranks, so that all ranks have the same counts.

    Args:
        plans: one per rank, this rank's own first: its bytes and its budget stay, as they are true of this rank only.

    Raises:
        EngineError: the ranks planned with different limits.
    """
    own = plans[0]
    for plan in plans[1:]:
        if (plan.block_size, plan.max_model_len) != (own.block_size, own.max_model_len):
            raise EngineError(
                "ranks planned different caches: "
                f"block size {own.block_size} and max_model_len {own.max_model_len} here, "
                f"{plan.block_size} and {plan.max_model_len} elsewhere; start every rank with the same options"
            )
    return replace(
        own,
        num_blocks=min(plan.num_blocks for plan in plans),
        num_groups=min(plan.num_groups for plan in plans),
        num_checkpoints=min(plan.num_checkpoints for plan in plans),
        warnings=tuple(dict.fromkeys(warning for plan in plans for warning in plan.warnings)),
    )


def _warnings(plan: CachePlan, max_num_seqs: int) -> tuple[str, ...]:
    if not plan.group_bytes or plan.num_groups >= max_num_seqs:
        return ()
    return (
        f"state for {plan.num_groups} requests at once instead of max_num_seqs {max_num_seqs}: one takes "
        f"{plan.group_bytes:,} bytes, all {max_num_seqs} would take {max_num_seqs * plan.group_bytes:,} of a budget of "
        f"{plan.budget_bytes:,} bytes",
    )


def _does_not_fit(
    figures: CacheFigures, budget_bytes: int, workspace_bytes: int, block_size: int, max_model_len: int
) -> str:
    """Say what the smallest useful cache weighs, what fits this budget and what this length needs."""
    request_blocks = -(-max_model_len // block_size)
    needed = workspace_bytes + figures.group_bytes + request_blocks * figures.bytes_per_block
    left = budget_bytes - workspace_bytes - figures.group_bytes
    fitting_tokens = left // figures.bytes_per_block * block_size if figures.bytes_per_block and left > 0 else 0
    advice = f"lower max_model_len to {fitting_tokens} or raise" if fitting_tokens else "raise"
    return (
        f"the cache does not fit: a budget of {budget_bytes:,} bytes cannot hold one request of max_model_len "
        f"{max_model_len}, which needs {needed:,} bytes (workspace {workspace_bytes:,}, per-request state "
        f"{figures.group_bytes:,}, {request_blocks} blocks of {figures.bytes_per_block:,}); "
        f"{advice} the memory by {needed - budget_bytes:,} bytes"
    )
