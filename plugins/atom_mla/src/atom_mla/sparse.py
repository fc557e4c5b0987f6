"""Latent attention to the tokens that an indexer selects."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from atom_core.errors import LayerError
from atom_mla.checks import check_call
from atom_mla.families import Family, Rotary
from atom_mla.layer import LatentLayer
from atom_mla.metadata import rows

if TYPE_CHECKING:
    from atom_core.plugin import KernelTable, KVCacheTensor

__all__ = ["SparseLatentLayer"]

_INDEXER_CHILDREN = {"k_norm", "weights_proj", "wk", "wq_b"}


class SparseLatentLayer(LatentLayer):
    """A latent layer whose query tokens attend only to their best `index_topk` tokens.

    DeepSeek-V3.2 (arXiv 2512.02556), section 2.1. The indexer's keys lie in their own paged tensor. A layer without
    an indexer uses the selection of the layer before it. A step in which no row exceeds `index_topk` tokens selects
    everything, so it runs densely and only writes the index keys.

    Attributes:
        top_k: `index_topk`.
    """

    ops: ClassVar[tuple[str, ...]] = (*LatentLayer.ops, "select_tokens", "attend_selected")

    def __init__(self, module: nn.Module, module_name: str, family: Family, modeling: ModuleType, tp_size: int) -> None:
        """Take over the projections and the indexer; arguments and errors as for `LatentLayer`."""
        super().__init__(module, module_name, family, modeling, tp_size)
        assert family.index_rotary is not None, "a sparse family names the rotation of its indexer"
        self._index_rotary: Rotary = family.index_rotary
        self.top_k: int = self.config.index_topk
        if not hasattr(self, "indexer"):
            self.add_module("indexer", None)
        if self.indexer is None:
            return
        children = {name for name, _ in self.indexer.named_children()}
        parameters = {name for name, _ in self.indexer.named_parameters(recurse=False)}
        if children != _INDEXER_CHILDREN or parameters or self.q_a_proj is None:
            raise LayerError(
                f"{module_name} ({self.original_class}) has an indexer of {', '.join(sorted(children | parameters))}; "
                f"expected {', '.join(sorted(_INDEXER_CHILDREN))}, and a low-rank query"
            )

    def cache_widths(self) -> dict[str, int]:
        """Values per token by cache field: index keys too, where the layer has an indexer."""
        widths = super().cache_widths()
        return widths if self.indexer is None else {**widths, "index_cache": self.indexer.head_dim}

    def facts(self) -> dict[str, int]:
        """Shape facts by which kernels are chosen."""
        facts = {**super().facts(), "top_k": self.top_k}
        if self.indexer is not None:
            facts |= {"index_heads": self.indexer.n_heads, "index_dim": self.indexer.head_dim}
        return facts

    def bind(self, kv_cache: KVCacheTensor, kernels: KernelTable) -> None:
        """Take the caches, the index keys' too."""
        super().bind(kv_cache, kernels)
        self._index_cache = kv_cache.paged.get("index_cache")
        self._index_scale = kv_cache.paged.get("index_scale")

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: Any = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Any, ...]:
        """Run the step's tokens; keywords and values returned are the original's.

        Args:
            hidden_states: [1, num_tokens, hidden_size].
            position_embeddings: what the model's rotary embedding returned for these tokens.
            position_ids: [1, num_tokens]; without meaning here.
            prev_topk_indices: [1, num_tokens, top_k] int32, the selection of the layer before; `None` in a step
                that runs densely.
            keywords: the original's others, all of them without meaning here.

        Returns:
            [1, num_tokens, hidden_size], `None` for the attention weights, and the selection where the original
            returns one.
        """
        check_call(self._what(), self.step.batch.num_tokens, hidden_states, keywords)
        output, selection = self._run(hidden_states, position_embeddings, position_ids, prev_topk_indices)
        return (output, None, selection) if self.family.returns_selection else (output, None)

    def _attend(
        self,
        query: Tensor,
        latent: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        position_embeddings: Any,
        previous: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        batch = self.step.batch
        everything = batch.max_seq_len <= self.top_k
        selection = previous
        if self.indexer is not None:
            self._write_index_keys(hidden, position_embeddings)
            if not everything:
                assert residual is not None, "an indexer reads the low-rank query"
                selection = self._select(hidden, residual, position_embeddings)
        if everything:
            return self._attend_dense(query, latent), None
        if selection is None:
            raise LayerError(f"{self._what()} has no indexer and no layer before it selected")
        attended = self._kernels["attend_selected"](
            self.absorb(query),
            selection[0],
            self._latent_cache,
            self._cache_scale,
            **rows(batch, 0, batch.num_seqs),
            scaling=self.scaling,
            value_dim=self.latent_dim,
        )
        return self.expand_output(attended), selection

    def _write_index_keys(self, hidden: Tensor, position_embeddings: Any) -> None:
        key = self.indexer.k_norm(self.indexer.wk(hidden))
        key = self._rotate_leading(key[:, None], position_embeddings)[0, 0]
        self._kernels["write_latent"](key, self._index_cache, self._index_scale, self.step.batch.slot_mapping)

    def _select(self, hidden: Tensor, residual: Tensor, position_embeddings: Any) -> Tensor:
        """[1, num_tokens, top_k] int32, positions in each token's request."""
        indexer, batch = self.indexer, self.step.batch
        query = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, indexer.head_dim)).transpose(1, 2)
        query = self._rotate_leading(query, position_embeddings)[0].transpose(0, 1)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5
        selection: Tensor = self._kernels["select_tokens"](
            query,
            weights[0],
            self._index_cache,
            self._index_scale,
            **rows(batch, 0, batch.num_seqs),
            scaling=indexer.softmax_scale,
            top_k=self.top_k,
        )
        return selection[None]

    def _rotate_leading(self, states: Tensor, position_embeddings: Any) -> Tensor:
        """Rotate the first `rope_dim` values of [1, heads, num_tokens, index_dim]."""
        rope, rest = states[..., : self.rope_dim], states[..., self.rope_dim :]
        return torch.cat((self.rotate(self._index_rotary, rope, rope, position_embeddings)[0], rest), -1)
