"""Tiny MiMo-V2 models, transformers' own answers, and a driver that runs steps of a single layer without the engine."""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atom_core import LLM, hookimpl
from atom_core.plugin import AttentionBatch, KernelTable, PluginInfo, Step
from atom_core.plugin.registry import PluginRegistry
from atom_mha.plugin import plugin as mha_plugin
from atom_mimo.layer import FullLayer, Heads, WindowLayer
from atom_mimo.plugin import plugin

if not torch.cuda.is_available():
    # Triton looks when a kernel is defined; the modules that define them are imported when they are used.
    os.environ["TRITON_INTERPRET"] = "1"

FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK_SIZE = 16
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=12, v_head_dim=8)
MODELS = {
    "hybrid": {},
    "wide-window": {"sliding_window": 50},
    "window-beyond-everything": {"sliding_window": 400},
    "window-1-one-kv-head-tied": {"sliding_window": 1, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "all-full": {"layer_types": [FULL] * 3},
    "all-sliding-dense": {"layer_types": [SLIDING] * 3, "mlp_layer_types": ["dense"] * 3},
    "non-periodic-experts": {
        "layer_types": [SLIDING, FULL, FULL, SLIDING, SLIDING],
        "mlp_layer_types": ["sparse"] * 5,
        "sliding_window": 17,
        "attention_value_scale": None,
    },
    "many-kv-heads-bias": {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_bias": True},
}
_TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def tools():
    """This module: test modules of plugins cannot import it by name."""
    return sys.modules[__name__]


def build_model(name, seed=0, **changes):
    """A tiny float32 model whose weights, sinks and norms are lively."""
    fields = {**_TINY, **MODELS[name], **changes}
    config = AutoConfig.for_model("mimo_v2_flash", num_hidden_layers=len(fields["layer_types"]), **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


class Poisoner:
    """Fills new caches with NaN."""

    @hookimpl
    def atom_plugin_info(self):
        return PluginInfo("poisoner", "NaN in new caches.", contract_version=1)

    @hookimpl(wrapper=True)
    def atom_allocate_kv_cache_tensors(self):
        return poison((yield))

    @hookimpl(wrapper=True)
    def atom_allocate_per_req_cache(self):
        return poison((yield))


def poison(answers):
    """Fill the tensors of all answers with NaN."""
    for tensor in [tensor for tensors in answers for tensor in tensors.values()]:
        tensor.fill_(torch.nan)
    return answers


def make_llm(model, plugins=None, **options):
    """An engine on a copy of the model, with more plugins if given."""
    registry = PluginRegistry.of({"mimo": plugin, "mha": mha_plugin, **(plugins or {})})
    options = {"skip_tokenizer": True, "cache_memory": "64MB", "max_num_seqs": 8, **options}
    return LLM(copy.deepcopy(model), registry=registry, **options)


def make_prompts(lengths, seed=0):
    """Random prompts of these lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, _TINY["vocab_size"], length).tolist() for length in lengths]


@torch.no_grad()
def stock_generate(model, prompt, num_tokens):
    """Transformers' greedy tokens; without its cache for a window of 1, where its cache keeps every key."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": num_tokens, "use_cache": model.config.sliding_window > 1}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@torch.no_grad()
def stock_confirm(model, prompt, tokens):
    """Transformers' greedy choices after the prompt and each token; they equal `tokens` where those are greedy."""
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@torch.no_grad()
def stock_logprobs(model, tokens):
    """Transformers' logprobs of all tokens but the first."""
    logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logprobs[range(len(tokens) - 1), tokens[1:]].tolist()


@dataclass
class Sequence:
    """Queries, keys and values of one request at all its positions, and what attention makes of them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    group: int
    num_computed: int = 0

    @classmethod
    def random(cls, length, group, seed=0, heads=HEADS):
        generator = torch.Generator().manual_seed(seed)
        shapes = (heads.num_heads, heads.head_dim), (heads.num_kv_heads, heads.head_dim)
        shapes += ((heads.num_kv_heads, heads.v_head_dim),)
        return cls(*(torch.randn(length, *shape, generator=generator) for shape in shapes), group)

    def expected(self, window, sinks, scaling):
        """Attention over the whole sequence at once, `window` keys per query; `None` for all."""
        groups = self.query.shape[1] // self.key.shape[1]
        scores = torch.einsum("ihd,jhd->hij", self.query, self.key.repeat_interleave(groups, 1)) * scaling
        visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        if window is not None:
            visible &= ~torch.ones_like(visible).tril(-window)
        scores = torch.cat(
            [scores.masked_fill(~visible, -torch.inf), sinks.view(-1, 1, 1).expand(-1, len(visible), 1)], -1
        )
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :-1], self.value.repeat_interleave(groups, 1))


@dataclass
class Row:
    """The next `count` tokens of a sequence, and `drafts` more that are wrong; a decode or a chunk."""

    sequence: Sequence
    count: int
    drafts: int = 0
    decode: bool = False


class Driver:
    """One layer with its caches, all NaN at first; builds `AttentionBatch` by hand."""

    sinks = torch.linspace(-1.0, 2.0, HEADS.num_heads)
    scaling = 0.4

    def __init__(self, window, num_groups=4, num_spec_tokens=0, max_len=320, kernel=None):
        self.layer = FullLayer(HEADS) if window is None else WindowLayer(HEADS, window)
        self.layer.module_name, self.layer.step = "layer", Step()
        self.blocks_per_group = -(-max_len // BLOCK_SIZE)
        self.window, layers, cpu = window, [self.layer], torch.device("cpu")
        num_blocks = num_groups * self.blocks_per_group
        self.tensors = {
            **plugin.atom_allocate_kv_cache_tensors(layers, None, num_blocks, BLOCK_SIZE, torch.float32, cpu),
            **plugin.atom_allocate_per_req_cache(
                layers, None, {"mimo": num_groups}, torch.float32, num_spec_tokens, cpu
            ),
        }
        for tensor in self.tensors.values():
            tensor.fill_(torch.nan)
        ops = [(op, name) for name, owner in (("mimo", plugin), ("mha", mha_plugin)) for op in owner.atom_ops()]
        kernels = [
            (item, name) for name, owner in (("mimo", plugin), ("mha", mha_plugin)) for item in owner.atom_kernels()
        ]
        forced = {op.name: kernel for op in plugin.atom_ops()} if kernel else None
        table = KernelTable.build(ops, kernels, forced)
        plugin.atom_build_kv_cache_tensor(
            self.layer, layers, None, self.tensors, table, BLOCK_SIZE, torch.float32, num_spec_tokens
        )

    def expected(self, sequence, window=0):
        """What the layer must give for a sequence; with another window if given."""
        return sequence.expected(self.window if window == 0 else window, self.sinks, self.scaling)

    def run(self, *rows, padding_rows=0, padding_tokens=0):
        """Run one step; afterwards only the right tokens count as computed. Returns outputs of the right tokens."""
        rows = sorted(rows, key=lambda row: not row.decode)
        parts = [self._inputs(row) for row in rows]
        padding = [torch.full_like(tensor[:1], 1e4).expand(padding_tokens, -1, -1) for tensor in parts[0]]
        columns = zip(zip(*parts, strict=True), padding, strict=True)
        query, key, value = (torch.cat([*tensors, pad]) for tensors, pad in columns)
        batch = self._batch(rows, padding_rows, padding_tokens)
        self.layer.step.begin(batch, plugin.atom_build_metadata([self.layer], batch))
        output = self.layer.attend(
            query, key, value, scaling=self.scaling, sliding_window=self.window, s_aux=self.sinks
        )
        self.layer.step.end()
        assert not output[len(output) - padding_tokens :].any()
        found, start = [], 0
        for row in rows:
            found.append(output[start : start + row.count])
            start += row.count + row.drafts
            row.sequence.num_computed += row.count
        return found

    def _inputs(self, row):
        first = row.sequence.num_computed
        right = [getattr(row.sequence, name)[first : first + row.count] for name in ("query", "key", "value")]
        assert len(right[0]) == row.count
        generator = torch.Generator().manual_seed(first)
        wrong = [torch.randn(row.drafts, *tensor.shape[1:], generator=generator) * 30 for tensor in right]
        return [torch.cat(pair) for pair in zip(right, wrong, strict=True)]

    def _batch(self, rows, padding_rows, padding_tokens):
        counts = np.array([row.count + row.drafts for row in rows] + [0] * padding_rows)
        computed = np.array([row.sequence.num_computed for row in rows] + [0] * padding_rows, dtype=np.int32)
        groups = np.array([row.sequence.group for row in rows] + [-1] * padding_rows, dtype=np.int64)
        start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(n) + c for n, c in zip(counts, computed, strict=True)]).astype(np.int64)
        tables = np.maximum(groups, 0)[:, None] * self.blocks_per_group + np.arange(self.blocks_per_group)
        slot_mapping = np.repeat(tables[:, 0] * BLOCK_SIZE, counts) + positions
        state_write = np.repeat(groups, counts)
        num_decodes = sum(row.decode for row in rows)
        if num_decodes == len(rows):
            num_decodes += padding_rows
        num_tokens = int(start_loc[-1]) + padding_tokens
        arrays = {
            "query_start_loc": start_loc,
            "seq_lens": (computed + counts).astype(np.int32),
            "num_computed": computed,
            "positions": np.pad(positions, (0, padding_tokens)),
            "slot_mapping": np.pad(slot_mapping, (0, padding_tokens), constant_values=-1),
            "block_tables": tables.astype(np.int32),
            "state_groups": groups.astype(np.int32),
            "num_accepted": np.ones(len(counts), dtype=np.int32),
        }
        state = {"state_read": groups, "state_write": np.pad(state_write, (0, padding_tokens), constant_values=-1)}
        return AttentionBatch(
            num_seqs=len(counts),
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=int(start_loc[num_decodes]),
            max_query_len=int(counts.max()),
            max_decode_query_len=int(counts[:num_decodes].max(initial=0)),
            max_seq_len=int((computed + counts).max()),
            block_size=BLOCK_SIZE,
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
            **{f"{name}_host": array for name, array in arrays.items()},
            **{name: {"mimo": torch.from_numpy(array)} for name, array in state.items()},
            **{f"{name}_host": {"mimo": array} for name, array in state.items()},
        )
