"""Which rows of a step each op gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from atom_core.plugin import AttentionBatch

__all__ = ["GdnMetadata", "Rows"]


@dataclass(frozen=True)
class Rows:
    """Some rows of the step, as views of the batch; token numbers stay those of the whole step.

    Attributes:
        query_start_loc: [rows + 1] int32.
        query_start_loc_host: the same in numpy.
        state_read: [rows] int64, the slot to continue from.
        max_query_len: most tokens of a row.
    """

    query_start_loc: Tensor
    query_start_loc_host: np.ndarray[Any, Any]
    state_read: Tensor
    max_query_len: int


@dataclass(frozen=True)
class GdnMetadata:
    """One step of the gated delta net layers.

    Attributes:
        decodes: rows that continue token by token; `None` without any.
        chunks: rows of prefill chunks; `None` without any.
        state_write: [num_tokens] int64, the slot that takes the state after each token, -1 for none.
    """

    decodes: Rows | None
    chunks: Rows | None
    state_write: Tensor

    @classmethod
    def build(cls, batch: AttentionBatch, name: str) -> GdnMetadata:
        """Split the batch; every tensor is a view, so a captured graph reads later steps' values.

        Args:
            batch: the step's batch.
            name: the plugin's name, under which the batch keeps its slots.
        """
        split, end = batch.num_decodes, batch.num_seqs
        start_loc, host, read = batch.query_start_loc, batch.query_start_loc_host, batch.state_read[name]
        decodes = chunks = None
        if split:
            decodes = Rows(start_loc[: split + 1], host[: split + 1], read[:split], batch.max_decode_query_len)
        if split < end:
            longest = int(np.diff(host[split : end + 1]).max())
            chunks = Rows(start_loc[split : end + 1], host[split : end + 1], read[split:end], longest)
        return cls(decodes, chunks, batch.state_write[name])
