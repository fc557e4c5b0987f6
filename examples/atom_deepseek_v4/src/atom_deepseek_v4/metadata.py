"""What the layers need of a step beyond the batch: where tokens go in rings, and which windows close."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from atom_core.errors import LayerError

if TYPE_CHECKING:
    from torch import Tensor

    from atom_core.plugin import AttentionBatch, StepBuffers
    from atom_deepseek_v4.layer import WindowLayer

__all__ = ["ClosedWindows", "StepMetadata"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ClosedWindows:
    """The compression windows of one ratio whose last token is in this step; window w has tokens w * ratio and on.

    Attributes:
        windows: [closed] int64, the window's number in its request.
        slots: [closed] int64, the slot of the request.
        num_computed: [closed] int64, the position from which on the request's tokens are in this step.
        token_offsets: [closed] int64, what to add to a position to get the flat token, from `num_computed` on.
        entry_slots: [closed] int64, where the entry goes: block * entries per block + offset.
    """

    windows: Tensor
    slots: Tensor
    num_computed: Tensor
    token_offsets: Tensor
    entry_slots: Tensor

    @property
    def pooling_arguments(self) -> dict[str, Tensor]:
        """What `deepseek_v4.compress` takes of the windows."""
        return {name: value for name, value in vars(self).items() if name != "entry_slots"}

    def __len__(self) -> int:
        return self.windows.shape[0]


@dataclass(frozen=True)
class StepMetadata:
    """One step of the layers.

    Attributes:
        slots: [num_seqs] int64, the slot of each row.
        slots_host: its mirror.
        token_slots: [num_tokens] int64, the slot of each token's row; -1 for a padding token.
        token_ends: [num_tokens] int64, tokens of the row after this step, drafts included; 0 for a padding token.
        closed: by compression ratio, the windows that the step closes.
    """

    slots: Tensor
    slots_host: Array
    token_slots: Tensor
    token_ends: Tensor
    closed: dict[int, ClosedWindows]

    @classmethod
    def build(cls, layers: Sequence[Any], batch: AttentionBatch, buffers: StepBuffers, name: str) -> StepMetadata:
        """Compute the step's addresses on the host.

        Args:
            layers: the plugin's layers.
            batch: the step's batch.
            buffers: where tensors live.
            name: the plugin's name, under which the batch keeps its slots.

        Raises:
            LayerError: a row with tokens has no slot, and so no place for its state.
        """
        counts = np.diff(batch.query_start_loc_host)
        slots_host = batch.state_read_host[name]
        if (slots_host[counts > 0] < 0).any():
            raise LayerError(
                f"plugin {name!r} (atom-deepseek-v4): rows {np.flatnonzero((slots_host < 0) & (counts > 0)).tolist()} "
                "have tokens but no state slot; every request of a registered model type must have one"
            )
        owned: Sequence[WindowLayer] = layers
        num_tokens, padding = batch.num_tokens, batch.num_tokens - int(counts.sum())
        max_num_tokens = buffers.limits.max_num_tokens

        def upload(field: str, values: Array) -> Tensor:
            buffer = buffers.get(f"{name}.{field}", (max_num_tokens,), torch.int64)
            buffer.host[: len(values)] = values
            return buffer.upload(len(values))

        token_slots = np.pad(np.repeat(slots_host, counts), (0, padding), constant_values=-1)
        token_ends = np.pad(np.repeat(batch.seq_lens_host, counts), (0, padding))
        assert len(token_slots) == num_tokens, "one slot per token of the step"
        closed = {}
        for ratio in sorted({layer.ratio for layer in owned if layer.ratio is not None}):
            arrays = _closed_windows(batch, slots_host, ratio)
            closed[ratio] = ClosedWindows(**{key: upload(f"{key}.{ratio}", arrays[key]) for key in arrays})
        return cls(
            slots=batch.state_read[name],
            slots_host=slots_host,
            token_slots=upload("token_slots", token_slots),
            token_ends=upload("token_ends", token_ends),
            closed=closed,
        )


def _closed_windows(batch: AttentionBatch, slots: Array, ratio: int) -> dict[str, Array]:
    """The fields of `ClosedWindows`, in numpy."""
    computed = batch.num_computed_host.astype(np.int64)
    starts = batch.query_start_loc_host[:-1].astype(np.int64)
    first = computed // ratio
    counts = np.where(np.diff(batch.query_start_loc_host) > 0, batch.seq_lens_host // ratio - first, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    windows = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + first[rows]
    entries_per_block = batch.block_size // ratio
    blocks = batch.block_tables_host[rows, windows // entries_per_block].astype(np.int64)
    return {
        "windows": windows,
        "slots": slots[rows],
        "num_computed": computed[rows],
        "token_offsets": (starts - computed)[rows],
        "entry_slots": blocks * entries_per_block + windows % entries_per_block,
    }
