"""One compressor of a layer: from hidden states, through a ring of projections, to entries in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atom_deepseek_v4.rotary import rotate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atom_core.plugin import KVCacheTensor, SelectedKernel
    from atom_deepseek_v4.metadata import StepMetadata

__all__ = ["Compressor"]


class Compressor:
    """Runs a compressor module of transformers, the attention's or the indexer's, on the step's tokens.

    The module stays where it is and keeps its parameters; its own forward, which pools a flat batch as if it were
    one request, is never called.

    Args:
        module: the compressor or indexer, perhaps on `meta`.
        name: `compressor` or `indexer`; its ring is the state field `<name>_ring`.
        entries_field: the paged field of its entries.
        overlaps: windows overlap: an entry pools its own window and the one before, each with projections of its own.

    Attributes:
        entries_field: as the argument.
        ring_field: the state field of its ring.
        overlaps: as the argument.
        ratio: tokens per entry.
        dim: elements of an entry.
        ring: [num_slots, rows, 2, width], values and gates of the last tokens; set by `bind`.
        entries: [num_blocks, block_size / ratio, dim]; set by `bind`.
    """

    ring: Tensor
    entries: Tensor

    def __init__(self, module: Any, name: str, entries_field: str, overlaps: bool) -> None:
        self.entries_field, self.ring_field, self.overlaps = entries_field, f"{name}_ring", overlaps
        self._module = module
        self.ratio: int = module.compress_rate
        self.dim: int = module.head_dim

    @property
    def width(self) -> int:
        """Elements of a token's values: one series for the own window, and one for the next where windows overlap."""
        return self.dim * (2 if self.overlaps else 1)

    @property
    def num_source_tokens(self) -> int:
        """Tokens that one entry pools."""
        return self.ratio * (2 if self.overlaps else 1)

    @property
    def dtype(self) -> torch.dtype:
        """What the projections give; DeepSeek ships them unquantized."""
        dtype: torch.dtype = self._module.kv_proj.weight.dtype
        return dtype

    def bind(self, kv_cache: KVCacheTensor, kernels: Mapping[str, SelectedKernel]) -> None:
        """Take ring, entries and kernels."""
        self.ring, self.entries = kv_cache.state[self.ring_field], kv_cache.paged[self.entries_field]
        self._kernels = kernels

    def run(self, hidden: Tensor, positions: Tensor, metadata: StepMetadata) -> None:
        """Write the entries that the step's tokens complete, then the tokens' projections.

        Args:
            hidden: [num_tokens, hidden_size].
            positions: [num_tokens] int64.
            metadata: the step's.
        """
        values = torch.stack((self._module.kv_proj(hidden), self._module.gate_proj(hidden)), dim=1)
        closed = metadata.closed[self.ratio]
        if len(closed):
            pooled = self._kernels["compress"](
                values=values,
                ring=self.ring,
                position_bias=self._module.position_bias,
                overlaps=self.overlaps,
                **closed.pooling_arguments,
            )
            entries = self._rotated(self._module.kv_norm(pooled), closed.windows * self.ratio)
            self.entries.flatten(0, 1)[closed.entry_slots] = entries.to(self.entries.dtype)
        # Only now: the new tokens may lie on rows that the windows had to read.
        self._kernels["write_ring"](
            values=values,
            ring=self.ring,
            positions=positions,
            token_slots=metadata.token_slots,
            token_ends=metadata.token_ends,
        )

    def _rotated(self, entries: Tensor, positions: Tensor) -> Tensor:
        """Rotate [closed, dim] by the positions of their windows' first tokens."""
        cos, sin = self._module.rotary_emb(entries, position_ids=positions[None], layer_type="compress")
        return rotate(entries, cos[0], sin[0])
