"""The windowed twin: the last keys and values of each request in a buffer addressed by position, overwritten."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_core.plugin import Rewind, TensorSpec
from tests.mutants.twin import (
    DENSE,
    DIM,
    HEADS,
    KV_HEADS,
    WINDOW,
    Dense,
    TwinConformance,
    TwinLayer,
    TwinPlugin,
    softmax_attention,
)


def no_sinks() -> Tensor:
    return torch.full((HEADS,), -torch.inf)


class WindowLayer(TwinLayer):
    plugin_name = "window"
    window = WINDOW

    def attend(self, hidden: Tensor, output: Tensor) -> None:
        batch = self.step.batch
        query, key, value = (tensor.float() for tensor in self.project(hidden))
        state, starts = self.kv_cache.state, batch.query_start_loc_host.tolist()
        for row in range(batch.num_seqs):
            start, end = starts[row], starts[row + 1]
            if start == end:
                continue
            keys, values = (state[name][int(batch.state_read_host["window"][row])] for name in ("keys", "values"))
            computed, size = int(batch.num_computed_host[row]), keys.shape[0]
            old = torch.arange(max(0, computed - self.window + 1), computed)
            positions = torch.arange(computed, computed + end - start)
            places = torch.cat([old, positions])
            seen = places[None] > positions[:, None] - self.window
            output[start:end] = softmax_attention(
                query[start:end],
                torch.cat([keys[old % size], key[start:end]]),
                torch.cat([values[old % size], value[start:end]]),
                positions,
                places,
                seen & (places[None] <= positions[:, None]),
                no_sinks(),
            ).to(output.dtype)
            kept = positions[-size:]
            keys[kept % size], values[kept % size] = key[start:end][-size:], value[start:end][-size:]


class WindowPlugin(TwinPlugin):
    name = "window"
    rewind = Rewind.OVERWRITE
    layer = WindowLayer
    stateful = True

    def owns(self, module):
        return module.sliding_window is not None

    def exact(self, module):
        return False

    def state_layout(self, layers, *, model_config, cache_dtype, num_spec_tokens):
        names, rows = tuple(layer.module_name for layer in layers), self.rows(num_spec_tokens)
        return [TensorSpec(field, (rows, KV_HEADS, DIM), torch.float32, names) for field in ("keys", "values")]

    def rows(self, num_spec_tokens):
        return WINDOW + num_spec_tokens


class DenseWindow(Dense):
    def whole(self, hidden):
        places = torch.arange(len(hidden))
        visible = (places <= places[:, None]) & (places > places[:, None] - WINDOW)
        return softmax_attention(*self.project(hidden), places, places, visible, no_sinks())


DENSE["window"] = DENSE["sliding_attention"] = DenseWindow


class TestWindow(TwinConformance):
    plugin = WindowPlugin()
    layer_types = ("sliding_attention", "sliding_attention")
