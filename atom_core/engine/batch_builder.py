"""BatchBuilder: from scheduled rows to the arrays that a step reads, vectorised over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from atom_core.plugin import AttentionBatch, HostDeviceBuffer, Rewind, StepBuffers

if TYPE_CHECKING:
    from torch import Tensor

    from atom_core.engine.scheduled_batch import ScheduledBatch

__all__ = ["BatchBuilder", "StateLayout", "StepInputs"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StateLayout:
    """How one plugin's slots belong to groups.

    Attributes:
        slots_per_req: contiguous slots of a group.
        rewind: whether the step after a verification reads base + last accepted, or base.
    """

    slots_per_req: int
    rewind: Rewind


@dataclass(frozen=True)
class StepInputs:
    """What the model's forward gets beside the batch.

    Attributes:
        input_ids: [1, num_tokens] int64.
        position_ids: [1, num_tokens] int64.
        batch: what attention sees.
    """

    input_ids: Tensor
    position_ids: Tensor
    batch: AttentionBatch


class BatchBuilder:
    """Fills persistent buffers from a scheduled batch.

    The block table of every running sequence is kept as a row of one array, to which only new blocks are
    added, so that the work of a step does not grow with the tokens generated before.
    """

    def __init__(self, states: Mapping[str, StateLayout], buffers: StepBuffers) -> None:
        shape = buffers.limits
        self._block_size = shape.block_size
        self._states = dict(states)
        rows, tokens = shape.max_num_seqs, shape.max_num_tokens
        self._table: Array = np.zeros((rows, shape.max_blocks_per_seq), dtype=np.int32)

        def buffer(name: str, size: tuple[int, ...], dtype: torch.dtype) -> HostDeviceBuffer:
            return buffers.get(f"core.{name}", size, dtype)

        self._input_ids = buffer("input_ids", (tokens,), torch.int64)
        self._positions = buffer("positions", (tokens,), torch.int64)
        self._slot_mapping = buffer("slot_mapping", (tokens,), torch.int64)
        self._query_start_loc = buffer("query_start_loc", (rows + 1,), torch.int32)
        self._seq_lens = buffer("seq_lens", (rows,), torch.int32)
        self._num_computed = buffer("num_computed", (rows,), torch.int32)
        self._block_tables = buffer("block_tables", (rows, shape.max_blocks_per_seq), torch.int32)
        self._state_groups = buffer("state_groups", (rows,), torch.int32)
        self._num_accepted = buffer("num_accepted", (rows,), torch.int32)
        self._state_read = {name: buffer(f"state_read.{name}", (rows,), torch.int64) for name in states}
        self._state_write = {name: buffer(f"state_write.{name}", (tokens,), torch.int64) for name in states}

    def build(self, scheduled: ScheduledBatch) -> StepInputs:
        """Fill the buffers for one step.

        Args:
            scheduled: at least one row; each sequence has its row of the block tables, and blocks for all its tokens.
        """
        seqs = scheduled.seqs
        num_seqs, num_decodes = len(seqs), scheduled.num_decodes
        table_rows = self._sync_tables(scheduled)
        new_tokens = np.array(scheduled.num_new_tokens, dtype=np.int64)
        computed = np.fromiter((seq.num_computed_tokens for seq in seqs), np.int64, num_seqs)
        ends = np.cumsum(new_tokens)
        num_tokens = int(ends[-1])
        starts = ends - new_tokens

        self._query_start_loc.host[0] = 0
        self._query_start_loc.host[1 : num_seqs + 1] = ends
        self._num_computed.host[:num_seqs] = computed
        seq_lens = computed + new_tokens
        self._seq_lens.host[:num_seqs] = seq_lens
        self._num_accepted.host[:num_seqs] = np.fromiter((seq.num_accepted for seq in seqs), np.int64, num_seqs)
        groups = np.fromiter((seq.per_req_cache_group for seq in seqs), np.int64, num_seqs)
        self._state_groups.host[:num_seqs] = groups

        positions = np.repeat(computed - starts, new_tokens)
        positions += np.arange(num_tokens)
        self._positions.host[:num_tokens] = positions
        self._fill_input_ids(scheduled, starts)

        block_size = self._block_size
        token_blocks = self._table[np.repeat(table_rows, new_tokens), positions // block_size]
        self._slot_mapping.host[:num_tokens] = token_blocks.astype(np.int64) * block_size + positions % block_size

        max_seq_len = int(seq_lens.max())
        width = -(-max_seq_len // block_size)
        self._block_tables.host[:num_seqs, :width] = self._table[table_rows, :width]
        self._fill_state(groups, new_tokens, starts, ends, num_decodes)
        return self._upload(scheduled, new_tokens, max_seq_len, width, num_tokens)

    def _sync_tables(self, scheduled: ScheduledBatch) -> Array:
        """Copy blocks that are new since the last step into the sequences' rows; return the rows."""
        rows = np.empty(len(scheduled.seqs), dtype=np.int64)
        for index, seq in enumerate(scheduled.seqs):
            rows[index] = seq.row
            known, length = seq.num_synced_blocks, len(seq.block_table)
            if known != length:
                self._table[seq.row, known:length] = seq.block_table[known:]
                seq.num_synced_blocks = length
        return rows

    def _fill_input_ids(self, scheduled: ScheduledBatch, starts: Array) -> None:
        input_ids, seqs = self._input_ids.host, scheduled.seqs
        num_decodes = scheduled.num_decodes
        input_ids[starts[:num_decodes]] = np.fromiter(
            (seq.last_token_id for seq in seqs[:num_decodes]), np.int64, num_decodes
        )
        for row, seq in enumerate(seqs):
            count = scheduled.num_new_tokens[row]
            if row >= num_decodes or count > 1:
                start, first = int(starts[row]), seq.num_computed_tokens
                input_ids[start : start + count] = seq.tokens_between(first, first + count)

    def _fill_state(self, groups: Array, new_tokens: Array, starts: Array, ends: Array, num_decodes: int) -> None:
        num_seqs, num_tokens = len(groups), int(ends[-1])
        has_state = groups >= 0
        num_decode_tokens = int(ends[num_decodes - 1]) if num_decodes else 0
        token_of_row = np.arange(num_decode_tokens) - np.repeat(starts[:num_decodes], new_tokens[:num_decodes])
        last_accepted = np.maximum(self._num_accepted.host[:num_seqs] - 1, 0)
        for name, state in self._states.items():
            by_slots = state.rewind is Rewind.SLOTS
            base = groups * state.slots_per_req
            read = base + last_accepted if by_slots else base
            self._state_read[name].host[:num_seqs] = np.where(has_state, read, -1)
            base = np.where(has_state, base, -1)
            write = self._state_write[name].host[:num_tokens]
            write[num_decode_tokens:] = -1
            write[ends[num_decodes:] - 1] = base[num_decodes:]
            per_token = np.repeat(base[:num_decodes], new_tokens[:num_decodes])
            write[:num_decode_tokens] = np.where(per_token >= 0, per_token + token_of_row * by_slots, -1)

    def _upload(
        self, scheduled: ScheduledBatch, new_tokens: Array, max_seq_len: int, width: int, num_tokens: int
    ) -> StepInputs:
        num_seqs, num_decodes = len(scheduled.seqs), scheduled.num_decodes
        positions = self._positions.upload(num_tokens)
        batch = AttentionBatch(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=int(new_tokens[:num_decodes].sum()),
            max_query_len=int(new_tokens.max()),
            max_decode_query_len=int(new_tokens[:num_decodes].max()) if num_decodes else 0,
            max_seq_len=max_seq_len,
            block_size=self._block_size,
            query_start_loc=self._query_start_loc.upload(num_seqs + 1),
            query_start_loc_host=self._query_start_loc.host[: num_seqs + 1],
            seq_lens=self._seq_lens.upload(num_seqs),
            seq_lens_host=self._seq_lens.host[:num_seqs],
            num_computed=self._num_computed.upload(num_seqs),
            num_computed_host=self._num_computed.host[:num_seqs],
            positions=positions,
            positions_host=self._positions.host[:num_tokens],
            slot_mapping=self._slot_mapping.upload(num_tokens),
            slot_mapping_host=self._slot_mapping.host[:num_tokens],
            block_tables=self._block_tables.upload(num_seqs)[:, :width],
            block_tables_host=self._block_tables.host[:num_seqs, :width],
            state_groups=self._state_groups.upload(num_seqs),
            state_groups_host=self._state_groups.host[:num_seqs],
            num_accepted=self._num_accepted.upload(num_seqs),
            num_accepted_host=self._num_accepted.host[:num_seqs],
            state_read={name: buffer.upload(num_seqs) for name, buffer in self._state_read.items()},
            state_read_host={name: buffer.host[:num_seqs] for name, buffer in self._state_read.items()},
            state_write={name: buffer.upload(num_tokens) for name, buffer in self._state_write.items()},
            state_write_host={name: buffer.host[:num_tokens] for name, buffer in self._state_write.items()},
        )
        input_ids = self._input_ids.upload(num_tokens)
        return StepInputs(input_ids.unsqueeze(0), positions.unsqueeze(0), batch)
