"""BatchBuilder: from scheduled rows to the arrays that a step reads, vectorised over tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from atom_core.engine.block_tables import TableCopy
from atom_core.engine.running_rows import GROUP, NUM_ACCEPTED, NUM_COMPUTED, RunningRows
from atom_core.engine.step_arrays import StepArrays
from atom_core.plugin import AttentionBatch, Rewind, StepBuffers

if TYPE_CHECKING:
    from torch import Tensor

    from atom_core.engine.scheduled_batch import ScheduledBatch

__all__ = ["BatchBuilder", "StateLayout", "StepInputs", "StepShape"]

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
class StepShape:
    """What steps have in common that share a captured graph: decode rows alone, padded to equal sizes.

    Attributes:
        num_seqs: rows, padding included.
        tokens_per_seq: tokens of each row that is not padding.
    """

    num_seqs: int
    tokens_per_seq: int

    @property
    def num_tokens(self) -> int:
        """Tokens, those of no row included."""
        return self.num_seqs * self.tokens_per_seq


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
    """Fills arrays at fixed addresses from a scheduled batch.

    Args:
        states: by plugin with state.
        buffers: names the limits and the device.
        rows: the running sequences.
    """

    def __init__(self, states: Mapping[str, StateLayout], buffers: StepBuffers, rows: RunningRows) -> None:
        limits = buffers.limits
        self._limits = limits
        self._block_size = limits.block_size
        self._states = dict(states)
        self._device = buffers.device
        self._rows = rows
        self._table_copies: dict[int, TableCopy] = {}  # by the array that is kept up to date
        self._any_step = self._make_arrays(limits.max_num_tokens)
        self._padded_steps: StepArrays | None = None
        self._padded_views: dict[tuple[StepShape, int], StepInputs] = {}

    def reserve(self, shapes: Iterable[StepShape]) -> None:
        """Make the arrays of padded steps, at addresses that stay; without this no step may be padded.

        Args:
            shapes: every shape that will be asked for.
        """
        self._padded_views.clear()
        self._padded_steps = self._make_arrays(max(shape.num_tokens for shape in shapes))

    def build(self, scheduled: ScheduledBatch, shape: StepShape | None = None) -> StepInputs:
        """Fill the arrays for one step.

        Args:
            scheduled: each sequence has its row, and blocks for all its tokens; there may be no rows if there is a
                shape.
            shape: pad the step to it; it then has decode rows alone, each of the shape's tokens, and maxima are the
                largest that any step of this shape has.
        """
        arrays = self._any_step if shape is None else self._padded_steps
        assert arrays is not None, "the arrays of padded steps were not reserved"
        arrays.begin()
        host = arrays.host
        num_seqs, num_decodes = len(scheduled.seqs), scheduled.num_decodes
        tables, rows = self._rows.tables, self._rows.of(scheduled.seqs)
        counts = self._rows.counts[rows]
        new_tokens = np.array(scheduled.num_new_tokens, dtype=np.int64)
        computed, accepted, groups = counts[:, NUM_COMPUTED], counts[:, NUM_ACCEPTED], counts[:, GROUP]
        ahead = np.zeros(num_seqs, dtype=np.int64)
        if scheduled.ahead:
            ahead[:] = scheduled.ahead
            computed += ahead
            accepted[ahead > 0] = 1
        if scheduled.follows:
            ahead[:] = 0  # a plain step, behind a plain step: nothing is to be taken back
        ends = np.cumsum(new_tokens)
        num_tokens = int(ends[-1]) if num_seqs else 0
        starts = ends - new_tokens

        host["query_start_loc"][0] = 0
        host["query_start_loc"][1 : num_seqs + 1] = ends
        host["num_computed"][:num_seqs] = computed
        seq_lens = computed + new_tokens
        host["seq_lens"][:num_seqs] = seq_lens
        host["num_accepted"][:num_seqs] = accepted
        host["state_groups"][:num_seqs] = groups

        positions = np.repeat(computed - starts, new_tokens)
        positions += np.arange(num_tokens)
        host["positions"][:num_tokens] = positions
        row_of_token = np.repeat(rows, new_tokens)
        host["input_ids"][:num_tokens] = self._rows.tokens[row_of_token, positions]

        block_size = self._block_size
        token_blocks = tables.blocks[row_of_token, positions // block_size]
        host["slot_mapping"][:num_tokens] = token_blocks.astype(np.int64) * block_size + positions % block_size

        max_seq_len = int(seq_lens.max()) if num_seqs else 0
        width = -(-max_seq_len // block_size)
        self._table_copy(host["block_tables"]).update(tables, rows)
        self._fill_state(host, groups, ahead, new_tokens, ends, num_decodes)
        if shape is not None:
            self._pad(host, shape, num_seqs, num_tokens)
            arrays.upload(shape.num_seqs)
            return self._padded_inputs(arrays, shape)
        arrays.upload(num_seqs)
        bounds = _Bounds(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=int(new_tokens[:num_decodes].sum()),
            max_query_len=int(new_tokens.max()),
            max_decode_query_len=int(new_tokens[:num_decodes].max()) if num_decodes else 0,
            max_seq_len=max_seq_len,
        )
        return self._inputs(arrays, bounds, width)

    def _table_copy(self, target: Array) -> TableCopy:
        found = self._table_copies.get(id(target))
        if found is None:
            found = self._table_copies[id(target)] = TableCopy(target)
        return found

    def _make_arrays(self, num_tokens: int) -> StepArrays:
        rows = self._limits.max_num_seqs
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "query_start_loc": ((rows + 1,), torch.int32),
            "seq_lens": ((rows,), torch.int32),
            "num_computed": ((rows,), torch.int32),
            "state_groups": ((rows,), torch.int32),
            "num_accepted": ((rows,), torch.int32),
            "input_ids": ((num_tokens,), torch.int64),
            "positions": ((num_tokens,), torch.int64),
            "slot_mapping": ((num_tokens,), torch.int64),
        }
        for name in self._states:
            fields[f"state_read.{name}"] = ((rows,), torch.int64)
            fields[f"state_write.{name}"] = ((num_tokens,), torch.int64)
        fields["block_tables"] = ((rows, self._limits.max_blocks_per_seq), torch.int32)
        return StepArrays(fields, self._device)

    def _fill_state(
        self,
        host: Mapping[str, Array],
        groups: Array,
        ahead: Array,
        new_tokens: Array,
        ends: Array,
        num_decodes: int,
    ) -> None:
        num_seqs, num_tokens = len(groups), int(ends[-1]) if len(ends) else 0
        has_state = groups >= 0
        num_decode_tokens = int(ends[num_decodes - 1]) if num_decodes else 0
        before = (ends - new_tokens - ahead)[:num_decodes]
        token_of_row = np.arange(num_decode_tokens) - np.repeat(before, new_tokens[:num_decodes])
        last_token = np.where(ahead > 0, ahead, np.maximum(host["num_accepted"][:num_seqs], 1)) - 1
        for name, state in self._states.items():
            by_slots = state.rewind is Rewind.SLOTS
            base = groups * state.slots_per_req
            read = base + last_token if by_slots else base
            host[f"state_read.{name}"][:num_seqs] = np.where(has_state, read, -1)
            base = np.where(has_state, base, -1)
            write = host[f"state_write.{name}"][:num_tokens]
            write[num_decode_tokens:] = -1
            write[ends[num_decodes:] - 1] = base[num_decodes:]
            per_token = np.repeat(base[:num_decodes], new_tokens[:num_decodes])
            write[:num_decode_tokens] = np.where(per_token >= 0, per_token + token_of_row * by_slots, -1)

    def _pad(self, host: Mapping[str, Array], shape: StepShape, num_seqs: int, num_tokens: int) -> None:
        """Fill rows and tokens behind the real ones: no queries, no keys, no place to write to."""
        rows, tokens = slice(num_seqs, shape.num_seqs), slice(num_tokens, shape.num_tokens)
        host["query_start_loc"][num_seqs + 1 : shape.num_seqs + 1] = num_tokens
        for name in ("seq_lens", "num_computed", "num_accepted", "block_tables"):
            host[name][rows] = 0
        self._table_copy(host["block_tables"]).forget(num_seqs)
        host["state_groups"][rows] = -1
        host["input_ids"][tokens] = 0
        host["positions"][tokens] = 0
        host["slot_mapping"][tokens] = -1
        for name in self._states:
            host[f"state_read.{name}"][rows] = -1
            host[f"state_write.{name}"][tokens] = -1

    def _padded_inputs(self, arrays: StepArrays, shape: StepShape) -> StepInputs:
        """Views of the arrays, the same in every step of a shape that fills the same half."""
        found = self._padded_views.get((shape, arrays.half))
        if found is not None:
            return found
        width = self._limits.max_blocks_per_seq
        bounds = _Bounds(
            num_seqs=shape.num_seqs,
            num_tokens=shape.num_tokens,
            num_decodes=shape.num_seqs,
            num_decode_tokens=shape.num_tokens,
            max_query_len=shape.tokens_per_seq,
            max_decode_query_len=shape.tokens_per_seq,
            max_seq_len=width * self._block_size,
        )
        inputs = self._padded_views[shape, arrays.half] = self._inputs(arrays, bounds, width)
        return inputs

    def _inputs(self, arrays: StepArrays, bounds: _Bounds, width: int) -> StepInputs:
        host, device = arrays.host, arrays.device
        rows, tokens = bounds.num_seqs, bounds.num_tokens
        read = {name: f"state_read.{name}" for name in self._states}
        write = {name: f"state_write.{name}" for name in self._states}
        positions = device["positions"][:tokens]
        batch = AttentionBatch(
            **vars(bounds),
            block_size=self._block_size,
            query_start_loc=device["query_start_loc"][: rows + 1],
            query_start_loc_host=host["query_start_loc"][: rows + 1],
            seq_lens=device["seq_lens"][:rows],
            seq_lens_host=host["seq_lens"][:rows],
            num_computed=device["num_computed"][:rows],
            num_computed_host=host["num_computed"][:rows],
            positions=positions,
            positions_host=host["positions"][:tokens],
            slot_mapping=device["slot_mapping"][:tokens],
            slot_mapping_host=host["slot_mapping"][:tokens],
            block_tables=device["block_tables"][:rows, :width],
            block_tables_host=host["block_tables"][:rows, :width],
            state_groups=device["state_groups"][:rows],
            state_groups_host=host["state_groups"][:rows],
            num_accepted=device["num_accepted"][:rows],
            num_accepted_host=host["num_accepted"][:rows],
            state_read={name: device[field][:rows] for name, field in read.items()},
            state_read_host={name: host[field][:rows] for name, field in read.items()},
            state_write={name: device[field][:tokens] for name, field in write.items()},
            state_write_host={name: host[field][:tokens] for name, field in write.items()},
        )
        return StepInputs(device["input_ids"][:tokens].unsqueeze(0), positions.unsqueeze(0), batch)


@dataclass(frozen=True)
class _Bounds:
    """The Python numbers of a batch."""

    num_seqs: int
    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    max_query_len: int
    max_decode_query_len: int
    max_seq_len: int
