"""The stateless twin: softmax attention over paged keys, which are stored with a scale, and with a sink per head."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from atom_core.plugin import TensorSpec
from tests.mutants.twin import DENSE, DIM, HEADS, Dense, TwinConformance, TwinLayer, TwinPlugin, softmax_attention


def sinks() -> Tensor:
    return torch.linspace(-1.0, 2.0, HEADS)


class PagedLayer(TwinLayer):
    plugin_name = "paged"

    def attend(self, hidden: Tensor, output: Tensor) -> None:
        batch = self.step.batch
        query, key, value = self.project(hidden)
        self.write(key, value, batch.slot_mapping)
        for row, (start, end) in enumerate(self.metadata["spans"]):
            if start == end:
                continue
            length = int(self.metadata["seq_lens"][row])
            keys, values = self.read(batch.block_tables[row], length)
            positions = self.metadata["positions"][start:end]
            visible = self.visible(positions, length)
            output[start:end] = softmax_attention(
                query[start:end], keys, values, positions, torch.arange(length), visible, self.sinks()
            )

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        kept = slots >= 0
        self.put(key[kept], value[kept], slots[kept])

    def put(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        scale = key.abs().amax(-1).clamp(min=1e-6)
        self.flat("k_scale")[slots] = scale.float()
        self.flat("k_cache")[slots] = (key / scale[..., None]).to(key.dtype)
        self.flat("v_cache")[slots] = value

    def flat(self, field: str) -> Tensor:
        tensor = self.kv_cache.paged[field]
        return tensor.view(-1, *tensor.shape[2:])

    def read(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row's first tokens."""
        slots = self.slots(table, length)
        key = self.flat("k_cache")[slots]
        return key * self.flat("k_scale")[slots][..., None].to(key.dtype), self.flat("v_cache")[slots]

    def slots(self, table: Tensor, length: int) -> Tensor:
        size = self.kv_cache.paged["k_cache"].shape[1]
        places = torch.arange(length)
        return table.long()[places // size] * size + places % size

    def visible(self, positions: Tensor, length: int) -> Tensor:
        return torch.arange(length) <= positions[:, None]

    def sinks(self) -> Tensor:
        return sinks()


class PagedPlugin(TwinPlugin):
    name = "paged"
    layer = PagedLayer

    def paged_layout(self, layers, *, model_config, block_size, cache_dtype):
        names, heads = tuple(layer.module_name for layer in layers), layers[0].num_kv_heads
        return [
            TensorSpec("k_cache", (block_size, heads, DIM), cache_dtype, names),
            TensorSpec("v_cache", (block_size, heads, DIM), cache_dtype, names),
            TensorSpec("k_scale", (block_size, heads), torch.float32, names),
        ]

    def build(self, batch):
        starts = batch.query_start_loc_host.tolist()
        spans = list(pairwise(starts))
        return {"spans": spans, "seq_lens": batch.seq_lens_host.tolist(), "positions": batch.positions.clone()}


class DensePaged(Dense):
    def whole(self, hidden):
        places = torch.arange(len(hidden))
        return softmax_attention(*self.project(hidden), places, places, places <= places[:, None], sinks())


DENSE["paged"] = DensePaged


class TestPaged(TwinConformance):
    plugin = PagedPlugin()
