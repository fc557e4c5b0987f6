"""AttentionBatch by hand: what the engine would build for these rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from atom_core.plugin import AttentionBatch, Rewind

__all__ = ["Request", "Row", "StateShape", "build_batch"]

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class Request:
    """A request of the driver.

    Attributes:
        tokens: its text as far as it is known; a row computes the next of these.
        blocks: its blocks in order; enough for all tokens and drafts.
        group: its group of state slots, -1 for none.
        num_computed: tokens whose keys, values and state are in the caches.
        num_accepted: tokens kept from its previous step, 0 before the first.
    """

    tokens: list[int]
    blocks: list[int]
    group: int = -1
    num_computed: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class Row:
    """One row of a step.

    Attributes:
        request: whose tokens.
        count: how many of its next tokens are computed and kept.
        drafts: wrong tokens behind these, which the step computes and takes back; only for a decode.
        decode: a decode or verify row; else a prefill chunk.
    """

    request: Request
    count: int = 1
    drafts: Sequence[int] = field(default=())
    decode: bool = False

    @property
    def token_ids(self) -> list[int]:
        """What the row computes."""
        start = self.request.num_computed
        return [*self.request.tokens[start : start + self.count], *self.drafts]


@dataclass(frozen=True)
class StateShape:
    """How one plugin's slots belong to groups: slots of a group, and how state is taken back."""

    slots_per_req: int
    rewind: Rewind


def build_batch(
    rows: Sequence[Row],
    states: Mapping[str, StateShape],
    block_size: int,
    *,
    padding_rows: int = 0,
    padding_tokens: int = 0,
    device: torch.device | None = None,
) -> AttentionBatch:
    """Build the batch of a step.

    Args:
        rows: decodes first.
        states: by plugin with state.
        block_size: tokens per block.
        padding_rows: rows without tokens behind the others; they count as decodes where all rows do.
        padding_tokens: tokens of no row behind the others.
        device: where; the CPU when `None`.
    """
    counts = np.array([len(row.token_ids) for row in rows] + [0] * padding_rows, dtype=np.int64)
    computed = np.array([row.request.num_computed for row in rows] + [0] * padding_rows, dtype=np.int64)
    groups = np.array([row.request.group for row in rows] + [-1] * padding_rows, dtype=np.int64)
    accepted = np.array([row.request.num_accepted for row in rows] + [0] * padding_rows, dtype=np.int64)
    ends = np.cumsum(counts)
    starts = ends - counts
    num_decodes = sum(row.decode for row in rows)
    num_decodes += padding_rows * (num_decodes == len(rows))
    positions = np.arange(int(ends[-1])) + np.repeat(computed - starts, counts)
    width = max(1, -(-int((computed + counts).max()) // block_size))
    tables = np.zeros((len(counts), width), dtype=np.int32)
    for index, row in enumerate(rows):
        own = row.request.blocks[: -(-int(computed[index] + counts[index]) // block_size)]
        tables[index, : len(own)] = own
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    slots = tables[row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
    arrays: dict[str, Array] = {
        "query_start_loc": np.concatenate([[0], ends]).astype(np.int32),
        "seq_lens": (computed + counts).astype(np.int32),
        "num_computed": computed.astype(np.int32),
        "positions": np.pad(positions, (0, padding_tokens)).astype(np.int64),
        "slot_mapping": np.pad(slots, (0, padding_tokens), constant_values=-1).astype(np.int64),
        "block_tables": tables,
        "state_groups": groups.astype(np.int32),
        "num_accepted": accepted.astype(np.int32),
    }
    reads, writes = _state_slots(states, groups, accepted, counts, num_decodes, padding_tokens)
    tensors: dict[str, Any] = {name: torch.from_numpy(array).to(device or "cpu") for name, array in arrays.items()}
    hosts: dict[str, Any] = {f"{name}_host": array for name, array in arrays.items()}
    return AttentionBatch(
        num_seqs=len(counts),
        num_tokens=len(positions) + padding_tokens,
        num_decodes=num_decodes,
        num_decode_tokens=int(counts[:num_decodes].sum()),
        max_query_len=int(counts.max()),
        max_decode_query_len=int(counts[:num_decodes].max(initial=0)),
        max_seq_len=int((computed + counts).max()),
        block_size=block_size,
        **tensors,
        **hosts,
        state_read={name: torch.from_numpy(array).to(device or "cpu") for name, array in reads.items()},
        state_read_host=reads,
        state_write={name: torch.from_numpy(array).to(device or "cpu") for name, array in writes.items()},
        state_write_host=writes,
    )


def _state_slots(
    states: Mapping[str, StateShape], groups: Array, accepted: Array, counts: Array, num_decodes: int, num_padding: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """By plugin, the slot that each row reads and the slot that each token writes, as DESIGN section 4 says."""
    ends = np.cumsum(counts)
    row_of_token, token = np.repeat(np.arange(len(counts)), counts), np.arange(int(ends[-1]))
    decodes, lasts = row_of_token < num_decodes, token == ends[row_of_token] - 1
    has_group = groups[row_of_token] >= 0
    reads, writes = {}, {}
    for name, state in states.items():
        by_slots = state.rewind is Rewind.SLOTS
        base = groups * state.slots_per_req
        reads[name] = np.where(groups < 0, -1, base + np.maximum(accepted - 1, 0) * by_slots)
        offsets = (token - (ends - counts)[row_of_token]) * (by_slots & decodes)
        write = np.where(has_group & (decodes | lasts), base[row_of_token] + offsets, -1)
        writes[name] = np.pad(write, (0, num_padding), constant_values=-1)
    return reads, writes
