"""The stateful twin: a short convolution and a decaying sum per request, taken back by slots."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from atom_core.plugin import TensorSpec
from tests.mutants.twin import DENSE, DIM, HEADS, KV_HEADS, Dense, TwinConformance, TwinLayer, TwinPlugin

TAIL = 3
WIDTH = KV_HEADS * DIM
START = 0.25


def decays() -> Tensor:
    return torch.linspace(0.6, 0.95, WIDTH)


def taps() -> Tensor:
    return torch.tensor([0.4, -0.3, 0.6, 1.0])


def convolve(rows: Tensor) -> Tensor:
    """[TAIL + tokens, width] to [tokens, width]."""
    return torch.einsum("twk,k->tw", rows.unfold(0, TAIL + 1, 1), taps())


class RecurrentLayer(TwinLayer):
    plugin_name = "recurrent"

    def attend(self, hidden: Tensor, output: Tensor) -> None:
        batch = self.step.batch
        query, key, value = self.project(hidden)
        inputs = (key * value).flatten(1).float()
        writes = batch.state_write_host[self.plugin_name]
        for row, (start, end) in enumerate(self.metadata["spans"]):
            if start == end:
                continue
            tail, running = self.read(row)
            rows = torch.cat([tail, inputs[start:end]])
            mixed = convolve(rows)
            for token in range(start, end):
                running = decays() * running + mixed[token - start]
                output[token] = (query[token].view(-1, WIDTH) * torch.tanh(running)).flatten().to(output.dtype)
                if writes[token] >= 0:
                    self.write(row, int(writes[token]), rows, token - start, running)

    def read(self, row: int) -> tuple[Tensor, Tensor]:
        slot = self.metadata["reads"][row]
        state = self.kv_cache.state
        return state["tail"][slot].clone(), state["running"][slot].clone()

    def write(self, row: int, slot: int, rows: Tensor, index: int, running: Tensor) -> None:
        """Keep the state after the row's token `index`; `rows` has the tail and then the row's tokens."""
        self.kv_cache.state["tail"][slot] = self.tail_after(rows, index)
        self.kv_cache.state["running"][slot] = running

    def tail_after(self, rows: Tensor, index: int) -> Tensor:
        return rows[index + 1 : index + 1 + TAIL]


class RecurrentPlugin(TwinPlugin):
    name = "recurrent"
    layer = RecurrentLayer
    stateful = True

    def state_layout(self, layers, *, model_config, cache_dtype, num_spec_tokens):
        names = tuple(layer.module_name for layer in layers)
        return [
            TensorSpec("tail", (TAIL, WIDTH), torch.float32, names),
            TensorSpec("running", (WIDTH,), torch.float32, names, initial=START),
        ]

    def build(self, batch):
        starts = batch.query_start_loc_host.tolist()
        return {
            "spans": list(pairwise(starts)),
            "reads": self.reads(batch.state_read_host[self.name].tolist(), batch),
        }

    def reads(self, slots, batch):
        return slots


class DenseRecurrent(Dense):
    def whole(self, hidden):
        query, key, value = self.project(hidden)
        mixed = convolve(torch.cat([torch.zeros(TAIL, WIDTH), (key * value).flatten(1)]))
        running, rows = torch.full((WIDTH,), START), []
        for token in mixed:
            running = decays() * running + token
            rows.append(running)
        states = torch.tanh(torch.stack(rows))[:, None].expand(-1, HEADS // KV_HEADS, -1)
        return (query.view(len(hidden), -1, WIDTH) * states).flatten(1)


DENSE["recurrent"] = DenseRecurrent


class TestRecurrent(TwinConformance):
    plugin = RecurrentPlugin()
