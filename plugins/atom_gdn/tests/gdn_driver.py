"""A minimal runner for models whose every attention layer is the plugin's: no scheduler, no core engine.

It builds `AttentionBatch` by hand, so that tests decide about chunks, drafts, acceptance and slots themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from atom_core.plugin import AttentionBatch, KernelTable, Step, StepBuffers, StepLimits

BLOCK_SIZE = 16


@dataclass
class Request:
    """One request: `tokens` computed or not, `num_computed` of them in the state of slot base + `offset`."""

    group: int
    tokens: list[int]
    num_computed: int = 0
    offset: int = 0


@dataclass
class Row:
    """One row of a step: the next `count` tokens of a request, as a decode or as a chunk."""

    request: Request
    count: int
    decode: bool = False


@dataclass
class Driver:
    """Holds the model's layers and state; every slot starts as NaN."""

    model: torch.nn.Module
    plugin: object
    num_groups: int = 4
    num_spec_tokens: int = 0
    kernel: str | None = None
    layers: list = field(default_factory=list)
    step: Step = field(default_factory=Step)

    def __post_init__(self):
        for name, module in list(self.model.named_modules()):
            claim = self.plugin.atom_claim_layer(module, name, 1)
            if claim is None:
                continue
            assert claim.exact
            claim.layer.module_name = name
            claim.layer.step = self.step
            parent, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(parent), attribute, claim.layer)
            self.layers.append(claim.layer)
        config, spec = self.model.config, self.num_spec_tokens
        self.slots_per_req = self.plugin.atom_slots_per_req(self.layers, spec)["gdn"]
        num_slots = {"gdn": self.num_groups * self.slots_per_req}
        device = torch.device("cpu")
        self.state = self.plugin.atom_allocate_per_req_cache(
            self.layers, config, num_slots, torch.float32, spec, device
        )
        for tensor in self.state.values():
            tensor.fill_(torch.nan)
        forced = {op.name: self.kernel for op in self.plugin.atom_ops()} if self.kernel else None
        owned = [[(item, "gdn") for item in items] for items in (self.plugin.atom_ops(), self.plugin.atom_kernels())]
        kernels = KernelTable.build(*owned, forced)
        for layer in self.layers:
            self.plugin.atom_build_kv_cache_tensor(
                layer, self.layers, config, self.state, kernels, BLOCK_SIZE, torch.float32, spec
            )
        self.buffers = StepBuffers(StepLimits(64, 8192, 1024, 16), device)

    def lease(self, group: int, tokens: list[int]) -> Request:
        """A new request: its base slot holds initial values, its other slots whatever was there."""
        for tensor in self.state.values():
            tensor[:, group * self.slots_per_req] = 0
        return Request(group, list(tokens))

    @torch.inference_mode()
    def run(self, rows: list[Row], padding_rows: int = 0) -> list[torch.Tensor]:
        """Run one step.

        Returns:
            By row, [count, vocabulary] logits.
        """
        rows = sorted(rows, key=lambda row: not row.decode)
        batch = self._batch(rows, padding_rows)
        ids = [row.request.tokens[row.request.num_computed + i] for row in rows for i in range(row.count)]
        self.step.begin(batch, self.plugin.atom_build_metadata(self.layers, batch))
        logits = self.model(input_ids=torch.tensor([ids]), position_ids=batch.positions[None], use_cache=False).logits[
            0
        ]
        self.step.end()
        for row in rows:
            row.request.num_computed += row.count
            row.request.offset = row.count - 1 if row.decode else 0
        return list(logits.split([row.count for row in rows]))

    def _batch(self, rows: list[Row], padding_rows: int) -> AttentionBatch:
        counts = np.array([row.count for row in rows] + [0] * padding_rows)
        computed = np.array([row.request.num_computed for row in rows] + [0] * padding_rows, dtype=np.int32)
        start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        base = np.array([row.request.group * self.slots_per_req for row in rows], dtype=np.int64)
        read = np.concatenate([base + [row.request.offset for row in rows], np.full(padding_rows, -1)]).astype(np.int64)
        write = np.full(start_loc[-1], -1, dtype=np.int64)
        for index, row in enumerate(rows):
            if row.decode:
                write[start_loc[index] : start_loc[index + 1]] = base[index] + np.arange(row.count)
            else:
                write[start_loc[index + 1] - 1] = base[index]
        positions = np.concatenate([np.arange(n) + c for n, c in zip(counts, computed, strict=True)]).astype(np.int64)
        num_decodes = sum(row.decode for row in rows)
        if num_decodes == len(rows):
            num_decodes += padding_rows
        arrays = {
            "query_start_loc": start_loc,
            "seq_lens": (computed + counts).astype(np.int32),
            "num_computed": computed,
            "positions": positions,
            "slot_mapping": np.full(start_loc[-1], -1, dtype=np.int64),
            "block_tables": np.zeros((len(counts), 1), dtype=np.int32),
            "state_groups": np.concatenate([base // self.slots_per_req, np.full(padding_rows, -1)]).astype(np.int32),
            "num_accepted": np.ones(len(counts), dtype=np.int32),
        }
        return AttentionBatch(
            num_seqs=len(counts),
            num_tokens=int(start_loc[-1]),
            num_decodes=num_decodes,
            num_decode_tokens=int(start_loc[num_decodes]),
            max_query_len=int(counts.max()),
            max_decode_query_len=int(counts[:num_decodes].max(initial=0)),
            max_seq_len=int((computed + counts).max()),
            block_size=BLOCK_SIZE,
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
            **{f"{name}_host": array for name, array in arrays.items()},
            state_read={"gdn": torch.from_numpy(read)},
            state_read_host={"gdn": read},
            state_write={"gdn": torch.from_numpy(write)},
            state_write_host={"gdn": write},
        )
