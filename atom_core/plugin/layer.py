"""What a claimed module becomes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from atom_core.plugin.batch import Step
    from atom_core.plugin.ops import KernelTable
    from atom_core.plugin.types import KVCacheTensor

__all__ = ["KEYWORDS_WITHOUT_MEANING", "AttentionLayer", "InterfaceLayer"]

KEYWORDS_WITHOUT_MEANING = frozenset(
    {
        "position_ids",
        "use_cache",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)
"""Keywords that transformers passes to attention and that change nothing here, whatever their value.

A layer that replaces a module ignores these, and refuses every other keyword that it does not know.
"""


class AttentionLayer:
    """Base of every layer that a plugin makes; the core finds owners and binds caches through it.

    Mix it into an `nn.Module` for attention that needs its own forward; the module then replaces the
    original in its parent and keeps the original's call signature and return shape.

    Attributes:
        compiled: names of methods that compute tensors from tensors and weights alone, which the core may compile while
            steps are captured; for layers that replace a module. Everything else of them runs as it is.
        module_name: dotted name of the claimed module; set by the core at binding.
        step: the runner's step; set by the core at binding.
        kv_cache: the layer's cache tensors; set by `bind` once they are allocated.
    """

    compiled: ClassVar[tuple[str, ...]] = ()
    module_name: str = ""
    step: Step
    kv_cache: KVCacheTensor

    def bind(self, kv_cache: KVCacheTensor, kernels: KernelTable) -> None:
        """Take the cache tensors and choose kernels; called before the first step, and again if the caches move.

        Args:
            kv_cache: this layer's tensors.
            kernels: where the layer selects its kernels.
        """
        self.kv_cache = kv_cache


class InterfaceLayer(AttentionLayer, ABC):
    """A layer for modules that call transformers' attention interface; the module itself stays.

    Attributes:
        known_keywords: keywords of the attention interface that `attend` understands, beside `scaling`.
            A call with any other keyword stops the engine.
    """

    known_keywords: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, **keywords: Any) -> Tensor:
        """Write the step's keys and values into the cache and attend.

        Args:
            query: [num_tokens, heads, dim], rotary embedding applied.
            key: [num_tokens, kv_heads, dim], rotary embedding applied.
            value: [num_tokens, kv_heads, value_dim].
            scaling: factor of the scores.
            keywords: those of `known_keywords` that the module passed, by transformers' names.

        Returns:
            [num_tokens, heads, value_dim]
        """
