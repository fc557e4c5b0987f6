"""What a latent layer needs to know of a step beyond its batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atom_core.plugin import AttentionBatch

__all__ = ["LatentMetadata", "rows"]


@dataclass(frozen=True)
class LatentMetadata:
    """One step's kind; host values only, so no buffers.

    Attributes:
        prefill_has_prefix: some prefill chunk continues a cached prefix, so the chunk's own latents are not enough.
    """

    prefill_has_prefix: bool

    @classmethod
    def build(cls, batch: AttentionBatch) -> LatentMetadata:
        """Look at the prefill rows."""
        return cls(bool((batch.num_computed_host[batch.num_decodes : batch.num_seqs] > 0).any()))


def rows(batch: AttentionBatch, first: int, last: int) -> dict[str, Any]:
    """Arguments that describe rows `first` to `last` of a step to an op over a paged cache."""
    whole = first == 0 and last == batch.num_decodes
    return {
        "block_tables": batch.block_tables[first:last],
        "query_start_loc": batch.query_start_loc[first : last + 1],
        "seq_lens": batch.seq_lens[first:last],
        "query_start_loc_host": batch.query_start_loc_host[first : last + 1],
        "seq_lens_host": batch.seq_lens_host[first:last],
        "max_query_len": batch.max_decode_query_len if whole else batch.max_query_len,
        "max_seq_len": batch.max_seq_len,
    }
