"""Which rows of a step each op gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from atom_core.plugin import AttentionBatch

__all__ = ["MimoMetadata", "Rows"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of the step, as views of the batch; token numbers stay those of the whole step.

    Attributes:
        query_start_loc: [rows + 1] int32, first token of each row and the end of the last.
        query_start_loc_host: the same in numpy.
        num_computed: [rows] int32, tokens of each row that came before this step.
        num_computed_host: the same in numpy.
        slots: [rows] int64, the slot of each row's rings, -1 for none; `None` where no layer has rings.
        slots_host: the same in numpy.
        seq_lens: [rows] int32, keys of each row, its new tokens included.
        block_tables: [rows, max_blocks] int32.
        max_query_len: most tokens of a row.
        max_seq_len: most keys of a row.
        ring_scratch: where kernels of `mimo.*` keep what depends on the rows alone, for the step's other layers.
        paged_scratch: the same for `mha.*`.
    """

    query_start_loc: Tensor
    query_start_loc_host: Array
    num_computed: Tensor
    num_computed_host: Array
    slots: Tensor | None
    slots_host: Array | None
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    ring_scratch: dict[Any, Any] = field(default_factory=dict)
    paged_scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def ring_arguments(self) -> dict[str, Any]:
        """What every op `mimo.*` takes of the rows."""
        names = "query_start_loc query_start_loc_host num_computed num_computed_host slots slots_host max_query_len"
        return {name: vars(self)[name] for name in names.split()} | {"scratch": self.ring_scratch}

    @property
    def paged_arguments(self) -> dict[str, Any]:
        """What `mha.decode` and `mha.prefill_paged` take of the rows."""
        names = "query_start_loc seq_lens block_tables max_query_len max_seq_len"
        return {name: vars(self)[name] for name in names.split()} | {"scratch": self.paged_scratch}

    @property
    def own_key_arguments(self) -> dict[str, Any]:
        """What `mha.prefill` takes of the rows."""
        arguments = {"query_start_loc": self.query_start_loc, "max_query_len": self.max_query_len}
        return arguments | {"scratch": self.paged_scratch}


@dataclass(frozen=True)
class MimoMetadata:
    """One step of the layers.

    Attributes:
        rows: all rows.
        decodes: rows of few tokens; `None` without any.
        chunks: rows of prefill chunks; `None` without any.
        has_prefix: a chunk has keys in the paged cache from earlier steps.
        has_padding: there are tokens of no row; their output is zero.
    """

    rows: Rows
    decodes: Rows | None
    chunks: Rows | None
    has_prefix: bool
    has_padding: bool

    def padded_out(self, query: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor for a layer's output whose tokens of no row are zero, one for all layers of a shape."""
        key = ("out", shape, query.dtype)
        if key not in self.rows.ring_scratch:
            self.rows.ring_scratch[key] = query.new_zeros(shape)
        out: Tensor = self.rows.ring_scratch[key]
        return out

    @classmethod
    def build(cls, batch: AttentionBatch, name: str) -> MimoMetadata:
        """Split the batch; every tensor is a view, so a captured graph reads later steps' values.

        Args:
            batch: the step's batch.
            name: the plugin's name, under which the batch keeps its slots.
        """
        split, end, starts = batch.num_decodes, batch.num_seqs, batch.query_start_loc_host
        decodes = chunks = None
        if split:
            decodes = _rows(batch, name, 0, split, batch.max_decode_query_len, batch.max_seq_len)
        if split < end:
            longest = int(np.diff(starts[split : end + 1]).max())
            chunks = _rows(batch, name, split, end, longest, int(batch.seq_lens_host[split:end].max()))
        return cls(
            rows=_rows(batch, name, 0, end, batch.max_query_len, batch.max_seq_len),
            decodes=decodes,
            chunks=chunks,
            has_prefix=bool((batch.num_computed_host[split:end] > 0).any()),
            has_padding=int(starts[end]) < batch.num_tokens,
        )


def _rows(batch: AttentionBatch, name: str, first: int, end: int, max_query_len: int, max_seq_len: int) -> Rows:
    slots, slots_host = batch.state_read.get(name), batch.state_read_host.get(name)
    return Rows(
        query_start_loc=batch.query_start_loc[first : end + 1],
        query_start_loc_host=batch.query_start_loc_host[first : end + 1],
        num_computed=batch.num_computed[first:end],
        num_computed_host=batch.num_computed_host[first:end],
        slots=None if slots is None else slots[first:end],
        slots_host=None if slots_host is None else slots_host[first:end],
        seq_lens=batch.seq_lens[first:end],
        block_tables=batch.block_tables[first:end],
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
