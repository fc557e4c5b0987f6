"""MhaLayer: what a claimed module runs instead of transformers' attention functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from atom_core.errors import LayerError
from atom_core.plugin import AttentionBatch, InterfaceLayer, KernelTable, KVCacheTensor, SelectedKernel
from atom_mha.kernels.float8 import dequantize, quantize
from atom_mha.step_plan import RunKind, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from atom_mha.heads import Heads
    from atom_mha.mask import Mask

__all__ = ["MhaLayer", "PositionScale"]


@dataclass(frozen=True)
class PositionScale:
    """Queries that their module scaled by a token's place in the flat batch instead of its position.

    A module that counts positions with `arange` is right only for a single sequence without a cache. The factor of
    position p is `log1p(floor((p + 1) / floor_scale)) * attn_scale + 1` (temperature tuning, arXiv 2501.19399).

    Attributes:
        floor_scale: positions that share a factor.
        attn_scale: strength.
    """

    floor_scale: float
    attn_scale: float

    def correction(self, batch: AttentionBatch) -> Tensor | None:
        """Right factor over applied factor: [num_tokens, 1, 1] float32, `None` where both are 1 for every token."""
        if batch.max_seq_len < self.floor_scale and batch.num_tokens < self.floor_scale:
            return None
        applied = self._factor(torch.arange(batch.num_tokens, device=batch.positions.device))
        return (self._factor(batch.positions) / applied).view(-1, 1, 1)

    def _factor(self, positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.floor_scale)) * self.attn_scale + 1.0


class MhaLayer(InterfaceLayer):
    """Grouped-query softmax attention over a paged cache, with the mask that was learned at claim time.

    Attributes:
        heads: shapes on this rank.
        mask: which keys a query sees.
    """

    known_keywords: ClassVar[frozenset[str]] = frozenset({"s_aux", "softcap", "sliding_window"})

    def __init__(self, heads: Heads, mask: Mask, position_scale: PositionScale | None = None) -> None:
        self.heads = heads
        self.mask = mask
        self._position_scale = position_scale
        self._kernels: dict[RunKind, SelectedKernel] = {}
        self._write_kv: SelectedKernel

    def bind(self, kv_cache: KVCacheTensor, kernels: KernelTable) -> None:
        """Take the cache tensors and choose kernels."""
        super().bind(kv_cache, kernels)
        case: dict[str, Any] = {
            "device": kv_cache.k_cache.device,
            "dtypes": {"cache": kv_cache.k_cache.dtype},
            "facts": {
                "num_heads": self.heads.num_heads,
                "num_kv_heads": self.heads.num_kv_heads,
                "head_dim": self.heads.head_dim,
                "v_head_dim": self.heads.v_head_dim,
                "block_size": kv_cache.k_cache.shape[1],
                "window": self.mask.window,
                "chunk": self.mask.chunk,
            },
        }
        self._write_kv = kernels.select("mha.write_kv", **case)
        self._kernels = {kind: kernels.select(f"mha.{kind}", **case) for kind in RunKind}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Write the step's keys and values into the cache and attend.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            value: [num_tokens, num_kv_heads, v_head_dim].
            scaling: factor of the scores.
            s_aux: [num_heads] sinks: logits that take part in the softmax and have no value.
            softcap: scores become `softcap * tanh(score / softcap)`.
            keywords: `sliding_window`, which must be the learned window.

        Returns:
            [num_tokens, num_heads, v_head_dim]

        Raises:
            LayerError: shapes or window differ from what was learned.
        """
        self._check(query, key, value, s_aux, keywords)
        batch = self.step.batch
        plan: StepPlan = self.step.metadata["mha"]
        if self._position_scale is not None:
            correction = plan.shared(self._position_scale, lambda scale: scale.correction(batch))
            query = query if correction is None else (query * correction).to(query.dtype)
        caches = self.kv_cache.k_cache, self.kv_cache.v_cache, self.kv_cache.k_scale, self.kv_cache.v_scale
        self._write_kv(key, value, *caches, batch.slot_mapping, plan.scratch)
        if self.kv_cache.k_scale is not None and any(run.kind is RunKind.PREFILL for run in plan.runs):
            # As the cache has them, so that a prompt's result does not depend on how it is cut.
            key, value = (dequantize(*quantize(new), query.dtype) for new in (key, value))
        shape = query.shape[0], self.heads.num_heads, self.heads.v_head_dim
        # Tokens of no row stay zero: one tensor for all layers, whose rows each layer writes anew.
        out = (
            plan.shared(("out", shape, query.dtype), lambda _: query.new_zeros(shape))
            if plan.has_padding
            else (query.new_empty(shape))
        )
        mask = {"window": self.mask.window, "chunk": self.mask.chunk}
        options = {"scaling": scaling, "soft_cap": softcap, "sinks": s_aux, **mask}
        for run in plan.runs:
            kernel = self._kernels[run.kind]
            if run.kind is RunKind.PREFILL:
                kernel(query, key, value, out, run.query_start_loc, run.max_query_len, scratch=run.scratch, **options)
            else:
                kernel(
                    query,
                    *caches,
                    out,
                    run.query_start_loc,
                    run.seq_lens,
                    run.block_tables,
                    run.max_query_len,
                    run.max_seq_len,
                    scratch=run.scratch,
                    **options,
                )
        return out

    def _check(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, keywords: dict[str, Any]) -> None:
        heads = self.heads
        if (
            query.shape[1:] != (heads.num_heads, heads.head_dim)
            or key.shape[1:] != (heads.num_kv_heads, heads.head_dim)
            or value.shape[1:] != (heads.num_kv_heads, heads.v_head_dim)
            or not query.shape[0] == key.shape[0] == value.shape[0]
        ):
            raise LayerError(
                f"{self.module_name} passed query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)}; atom-mha learned {heads} when it claimed the module"
            )
        if sinks is not None and sinks.shape != (heads.num_heads,):
            raise LayerError(f"{self.module_name} passed sinks {tuple(sinks.shape)}, expected ({heads.num_heads},)")
        if keywords and keywords["sliding_window"] != self.mask.window:
            raise LayerError(
                f"{self.module_name} passed sliding_window={keywords['sliding_window']}, but its model's mask is "
                f"{self.mask} for this layer"
            )
