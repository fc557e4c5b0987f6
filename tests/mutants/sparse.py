"""The sparse twin: every token attends to the few keys of its past that an index of their own chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_core.plugin import TensorSpec
from tests.mutants.paged import PagedLayer, PagedPlugin
from tests.mutants.twin import DENSE, DIM, Dense, TwinConformance, softmax_attention
from tests.mutants.window import no_sinks

TOP = 4


def index_scores(query: Tensor, index: Tensor) -> Tensor:
    """[tokens, keys] how much a token wants to see a key; of equal keys the later one."""
    return query[:, 0].float() @ index.float().T + 0.01 * torch.arange(len(index))


def chosen(scores: Tensor, visible: Tensor) -> Tensor:
    """[tokens, keys] whether a key is among the best of those that are visible."""
    scores = scores.masked_fill(~visible, -torch.inf)
    best = scores.topk(min(TOP, scores.shape[1]), dim=-1).indices
    return torch.zeros_like(visible).scatter_(1, best, True)


class SparseLayer(PagedLayer):
    plugin_name = "sparse"

    def attend(self, hidden: Tensor, output: Tensor) -> None:
        batch = self.step.batch
        query, key, value = self.project(hidden)
        self.write(key, value, batch.slot_mapping)
        for row, (start, end) in enumerate(self.metadata["spans"]):
            if start == end:
                continue
            length = int(self.metadata["seq_lens"][row])
            keys, values = self.read(batch.block_tables[row], length)
            positions, own = self.metadata["positions"][start:end], query[start:end]
            picked = self.select(own, self.index(batch.block_tables[row], length), positions)
            output[start:end] = softmax_attention(
                own, keys, values, positions, torch.arange(length), picked, no_sinks()
            )

    def put(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        super().put(key, value, slots)
        self.flat("index")[slots] = key[:, -1]

    def index(self, table: Tensor, length: int) -> Tensor:
        return self.flat("index")[self.slots(table, length)]

    def select(self, query: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        visible = self.visible(positions, len(index))
        return chosen(index_scores(query, index), visible) & visible


class SparsePlugin(PagedPlugin):
    name = "sparse"
    layer = SparseLayer

    def paged_layout(self, layers, *, model_config, block_size, cache_dtype):
        specs = super().paged_layout(layers, model_config=model_config, block_size=block_size, cache_dtype=cache_dtype)
        names = tuple(layer.module_name for layer in layers)
        return [*specs, TensorSpec("index", (block_size, DIM), cache_dtype, names)]


class DenseSparse(Dense):
    def whole(self, hidden):
        query, key, value = self.project(hidden)
        places = torch.arange(len(hidden))
        visible = places <= places[:, None]
        picked = chosen(index_scores(query, key[:, -1]), visible) & visible
        return softmax_attention(query, key, value, places, places, picked, no_sinks())


DENSE["sparse"] = DenseSparse


class TestSparse(TwinConformance):
    plugin = SparsePlugin()
