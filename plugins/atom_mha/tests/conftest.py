"""Tiny models of transformers, and a driver that runs them over flat batches as the engine does."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from atom_core.errors import LayerError
from atom_core.plugin import AttentionBatch, KernelTable, Step, StepBuffers, StepLimits
from atom_mha.ops import KERNELS, OPS
from atom_mha.plugin import plugin

if not torch.cuda.is_available():
    # Triton looks when a kernel is defined; the modules that define them are imported when they are used.
    os.environ["TRITON_INTERPRET"] = "1"

WINDOW, CHUNK, BLOCK = 8, 16, 4
CACHE_PARAMETERS = {"cache", "cache_params", "layer_past", "past_key_value", "past_key_values"}
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "n_embed", "embed_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("sliding_window", "local_window_size", "window_size", "attention_window"), WINDOW),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads", "max_window_layers"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "index_topk", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    "mamba_expand": 2,
    "lru_width": 64,
    "qk_head_dim": 24,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "attention_chunk_size": CHUNK,
    "use_sliding_window": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARING = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
SPECIAL = {
    "codegen": {"rotary_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": SHARING,
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {**SHARING, "head_dim": 16, "global_head_dim": 16},
    "gptj": {"rotary_dim": 8},
    "kolibri1": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"floor_scale": 10, "attn_scale": 0.5},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "phi": {"qk_layernorm": True},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **overrides):
    """A config of a model type, shrunk; whatever the type does not have is left out."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    whole = config_class()
    text_config = getattr(whole, "text_config", None)
    if text_config is not None:
        inner = _shrunk(type(text_config), {**SPECIAL.get(text_config.model_type, {}), **overrides})
        return config_class(text_config=inner.to_dict())
    return _shrunk(config_class, {**SPECIAL.get(model_type, {}), **overrides})


def _shrunk(config_class, overrides):
    whole = config_class()
    chosen = {}
    for name, value in SMALL.items():
        if isinstance(getattr(config_class, name, None), property):
            continue
        try:
            present = getattr(whole, name)
        except AttributeError:
            continue
        except Exception:  # a value that differs by layer
            present = 0
        if not isinstance(present, (list, tuple, dict)):
            chosen[name] = value
    return config_class(**{**chosen, **overrides})


def register_attention():
    """Dispatch transformers' attention interface to bound layers, as the core does."""
    from transformers import AttentionInterface

    def attend(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, **keywords):
        layer = module._mha_layer
        assert attention_mask is None, "a mask was built"
        known = {name: keywords[name] for name in keywords if name in layer.known_keywords}
        unknown = set(keywords) - set(known) - {"position_ids", "use_cache", "output_attentions"}
        unknown = {name for name in unknown if keywords[name] is not None and name != "output_router_logits"}
        assert not unknown, f"unknown keywords {unknown}"
        flat = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return layer.attend(*flat, scaling=scaling, **known)[None], None

    AttentionInterface.register("mha_test", attend)


@dataclass
class Claims:
    """What the plugin said about a model's modules: layers, refusals with their reason, and what keeps state."""

    layers: dict = field(default_factory=dict)
    refused: dict = field(default_factory=dict)
    unowned: list = field(default_factory=list)


def claim_all(model, config, tp_size=1) -> Claims:
    """Offer every module to the plugin, parents first."""
    claims = Claims()
    for name, module in model.named_modules():
        if any(name.startswith(f"{claimed}.") for claimed in [*claims.layers, *claims.refused]):
            continue
        try:
            claim = plugin.atom_claim_layer(module, name, config, tp_size)
        except LayerError as error:
            claims.refused[name] = str(error)
            continue
        if claim is not None:
            claim.layer.module_name = name
            claims.layers[name] = claim.layer
        elif CACHE_PARAMETERS & set(inspect.signature(module.forward).parameters):
            claims.unowned.append(name)
    owned = [*claims.layers, *claims.refused]
    claims.unowned = [
        name for name in claims.unowned if not any(own.startswith(f"{name}." * bool(name)) for own in owned)
    ]
    return claims


