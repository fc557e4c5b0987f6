"""What a gated delta net module becomes: its own projections around the ops `gdn.*`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from atom_core.errors import LayerError
from atom_core.plugin import KEYWORDS_WITHOUT_MEANING, AttentionLayer, KernelTable, KVCacheTensor, SelectedKernel
from atom_gdn.metadata import GdnMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FusedProjectionLayer",
    "GatedDeltaNetLayer",
    "HeadShape",
    "SeparateProjectionLayer",
    "SplitProjectionLayer",
]


@dataclass(frozen=True)
class HeadShape:
    """Heads of one layer on one rank.

    Attributes:
        k_heads: heads of queries and keys.
        v_heads: heads of values, a multiple of `k_heads`.
        head_k: dimension of a query or key.
        head_v: dimension of a value.
        taps: length of the convolution.
    """

    k_heads: int
    v_heads: int
    head_k: int
    head_v: int
    taps: int

    @property
    def key_dim(self) -> int:
        """Width of all queries, or all keys."""
        return self.k_heads * self.head_k

    @property
    def value_dim(self) -> int:
        """Width of all values."""
        return self.v_heads * self.head_v

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim


class GatedDeltaNetLayer(nn.Module, AttentionLayer, ABC):
    """Takes over a module's parameters under their names and keeps state in slots instead of a cache object.

    Attributes:
        taken: names of the original's submodules and parameters.
        shape: this rank's heads.
        beta_scale: factor of the update strength.
    """

    compiled: ClassVar[tuple[str, ...]] = ("project", "project_out")
    taken: ClassVar[tuple[str, ...]]
    conv1d: nn.Conv1d
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, original: nn.Module, shape: HeadShape) -> None:
        super().__init__()
        for name in ("conv1d", "A_log", "dt_bias", *self.taken):
            setattr(self, name, getattr(original, name))
        self.shape = shape
        self.beta_scale = 1.0
        self.train(original.training)

    @abstractmethod
    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute what the ops take from [num_tokens, hidden_size].

        Returns:
            Queries, keys and values side by side [num_tokens, channels]; the output gate [num_tokens, value_dim];
            decay a and update strength b, both [num_tokens, v_heads].
        """

    @abstractmethod
    def project_out(self, attended: Tensor, gate: Tensor) -> Tensor:
        """Normalize, gate and project [num_tokens * v_heads, head_v] to [num_tokens, hidden_size]."""

    def bind(self, kv_cache: KVCacheTensor, kernels: KernelTable) -> None:
        """Take the state tensors and choose a kernel for each op."""
        super().bind(kv_cache, kernels)
        self.conv_state = kv_cache.state["conv_state"]
        self.recurrent_state = kv_cache.state["recurrent_state"]
        dtypes = {"conv_state": self.conv_state.dtype, "recurrent_state": self.recurrent_state.dtype}
        facts = vars(self.shape)

        def select(op: str) -> SelectedKernel:
            return kernels.select(op, device=self.conv_state.device, dtypes=dtypes, facts=facts)

        self.causal_conv = select("gdn.causal_conv")
        self.chunk_delta_rule = select("gdn.chunk_delta_rule")
        self.decode = select("gdn.decode")

    def forward(
        self,
        hidden_states: Tensor,
        cache: None = None,
        attention_mask: None = None,
        *,
        cache_params: None = None,
        **keywords: Any,
    ) -> Tensor:
        """Run the layer over the step's tokens.

        Args:
            hidden_states: [1, num_tokens, hidden_size].
            cache: must be `None`.
            attention_mask: must be `None`.
            cache_params: `cache` by its name before transformers 5.24; must be `None`.
            keywords: only such without meaning here.

        Returns:
            [1, num_tokens, hidden_size]

        Raises:
            LayerError: a cache, a mask, an unknown keyword, or another number of tokens than the step's.
        """
        self._check_call(hidden_states, cache is None and cache_params is None, attention_mask is None, keywords)
        metadata: GdnMetadata = self.step.metadata["gdn"]
        qkv, gate, a, b = self.project(hidden_states[0])
        attended = qkv.new_zeros((qkv.shape[0], self.shape.v_heads, self.shape.head_v))
        weight = self.conv1d.weight.squeeze(1)
        gates = {"a": a, "b": b, "a_log": self.A_log, "dt_bias": self.dt_bias, "beta_scale": self.beta_scale}
        if (rows := metadata.decodes) is not None:
            self.decode(
                qkv=qkv,
                weight=weight,
                conv_state=self.conv_state,
                recurrent_state=self.recurrent_state,
                out=attended,
                query_start_loc=rows.query_start_loc,
                state_read=rows.state_read,
                state_write=metadata.state_write,
                max_query_len=rows.max_query_len,
                **gates,
            )
        if (rows := metadata.chunks) is not None:
            addressing = {**vars(rows), "state_write": metadata.state_write}
            convolved = torch.empty_like(qkv)
            self.causal_conv(x=qkv, weight=weight, conv_state=self.conv_state, out=convolved, **addressing)
            state = self.recurrent_state
            self.chunk_delta_rule(qkv=convolved, recurrent_state=state, out=attended, **gates, **addressing)
        output = self.project_out(attended.flatten(0, 1), gate.reshape(-1, self.shape.head_v))
        return output.unsqueeze(0)

    def _check_call(self, hidden_states: Tensor, no_cache: bool, no_mask: bool, keywords: Mapping[str, Any]) -> None:
        unknown = [
            name for name, value in keywords.items() if value is not None and name not in KEYWORDS_WITHOUT_MEANING
        ]
        if unknown or not no_cache or not no_mask:
            found = ", ".join([*unknown, *([] if no_cache else ["a cache"]), *([] if no_mask else ["a mask"])])
            raise LayerError(
                f"{self.module_name} ({type(self).__name__} of atom-gdn) was called with {found}; its state is in "
                "slots and it knows neither masks nor caches nor other keywords"
            )
        num_tokens = self.step.batch.num_tokens
        if hidden_states.shape[:2] != (1, num_tokens):
            raise LayerError(
                f"{self.module_name} ({type(self).__name__} of atom-gdn) got hidden states "
                f"{tuple(hidden_states.shape)}; expected [1, {num_tokens}, hidden_size], the step's tokens"
            )


