"""A small stateful plugin for tests of the core, and the same computation without any cache.

Its attention keeps an exponential moving average of the values as per-request state, and the keys in paged
blocks, of which each token sees the running mean:

    state_t = DECAY * state_(t-1) + (1 - DECAY) * v_t,  state_(-1) = START
    y_t = o_proj(state_t + mean(k_0 .. k_t))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atom_core import hookimpl
from atom_core.plugin import AttentionLayer, Claim, LayoutPlugin, PluginInfo, TensorSpec

DECAY = 0.9
START = 0.5


class AveragingLayer(AttentionLayer, nn.Module):
    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.k_proj, self.v_proj, self.o_proj = original.k_proj, original.v_proj, original.o_proj
        self.width = original.k_proj.out_features

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        batch = self.step.batch
        keys, values = self.k_proj(hidden_states)[0], self.v_proj(hidden_states)[0]
        paged = self.kv_cache.paged["keys"]
        kept = batch.slot_mapping >= 0
        paged.view(-1, self.width)[batch.slot_mapping[kept]] = keys[kept]
        state = self.kv_cache.state["average"]
        output = torch.empty_like(values)
        for row in range(batch.num_seqs):
            start, end = batch.query_start_loc_host[row : row + 2].tolist()
            running = state[batch.state_read["averaging"][row]].clone()
            table = batch.block_tables[row].long()
            length = int(batch.seq_lens_host[row])
            known = paged[table].reshape(-1, self.width)[:length]
            for token in range(start, end):
                running = DECAY * running + (1 - DECAY) * values[token]
                slot = int(batch.state_write_host["averaging"][token])
                if slot >= 0:
                    state[slot] = running
                seen = int(batch.positions_host[token]) + 1
                output[token] = running + known[:seen].mean(0)
        return self.o_proj(output.repeat(1, self.o_proj.in_features // self.width)).unsqueeze(0), None


class DenseAveraging(nn.Module):
    """The same for one whole sequence, with nothing kept between calls: the oracle."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.k_proj, self.v_proj, self.o_proj = original.k_proj, original.v_proj, original.o_proj

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        keys, values = self.k_proj(hidden_states)[0], self.v_proj(hidden_states)[0]
        counts = torch.arange(1, len(keys) + 1, dtype=keys.dtype).unsqueeze(1)
        means = keys.cumsum(0) / counts
        running, states = torch.full_like(values[0], START), []
        for value in values:
            running = DECAY * running + (1 - DECAY) * value
            states.append(running)
        output = torch.stack(states) + means
        return self.o_proj(output.repeat(1, self.o_proj.in_features // output.shape[1])).unsqueeze(0), None


class AveragingPlugin(LayoutPlugin):
    name = "averaging"

    def __init__(self, model_types: tuple[str, ...] = ("llama",)) -> None:
        self.model_types = model_types

    def layer_classes(self) -> tuple[type[AttentionLayer], ...]:
        return (AveragingLayer,)

    def paged_layout(self, layers, *, model_config, block_size, cache_dtype):
        names = tuple(layer.module_name for layer in layers)
        return [TensorSpec("keys", (block_size, layers[0].width), cache_dtype, names)]

    def state_layout(self, layers, *, model_config, cache_dtype, num_spec_tokens):
        names = tuple(layer.module_name for layer in layers)
        return [TensorSpec("average", (layers[0].width,), torch.float32, names, initial=START)]

    @hookimpl
    def atom_plugin_info(self) -> PluginInfo:
        return PluginInfo("averaging", "an exponential moving average, for tests", contract_version=1)

    @hookimpl
    def atom_model_types(self):
        return {"averaging": self.model_types}

    @hookimpl
    def atom_claim_layer(self, module, module_name):
        return Claim(AveragingLayer(module), exact=True) if type(module).__name__ == "LlamaAttention" else None


def averaging_model(seed: int = 0, **overrides: int) -> nn.Module:
    """A tiny random model whose attention this plugin takes over."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **overrides,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def dense_generate(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of the oracle, which computes the whole sequence anew for every token."""
    import copy

    dense = copy.deepcopy(model)
    for layer in dense.model.layers:
        layer.self_attn = DenseAveraging(layer.self_attn)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = dense(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