class FlatModel:
    """A claimed model over paged caches; each step takes some tokens of some sequences as one flat batch."""

    def __init__(self, model, config, dtype=torch.float32, num_blocks=96):
        register_attention()
        self.model, self.claims = model, claim_all(model, config)
        self.layers = list(self.claims.layers.values())
        self.buffers = StepBuffers(StepLimits(64, 8192, 1024, 16), torch.device("cpu"))
        table = KernelTable.build([(op, "mha") for op in OPS], [(kernel, "mha") for kernel in KERNELS])
        common = {"layers": self.layers, "model_config": config, "block_size": BLOCK, "cache_dtype": dtype}
        tensors = plugin.atom_allocate_kv_cache_tensors(**common, num_blocks=num_blocks, device=torch.device("cpu"))
        allocated = sum(tensor.nbytes for tensor in tensors.values())
        assert allocated == num_blocks * plugin.atom_compute_block_bytes(**common)["mha"]
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
        self.step = Step()
        for name, layer in self.claims.layers.items():
            layer.step = self.step
            assert plugin.atom_build_kv_cache_tensor(
                layer=layer, tensors=tensors, kernels=table, num_spec_tokens=0, **common
            )
            model.get_submodule(name).__dict__["_mha_layer"] = layer
        model.set_attn_implementation("mha_test")
        self.free_blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).tolist()
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    @torch.no_grad()
    def run(self, rows):
        """Run one step.

        Args:
            rows: per row, sequence number, tokens, and whether it is a decode; decodes first.

        Returns:
            [tokens, vocabulary] logits.
        """
        batch, ids = self._batch(rows)
        metadata = plugin.atom_build_metadata(layers=self.layers, batch=batch, buffers=self.buffers)
        self.step.begin(batch, metadata)
        positions = batch.positions[None]
        output = self.model(input_ids=ids[None], position_ids=positions, use_cache=False)
        self.step.end()
        for sequence, tokens, _ in rows:
            self.computed[sequence] += len(tokens)
        return output.logits[0]

    def _batch(self, rows):
        lens = [len(tokens) for _, tokens, _ in rows]
        computed = [self.computed.setdefault(sequence, 0) for sequence, _, _ in rows]
        width = 64
        tables = np.zeros((len(rows), width), dtype=np.int32)
        positions, slots = [], []
        for row, (sequence, tokens, _) in enumerate(rows):
            own = self.blocks.setdefault(sequence, [])
            while len(own) * BLOCK < computed[row] + len(tokens):
                own.append(self.free_blocks.pop())
            tables[row, : len(own)] = own
            for position in range(computed[row], computed[row] + len(tokens)):
                positions.append(position)
                slots.append(own[position // BLOCK] * BLOCK + position % BLOCK)
        num_decodes = sum(decode for _, _, decode in rows)
        arrays = {
            "query_start_loc": np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
            "seq_lens": (np.array(computed) + lens).astype(np.int32),
            "num_computed": np.array(computed, dtype=np.int32),
            "positions": np.array(positions, dtype=np.int64),
            "slot_mapping": np.array(slots, dtype=np.int64),
            "block_tables": tables,
            "state_groups": np.full(len(rows), -1, dtype=np.int32),
            "num_accepted": np.zeros(len(rows), dtype=np.int32),
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        hosts = {f"{name}_host": array for name, array in arrays.items()}
        batch = AttentionBatch(
            num_seqs=len(rows),
            num_tokens=sum(lens),
            num_decodes=num_decodes,
            num_decode_tokens=sum(lens[:num_decodes]),
            max_query_len=max(lens),
            max_decode_query_len=max(lens[:num_decodes], default=0),
            max_seq_len=int(arrays["seq_lens"].max()),
            block_size=BLOCK,
            **tensors,
            **hosts,
        )
        return batch, torch.tensor([token for _, tokens, _ in rows for token in tokens])


def flat_logits(flat: FlatModel, prompts):
    """Logits of every token, from steps that mix first chunks, chunks over a prefix, decodes and verify rows."""
    logits: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(prompts))}
    schedule = [
        [(0, 20, False), (1, 3, False)],
        [(1, 1, True), (0, 11, False), (2, 1, False), (3, 26, False)],
        [(1, 1, True), (2, 1, True), (3, 3, True), (0, 2, False)],
        *([[(0, 1, True), (1, 1, True), (2, 1, True), (3, 1, True)]] * 4),
        [(1, 3, True), (2, 2, True), (3, 1, True)],
        [(2, 30, False), (1, 14, False)],
        [(1, 1, True), (2, 1, True)],
    ]
    for step in schedule:
        rows = []
        for number, count, decode in step:
            first = flat.computed.get(number, 0)
            rows.append((number, prompts[number][first : first + count], decode))
        found = flat.run(rows)
        for (number, _tokens, _), part in zip(rows, found.split([len(tokens) for _, tokens, _ in rows]), strict=True):
            logits[number].append(part)
    return {number: torch.cat(parts) for number, parts in logits.items()}


@torch.no_grad()
def stock_logits(model, prompts):
    """Logits of transformers itself, one sequence at a time, without a cache."""
    return [model(input_ids=torch.tensor(prompt)[None], use_cache=False).logits[0] for prompt in prompts]


def compare_with_stock(config, tolerance=2e-4):
    """Build a random model and compare every logit of a flat run with transformers' eager attention."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    prompts = torch.randint(3, 100, (4, 60), generator=torch.Generator().manual_seed(1)).tolist()
    expected = stock_logits(model, prompts)
    flat = FlatModel(model, config.get_text_config())
    found = flat_logits(flat, prompts)
    for number, logits in found.items():
        torch.testing.assert_close(logits, expected[number][: len(logits)], atol=tolerance, rtol=tolerance)
    return flat


@pytest.fixture
def zoo():
    """This file's helpers, which a test cannot import."""
    import sys

    return sys.modules[__name__]
