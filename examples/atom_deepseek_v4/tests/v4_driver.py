"""Runs steps of one layer by hand: any mix of chunks, decodes, verify rows and padding, in any slots and blocks."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from atom_core.plugin import AttentionBatch, KernelTable, Step, StepBuffers, StepLimits
from atom_deepseek_v4.plugin import DeepseekV4Plugin, plugin

CPU = torch.device("cpu")


@dataclass
class Request:
    """Hidden states of one request at all its positions, and what transformers makes of them."""

    hidden: torch.Tensor
    expected: torch.Tensor
    slot: int
    blocks: list[int]
    num_computed: int = 0


@dataclass
class Row:
    """A request's next tokens: `count` right ones, then `drafts` wrong ones, which are taken back."""

    request: Request
    count: int
    drafts: int = 0
    decode: bool = False


@dataclass
class Driver:
    """One layer with caches full of NaN.

    The layer is a module of a tiny model; the model itself stays whole and is the oracle.
    """

    model: torch.nn.Module
    layer_number: int
    num_spec_tokens: int = 0
    num_slots: int = 4
    num_blocks: int = 64
    block_size: int = 16
    plugin: DeepseekV4Plugin = field(default_factory=lambda: plugin)

    def __post_init__(self):
        self.config = self.model.config
        self.stock = self.model.model.layers[self.layer_number].self_attn
        self.rotary: DeepseekV4RotaryEmbedding = self.model.model.rotary_emb
        claim = self.plugin.atom_claim_layer(copy.deepcopy(self.stock), "layer")
        self.layer, layers = claim.layer, [claim.layer]
        self.layer.module_name, self.layer.step = "layer", Step()
        slots = {"deepseek_v4": self.num_slots}
        blocks = (self.num_blocks, self.block_size)
        self.paged = self.plugin.atom_allocate_kv_cache_tensors(layers, self.config, *blocks, torch.float32, CPU)
        self.state = self.plugin.atom_allocate_per_req_cache(
            layers, self.config, slots, torch.float32, self.num_spec_tokens, CPU
        )
        for tensor in (*self.paged.values(), *self.state.values()):
            tensor.fill_(torch.nan)
        table = KernelTable.build([(op, "deepseek_v4") for op in self.plugin.atom_ops()], [])
        tensors = {**self.paged, **self.state}
        self.plugin.atom_build_kv_cache_tensor(
            self.layer, layers, self.config, tensors, table, self.block_size, torch.float32, self.num_spec_tokens
        )
        self.buffers = StepBuffers(StepLimits(16, 2048, self.num_blocks, self.block_size), CPU)
        self.free_blocks = np.random.default_rng(0).permutation(self.num_blocks).tolist()

    @torch.no_grad()
    def request(self, length, slot, seed=0):
        """A request of random hidden states, with blocks of its own; the oracle sees all tokens at once."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(length, self.config.hidden_size, generator=generator)
        positions = torch.arange(length)
        distance = positions[:, None] - positions
        seen = (distance >= 0) & (distance < self.config.sliding_window)
        mask = torch.zeros(length, length).masked_fill(~seen, float("-inf"))[None, None]
        expected, _ = self.stock(
            hidden[None],
            position_embeddings=self.angles(positions),
            position_ids=positions[None],
            attention_mask=mask,
            cache=DynamicCache(config=self.config),
        )
        num_blocks = -(-(length + self.num_spec_tokens) // self.block_size)
        blocks = [self.free_blocks.pop() for _ in range(num_blocks)]
        return Request(hidden, expected[0], slot, blocks)

    def angles(self, positions):
        """Cosines and sines by rope type, as the model passes them."""
        like = torch.zeros(1)
        return {name: self.rotary(like, position_ids=positions[None], layer_type=name) for name in ("main", "compress")}

    @torch.no_grad()
    def run(self, *rows, padding_rows=0, padding_tokens=0):
        """Run one step and compare the right tokens; afterwards only these count as computed."""
        rows = sorted(rows, key=lambda row: not row.decode)
        batch = self.batch(rows, padding_rows, padding_tokens)
        hidden = torch.cat([*map(self._hidden, rows), torch.full((padding_tokens, self.config.hidden_size), 1e4)])
        self.layer.step.begin(batch, self.plugin.atom_build_metadata([self.layer], batch, self.buffers))
        found, weights = self.layer(
            hidden[None], position_embeddings=self.angles(batch.positions), position_ids=batch.positions[None]
        )
        self.layer.step.end()
        assert weights is None
        assert found.shape == (1, *hidden.shape)
        start, error = 0, 0.0
        for row in rows:
            first = row.request.num_computed
            difference = found[0, start : start + row.count] - row.request.expected[first : first + row.count]
            assert torch.isfinite(difference).all(), f"positions {first}..: not finite"
            error = max(error, float(difference.abs().max()))
            assert error < 2e-4, f"positions {first}..{first + row.count - 1}: differ by {error}"
            row.request.num_computed += row.count
            start += row.count + row.drafts
        return error

    def _hidden(self, row):
        first = row.request.num_computed
        right = row.request.hidden[first : first + row.count]
        assert len(right) == row.count, "the request is over"
        generator = torch.Generator().manual_seed(first)
        return torch.cat([right, torch.randn(row.drafts, right.shape[1], generator=generator) * 3])

    def batch(self, rows, padding_rows=0, padding_tokens=0):
        """The step's batch, as the engine builds it."""
        counts = np.array([row.count + row.drafts for row in rows] + [0] * padding_rows)
        computed = np.array([row.request.num_computed for row in rows] + [0] * padding_rows, dtype=np.int32)
        slots = np.array([row.request.slot for row in rows] + [-1] * padding_rows, dtype=np.int64)
        start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(n) + c for n, c in zip(counts, computed, strict=True)]).astype(np.int64)
        width = -(-int((computed + counts).max()) // self.block_size)
        tables = np.zeros((len(counts), width), dtype=np.int32)
        for index, row in enumerate(rows):
            blocks = row.request.blocks[:width]
            tables[index, : len(blocks)] = blocks
        rows_of_tokens = np.repeat(np.arange(len(counts)), counts)
        slot_mapping = tables[rows_of_tokens, positions // self.block_size] * self.block_size
        slot_mapping = slot_mapping.astype(np.int64) + positions % self.block_size
        num_decodes = sum(row.decode for row in rows)
        arrays = {
            "query_start_loc": start_loc,
            "seq_lens": (computed + counts).astype(np.int32),
            "num_computed": computed,
            "positions": np.pad(positions, (0, padding_tokens)),
            "slot_mapping": np.pad(slot_mapping, (0, padding_tokens), constant_values=-1),
            "block_tables": tables,
            "state_groups": slots.astype(np.int32),
            "num_accepted": np.ones(len(counts), dtype=np.int32),
        }
        write = np.pad(slots[rows_of_tokens], (0, padding_tokens), constant_values=-1)
        state = {"state_read": {"deepseek_v4": slots}, "state_write": {"deepseek_v4": write}}
        return AttentionBatch(
            num_seqs=len(counts),
            num_tokens=int(start_loc[-1]) + padding_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=int(start_loc[num_decodes]),
            max_query_len=int(counts.max()),
            max_decode_query_len=int(counts[:num_decodes].max(initial=0)),
            max_seq_len=int((computed + counts).max()),
            block_size=self.block_size,
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
            **{f"{name}_host": array for name, array in arrays.items()},
            **{name: {key: torch.from_numpy(value) for key, value in by.items()} for name, by in state.items()},
            **{f"{name}_host": by for name, by in state.items()},
        )
