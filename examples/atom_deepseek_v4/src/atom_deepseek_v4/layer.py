"""What a DeepSeek-V4 attention module becomes: one class for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from atom_core.errors import LayerError
from atom_core.plugin import KEYWORDS_WITHOUT_MEANING, AttentionLayer
from atom_deepseek_v4.compressor import Compressor
from atom_deepseek_v4.rotary import rotate

if TYPE_CHECKING:
    from atom_core.plugin import KernelTable, KVCacheTensor, SelectedKernel
    from atom_deepseek_v4.metadata import StepMetadata

__all__ = ["HeavilyCompressedLayer", "SparseLayer", "WindowLayer"]

_OPS = ("write_ring", "compress", "select", "attend")


class WindowLayer(AttentionLayer, nn.Module):
    """A layer that sees the last `window` tokens and nothing else; keys and values are the same vectors.

    Takes over the original's modules and sinks under their own names, and its call signature.

    Attributes:
        window: tokens that a query sees, itself included.
        head_dim: elements of a query head, and of the one key that all heads share.
        num_heads: query heads; every rank has all of them.
        ratio: tokens per compressed entry; `None` without entries.
    """

    rotary_name: ClassVar[str] = "main"
    q_a_proj: nn.Module
    q_a_norm: nn.Module
    q_b_proj: nn.Module
    q_b_norm: nn.Module
    kv_proj: nn.Module
    kv_norm: nn.Module
    o_a_proj: nn.Module
    o_b_proj: nn.Module
    sinks: Tensor

    def __init__(self, module: nn.Module) -> None:
        """Take over the parts.

        Args:
            module: the original.
        """
        super().__init__()
        original: Any = module
        for name, child in module.named_children():
            self.add_module(name, child)
        self.sinks = original.sinks
        self.original_class = type(module).__name__
        self.window: int = original.sliding_window
        self.head_dim: int = original.head_dim
        self.num_heads: int = original.num_heads
        self.scaling: float = original.scaling
        self.num_groups: int = original.config.o_groups
        self.ratio: int | None = None
        self.train(original.training)

    def compressions(self) -> tuple[Compressor, ...]:
        """Compressors of this layer."""
        return ()

    def selection_bytes(self, num_tokens: int) -> int:
        """Bytes of the selection of a step's tokens."""
        return 0

    def bind(self, kv_cache: KVCacheTensor, kernels: KernelTable) -> None:
        """Take the caches and choose kernels."""
        super().bind(kv_cache, kernels)
        self.ring = kv_cache.state["window_ring"]
        facts = {"num_heads": self.num_heads, "head_dim": self.head_dim, "window": self.window, "ratio": self.ratio}
        self._kernels: dict[str, SelectedKernel] = {
            op: kernels.select(
                f"deepseek_v4.{op}", device=self.ring.device, dtypes={"cache": self.ring.dtype}, facts=facts
            )
            for op in _OPS
        }
        for compressor in self.compressions():
            compressor.bind(kv_cache, self._kernels)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Mapping[str, tuple[Tensor, Tensor]],
        position_ids: Tensor | None = None,
        attention_mask: None = None,
        cache: None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Run the step's tokens.

        Args:
            hidden_states: [1, num_tokens, hidden_size].
            position_embeddings: cosines and sines, each [1, num_tokens, pairs], under `main` and `compress`.
            position_ids: the step's, which the layer knows.
            attention_mask: must be `None`.
            cache: must be `None`.
            keywords: only such without meaning here.

        Returns:
            [1, num_tokens, hidden_size], and `None` for the attention weights.

        Raises:
            LayerError: a mask, a cache, an unknown keyword, or another number of tokens than the step's.
        """
        self._check_call(hidden_states, {"attention_mask": attention_mask, "cache": cache, **keywords})
        batch, metadata = self.step.batch, self._metadata
        hidden = hidden_states[0]
        angles = {name: (cos[0], sin[0]) for name, (cos, sin) in position_embeddings.items()}
        cos, sin = angles[self.rotary_name]
        residual = self.q_a_norm(self.q_a_proj(hidden))
        query = rotate(self.q_b_norm(self.q_b_proj(residual).unflatten(-1, (self.num_heads, -1))), cos, sin)
        key = rotate(self.kv_norm(self.kv_proj(hidden)), cos, sin)
        for compressor in self.compressions():
            compressor.run(hidden, batch.positions, metadata)
        out = query.new_zeros(query.shape)
        self._kernels["attend"](
            query=query,
            key=key,
            ring=self.ring,
            out=out,
            sinks=self.sinks,
            scaling=self.scaling,
            window=self.window,
            ratio=self.ratio,
            slots_host=metadata.slots_host,
            **self._compressed(hidden, residual, angles),
            **self._rows(),
        )
        # Only now: the new tokens may lie on rows that the first of them had to read.
        self._kernels["write_ring"](
            values=key,
            ring=self.ring,
            positions=batch.positions,
            token_slots=metadata.token_slots,
            token_ends=metadata.token_ends,
        )
        grouped = rotate(out, cos, -sin).reshape(1, len(hidden), self.num_groups, -1)
        return self.o_b_proj(self.o_a_proj(grouped).flatten(2)), None

    def _compressed(
        self, hidden: Tensor, residual: Tensor, angles: Mapping[str, tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor | None]:
        """The entries and the selection of them, for `deepseek_v4.attend`."""
        return {"entries": None, "selection": None}

    def _rows(self) -> dict[str, Any]:
        """What ops take of the rows."""
        batch = self.step.batch
        names = "query_start_loc_host num_computed_host block_tables"
        return {name: getattr(batch, name) for name in names.split()}

    @property
    def _metadata(self) -> StepMetadata:
        metadata: StepMetadata = self.step.metadata["deepseek_v4"]
        return metadata

    def _check_call(self, hidden_states: Tensor, keywords: Mapping[str, Any]) -> None:
        where, num_tokens = f"{self.module_name} ({self.original_class})", self.step.batch.num_tokens
        if hidden_states.dim() != 3 or hidden_states.shape[:2] != (1, num_tokens):
            raise LayerError(
                f"{where} got hidden states {tuple(hidden_states.shape)}; expected [1, {num_tokens}, hidden_size], the "
                "step's tokens"
            )
        unknown = [
            name for name, value in keywords.items() if value is not None and name not in KEYWORDS_WITHOUT_MEANING
        ]
        if unknown:
            raise LayerError(
                f"{where} got {', '.join(sorted(unknown))}, which atom-deepseek-v4 does not apply: a layer knows its "
                "own mask and cache, and no other keyword may carry a value"
            )


class HeavilyCompressedLayer(WindowLayer):
    """A layer that also sees all compressed entries of windows that ended at or before the query."""

    rotary_name: ClassVar[str] = "compress"
    overlaps: ClassVar[bool] = False
    compressor: Any

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._main = Compressor(self.compressor, "compressor", "compressed", self.overlaps)
        self.ratio = self._main.ratio

    def compressions(self) -> tuple[Compressor, ...]:
        """The compressor of keys."""
        return (self._main,)

    def _compressed(
        self, hidden: Tensor, residual: Tensor, angles: Mapping[str, tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor | None]:
        return {"entries": self._main.entries, "selection": None}


class SparseLayer(HeavilyCompressedLayer):
    """A layer that sees the entries which its indexer scores best, from windows that overlap.

    Attributes:
        top_k: entries that a query sees at most.
        num_index_heads: heads of the indexer's queries.
        index_dim: elements of an indexer's query head and of its key.
    """

    overlaps: ClassVar[bool] = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        indexer = self.compressor.indexer
        self._index = Compressor(indexer, "indexer", "index_keys", self.overlaps)
        self.top_k: int = indexer.index_topk
        self.num_index_heads: int = indexer.num_heads
        self.index_dim: int = indexer.head_dim

    def compressions(self) -> tuple[Compressor, ...]:
        """The compressor of keys, and the indexer's."""
        return (self._main, self._index)

    def selection_bytes(self, num_tokens: int) -> int:
        """An entry's number takes 8 bytes."""
        return num_tokens * self.top_k * 8

    def _compressed(
        self, hidden: Tensor, residual: Tensor, angles: Mapping[str, tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor | None]:
        assert self.ratio is not None, "a sparse layer has a ratio"
        indexer = self.compressor.indexer
        query = indexer.q_b_proj(residual).unflatten(-1, (self.num_index_heads, -1))
        selection: Tensor = self._kernels["select"](
            index_query=rotate(query, *angles["compress"]),
            head_weights=indexer.scorer.weights_proj(hidden).float() * indexer.scorer.weights_scaling,
            index_keys=self._index.entries,
            scaling=indexer.scorer.softmax_scale,
            top_k=min(self.top_k, self.step.batch.max_seq_len // self.ratio),
            ratio=self.ratio,
            **self._rows(),
        )
        return {"entries": self._main.entries, "selection": selection}
