"""Tiny DeepSeek-V4 models, transformers' own answers, and engines."""

from __future__ import annotations

import copy

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atom_core import LLM, SamplingParams, hookimpl
from atom_core.plugin import PluginInfo
from atom_core.plugin.registry import PluginRegistry
from atom_deepseek_v4.plugin import plugin

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
VOCAB = 97
MODELS = {
    # Small ratios and windows, so that short prompts cross every boundary.
    "all-kinds": {},
    "sliding-only": {"layer_types": [SLIDING] * 3},
    "sparse-only": {"layer_types": [SPARSE] * 3},
    "heavy-only": {"layer_types": [HEAVY] * 3},
    "sparse-and-heavy": {"layer_types": [HEAVY, SPARSE, SPARSE, HEAVY]},
    "odd-ratios": {"layer_types": [SPARSE, HEAVY, SLIDING], "compress_rates": {SPARSE: 3, HEAVY: 8}},
    "window-2": {"sliding_window": 2},
    "select-all": {"index_topk": 512},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        }
    },
    # The ratios, window and selection of the released models, at the head sizes of a tiny one.
    "released": {
        "layer_types": [SLIDING, SPARSE, HEAVY],
        "compress_rates": {SPARSE: 4, HEAVY: 128},
        "sliding_window": 128,
        "index_topk": 48,
    },
}
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": [SLIDING, SPARSE, HEAVY, SPARSE],
    "compress_rates": {SPARSE: 4, HEAVY: 16},
    "sliding_window": 9,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "max_position_embeddings": 1024,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build_config(name, **changes):
    """The config of a tiny model."""
    fields = copy.deepcopy({**TINY, **MODELS[name], **changes})
    num_layers = len(fields["layer_types"])
    mlps = ["hash_moe"] + ["moe"] * (num_layers - 1)
    return AutoConfig.for_model("deepseek_v4", num_hidden_layers=num_layers, mlp_layer_types=mlps, **fields)


@torch.no_grad()
def build_model(name, seed=0, **changes):
    """A tiny float32 model whose weights, sinks, gates and routers are lively."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(build_config(name, **changes), dtype=torch.float32).eval()
        for key, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if key.endswith("position_bias") or key.endswith("sinks"):
                parameter.copy_(noise)
            elif parameter.ndim < 2 or "_hc." in key or "hc_head" in key:
                parameter.add_(0.1 * noise)
            elif "embed" in key:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 2.0 / parameter.shape[-1] ** 0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("tid2eid"):
                picks = [torch.randperm(model.config.n_routed_experts)[: buffer.shape[1]] for _ in range(len(buffer))]
                buffer.copy_(torch.stack(picks))
    model.generation_config.eos_token_id = None
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
    registry = PluginRegistry.of({"deepseek_v4": plugin, **(plugins or {})})
    options = {"skip_tokenizer": True, "cache_memory": "16MB", "max_num_seqs": 4, **options}
    return LLM(copy.deepcopy(model), registry=registry, **options)


def make_prompts(lengths, seed=0):
    """Random prompts of these lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


def greedy(num_tokens, **fields):
    """Sampling parameters that take the likeliest token."""
    return SamplingParams(max_tokens=num_tokens, temperature=0, **fields)


def tokens(outputs):
    """The output tokens of each request."""
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def stock_generate(model, prompt, num_tokens):
    """transformers' greedy tokens, with its own cache."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": num_tokens}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