class FusedProjectionLayer(GatedDeltaNetLayer):
    """One projection for queries, keys, values and gate, interleaved by key head, and one for b and a."""

    taken = ("in_proj_qkvz", "in_proj_ba", "norm", "out_proj")
    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module
    norm: nn.Module
    out_proj: nn.Module

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take the key heads apart; each brings the values, gates, b and a of its value heads."""
        shape = self.shape
        value_width = shape.value_dim // shape.k_heads
        by_key_head = self.in_proj_qkvz(hidden_states).unflatten(-1, (shape.k_heads, -1))
        query, key, value, gate = by_key_head.split([shape.head_k, shape.head_k, value_width, value_width], -1)
        qkv = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], -1)
        b, a = self.in_proj_ba(hidden_states).unflatten(-1, (shape.k_heads, -1)).chunk(2, -1)
        return qkv, gate.flatten(1), a.flatten(1), b.flatten(1)

    def project_out(self, attended: Tensor, gate: Tensor) -> Tensor:
        """Gated norm, then `out_proj`."""
        output: Tensor = self.out_proj(self.norm(attended, gate).view(-1, self.shape.value_dim))
        return output


class SplitProjectionLayer(GatedDeltaNetLayer):
    """One projection for queries, keys and values side by side, and one each for gate, b and a."""

    taken = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj")
    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module
    norm: nn.Module
    out_proj: nn.Module

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Four projections, in the order of the ops already."""
        projections = (self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)
        qkv, gate, a, b = (projection(hidden_states) for projection in projections)
        return qkv, gate, a, b

    def project_out(self, attended: Tensor, gate: Tensor) -> Tensor:
        """Gated norm, then `out_proj`."""
        output: Tensor = self.out_proj(self.norm(attended, gate).view(-1, self.shape.value_dim))
        return output


class SeparateProjectionLayer(GatedDeltaNetLayer):
    """A projection each for queries, keys, values, gate, b and a; the update strength may reach 2."""

    taken = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_norm", "o_proj")
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    g_proj: nn.Module
    b_proj: nn.Module
    a_proj: nn.Module
    o_norm: nn.Module
    o_proj: nn.Module

    def __init__(self, original: nn.Module, shape: HeadShape) -> None:
        super().__init__(original, shape)
        self.beta_scale = 2.0 if original.allow_neg_eigval else 1.0

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Six projections."""
        qkv = torch.cat([projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj)], -1)
        return qkv, self.g_proj(hidden_states), self.a_proj(hidden_states), self.b_proj(hidden_states)

    def project_out(self, attended: Tensor, gate: Tensor) -> Tensor:
        """Gated norm, then `o_proj`."""
        output: Tensor = self.o_proj(self.o_norm(attended, gate).view(-1, self.shape.value_dim))
        return output
