"""The small values that cross the contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from atom_core.plugin.layer import AttentionLayer

__all__ = ["CacheRequirements", "Claim", "GraphSupport", "KVCacheTensor", "PluginInfo", "Rewind"]


@dataclass(frozen=True)
class PluginInfo:
    """Who a plugin is.

    Attributes:
        name: the entry point's name; prefixes the plugin's tensors and ops.
        summary: one line for `atom plugins`.
        contract_version: the contract that the plugin was written for: write the number, not `CONTRACT_VERSION`.
    """

    name: str
    summary: str
    contract_version: int


@dataclass(frozen=True)
class Claim:
    """A plugin's offer to own a module.

    Attributes:
        layer: what runs instead: an `InterfaceLayer` for a module that calls transformers' attention
            interface, or an `nn.Module` that replaces the module in its parent.
        exact: made for this very class; beats a generic claim.
    """

    layer: AttentionLayer
    exact: bool


class Rewind(StrEnum):
    """How rejected draft tokens are taken back out of per-request state."""

    SLOTS = "slots"
    """Draft token i writes slot base + i; the next step reads base + last accepted."""
    OVERWRITE = "overwrite"
    """State is addressed by position; later tokens overwrite what was rejected."""
    NEVER = "never"
    """State cannot be taken back: no speculation with this plugin."""


class GraphSupport(StrEnum):
    """Which steps may be captured as a device graph."""

    NEVER = "never"
    DECODE = "decode"
    """Steps in which every request has one token."""
    UNIFORM = "uniform"
    """Steps in which every request has the same number of tokens."""


@dataclass(frozen=True)
class CacheRequirements:
    """What a plugin needs from the cache of one model.

    Attributes:
        block_size_multiple: the block size must be a multiple of this many tokens.
        prefix_cacheable: paged blocks alone (with a state checkpoint, where there is state) restore a prefix.
        rewind: how state forgets rejected draft tokens; ignored without state.
        graph_support: which steps may be captured.
        workspace_bytes: scratch memory of the largest step.
        float8_cache: paged tensors may be asked for in float8; the plugin then keeps scales of its own beside them.
        initial_values: by state tensor (without the plugin's prefix), what a slot holds at lease; 0 if not named.
    """

    block_size_multiple: int = 1
    prefix_cacheable: bool = True
    rewind: Rewind | str = Rewind.SLOTS
    graph_support: GraphSupport | str = GraphSupport.NEVER
    workspace_bytes: int = 0
    float8_cache: bool = False
    initial_values: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewind", Rewind(self.rewind))
        object.__setattr__(self, "graph_support", GraphSupport(self.graph_support))
        if self.block_size_multiple < 1 or self.workspace_bytes < 0:
            raise ValueError(f"block_size_multiple must be >= 1 and workspace_bytes >= 0, found {self}")


@dataclass(frozen=True)
class KVCacheTensor:
    """One layer's share of the cache tensors, by field name.

    Attributes:
        paged: per field `[num_blocks, ...]`, a view of the layer's row.
        state: per field `[num_slots, ...]`, a view of the layer's row.
    """

    paged: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def k_cache(self) -> Tensor:
        """The keys, `[num_blocks, block_size, heads, dim]` in the usual layout."""
        return self.paged["k_cache"]

    @property
    def v_cache(self) -> Tensor:
        """The values, `[num_blocks, block_size, heads, dim]` in the usual layout."""
        return self.paged["v_cache"]

    @property
    def k_scale(self) -> Tensor | None:
        """Scales of quantized keys, if any."""
        return self.paged.get("k_scale")

    @property
    def v_scale(self) -> Tensor | None:
        """Scales of quantized values, if any."""
        return self.paged.get("v_scale")
