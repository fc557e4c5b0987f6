"""Tiny random models, and a driver that runs steps without the engine."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from atom_core.plugin import AttentionBatch, KernelTable, Step, StepBuffers, StepLimits
from atom_mla.plugin import plugin

if not torch.cuda.is_available():
    # Triton looks when a kernel is defined; the modules that define them are imported when they are used.
    os.environ["TRITON_INTERPRET"] = "1"

BLOCK_SIZE = 8
VOCABULARY = 97
NUM_BLOCKS = 96

_DIMS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_SPARSE = {**_MOE, "index_topk": 24, "index_n_heads": 16, "index_head_dim": 12}
_ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
_MANY_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_DENSE_MLP = {"first_k_dense_replace": 99}
_FULL = ["full_attention"] * 2

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", {**_MOE, "topk_method": "group_limited_greedy"}),
    "v2-lite": ("DeepseekV2", {**_MOE, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": _YARN}),
    "v2-one-head-dense-tied": (
        "DeepseekV2",
        {**_MOE, **_ONE_HEAD, **_DENSE_MLP, "q_lora_rank": None, "tie_word_embeddings": True},
    ),
    "v3": ("DeepseekV3", _MOE),
    "v3-many-heads-yarn": ("DeepseekV3", {**_MOE, **_MANY_HEADS, "rope_parameters": _YARN}),
    "v3-no-q-lora-one-head": ("DeepseekV3", {**_MOE, **_ONE_HEAD, "q_lora_rank": None}),
    "v3-half-rotary-bias-tied-dense": (
        "DeepseekV3",
        {**_MOE, **_DENSE_MLP, "rope_interleave": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "v3-kimi-k2": ("DeepseekV3", {**_MOE, "n_group": 1, "topk_group": 1, "v_head_dim": 12, "rope_parameters": _YARN}),
    "v32": ("DeepseekV32", _SPARSE),
    "v32-one-head-dense-yarn": ("DeepseekV32", {**_SPARSE, **_ONE_HEAD, **_DENSE_MLP, "rope_parameters": _YARN}),
    "v32-never-sparse": ("DeepseekV32", {**_SPARSE, "index_topk": 256}),
    "glm-dsa": ("GlmMoeDsa", {**_SPARSE, "indexer_types": ["full", "full"]}),
    "glm-dsa-shared": (
        "GlmMoeDsa",
        {**_SPARSE, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]},
    ),
    "glm-dsa-shared-many-heads-tied": (
        "GlmMoeDsa",
        {**_SPARSE, **_MANY_HEADS, "indexer_types": ["full", "shared"], "tie_word_embeddings": True},
    ),
    "glm4-lite": ("Glm4MoeLite", _MOE),
    "glm4-lite-no-q-lora-tied": ("Glm4MoeLite", {**_MOE, "q_lora_rank": None, "tie_word_embeddings": True}),
    "youtu": ("Youtu", {"tie_word_embeddings": True}),
    "youtu-no-q-lora-many-heads": ("Youtu", {**_MANY_HEADS, "q_lora_rank": None}),
    "axk1": ("AXK1", _MOE),
    "axk2": ("AXK2", _SPARSE),
    "mistral4": (
        "Mistral4",
        {
            **_MOE,
            "rope_parameters": {
                **_YARN,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "minicpm3": ("MiniCPM3", {"scale_emb": 1, "scale_depth": 1.4, "dim_model_base": 32}),
    "longcat": (
        "LongcatFlash",
        {
            "num_layers": 2,
            "num_hidden_layers": 4,
            "head_dim": 4,
            "qk_head_dim": 12,
            "ffn_hidden_size": 40,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 6,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "kimi-linear-full": ("KimiLinear", {**_MOE, "layer_types": _FULL, "num_local_experts": 8}),
    "bailing-full": ("BailingHybrid", {**_MOE, "layer_types": _FULL, "num_local_experts": 8, "q_lora_rank": None}),
}
"""Prefix of the transformers classes, and config values beside the common ones."""
THROUGH_THE_ENGINE = frozenset("v2 v2-lite v3 v3-kimi-k2 v32 glm-dsa-shared glm4-lite minicpm3".split())
"""Models that the engine's tests run; the driver's tests run the others."""


def build_config(name: str) -> Any:
    prefix, values = MODELS[name]
    config_class = getattr(transformers, f"{prefix}Config", None) or _class(prefix, "Config")
    return config_class(**{**_DIMS, **values})


def _class(prefix: str, suffix: str) -> Any:
    return getattr(transformers, f"{prefix}{suffix}")


def build_model(name: str, seed: int = 0) -> nn.Module:
    """The stock model with random weights that make every part matter."""
    torch.manual_seed(seed)
    config = build_config(name)
    config._attn_implementation = "eager"
    model = _class(MODELS[name][0], "ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            lively = torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.25)
            parameter.copy_(lively + ("norm" in parameter_name and parameter_name.endswith("weight")))
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model


@dataclass
class Request:
    """One request of the driver: its blocks and how much of it is cached."""

    blocks: list[int]
    num_computed: int = 0


@dataclass
class Driver:
    """Runs a model's layers over paged caches that were NaN before use."""

    model: nn.Module
    forced: dict[str, str] = field(default_factory=dict)
    tp_size: int = 1
    cache_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        transformers.AttentionInterface.register("atom", _must_not_run)
        self.config = self.model.config
        self.config._attn_implementation = "atom"
        self.step = Step()
        self.buffers = StepBuffers(StepLimits(64, 8192, 1024, 16), torch.device("cpu"))
        self.layers = []
        for name, module in list(self.model.named_modules()):
            claim = plugin.atom_claim_layer(module, name, self.tp_size)
            if claim is not None:
                parent, _, attribute = name.rpartition(".")
                setattr(self.model.get_submodule(parent), attribute, claim.layer)
                claim.layer.module_name, claim.layer.step = name, self.step
                self.layers.append(claim.layer)
        kernels = KernelTable.build(
            [(op, "mla") for op in plugin.atom_ops()], [(k, "mla") for k in plugin.atom_kernels()], self.forced
        )
        common = {"layers": self.layers, "model_config": self.config, "block_size": BLOCK_SIZE}
        common["cache_dtype"] = self.cache_dtype or next(self.model.parameters()).dtype
        self.tensors = plugin.atom_allocate_kv_cache_tensors(
            **common, num_blocks=NUM_BLOCKS, device=torch.device("cpu")
        )
        for tensor in self.tensors.values():
            tensor.copy_(torch.full(tensor.shape, float("nan")))
        for layer in self.layers:
            plugin.atom_build_kv_cache_tensor(
                **common, layer=layer, tensors=self.tensors, kernels=kernels, num_spec_tokens=0
            )
        self.free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()

    def request(self, num_tokens: int) -> Request:
        count = -(-num_tokens // BLOCK_SIZE)
        blocks, self.free = self.free[:count], self.free[count:]
        return Request(blocks)

    def run(self, decodes: list[tuple[Request, list[int]]], chunks: list[tuple[Request, list[int]]]) -> torch.Tensor:
        """One step; logits [tokens, vocabulary]."""
        work = [*decodes, *chunks]
        batch = _batch([request for request, _ in work], [len(tokens) for _, tokens in work], len(decodes))
        self.step.begin(batch, plugin.atom_build_metadata(self.layers, batch, self.buffers))
        ids = torch.tensor([[token for _, tokens in work for token in tokens]])
        with torch.inference_mode():
            logits = self.model(input_ids=ids, position_ids=batch.positions[None], use_cache=False).logits[0]
        self.step.end()
        for request, tokens in work:
            request.num_computed += len(tokens)
        return logits

    def generate(
        self, prompts: list[list[int]], num_new: int, chunk: int
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Greedy tokens and prompt logits; chunks of some requests share steps with decodes of others."""
        requests = [self.request(len(prompt) + num_new) for prompt in prompts]
        tokens: list[list[int]] = [list(prompt) for prompt in prompts]
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        while any(len(t) < len(p) + num_new for t, p in zip(tokens, prompts, strict=True)):
            live = [i for i, prompt in enumerate(prompts) if len(tokens[i]) < len(prompt) + num_new]
            decoding = [i for i in live if requests[i].num_computed >= len(prompts[i])]
            filling = [i for i in live if i not in decoding]
            parts = [(i, prompts[i][requests[i].num_computed : requests[i].num_computed + chunk]) for i in filling]
            found = self.run([(requests[i], tokens[i][-1:]) for i in decoding], [(requests[i], p) for i, p in parts])
            for row, i in enumerate(decoding):
                tokens[i].append(int(found[row].argmax()))
            offset = len(decoding)
            for i, part in parts:
                logits[i].append(found[offset : offset + len(part)])
                offset += len(part)
                if requests[i].num_computed == len(prompts[i]):
                    tokens[i].append(int(logits[i][-1][-1].argmax()))
        new = [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
        return new, [torch.cat(parts) for parts in logits]


def _must_not_run(*_: Any, **__: Any) -> None:
    raise AssertionError("a module called the attention interface: it was not replaced")


def _batch(requests: list[Request], query_lens: list[int], num_decodes: int) -> AttentionBatch:
    lens = np.array(query_lens, dtype=np.int32)
    computed = np.array([request.num_computed for request in requests], dtype=np.int32)
    tables = np.zeros((len(requests), max(len(request.blocks) for request in requests)), dtype=np.int32)
    positions, slots = [], []
    for row, request in enumerate(requests):
        tables[row, : len(request.blocks)] = request.blocks
        own = np.arange(computed[row], computed[row] + lens[row], dtype=np.int64)
        positions.append(own)
        slots.append(tables[row].astype(np.int64)[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE)
    hosts = {
        "query_start_loc": np.concatenate(([0], np.cumsum(lens))).astype(np.int32),
        "seq_lens": computed + lens,
        "num_computed": computed,
        "positions": np.concatenate(positions),
        "slot_mapping": np.concatenate(slots),
        "block_tables": tables,
        "state_groups": np.full(len(requests), -1, dtype=np.int32),
        "num_accepted": np.zeros(len(requests), dtype=np.int32),
    }
    arrays = {f"{name}_host": host for name, host in hosts.items()}
    arrays |= {name: torch.from_numpy(host) for name, host in hosts.items()}
    return AttentionBatch(
        num_seqs=len(requests),
        num_tokens=int(lens.sum()),
        num_decodes=num_decodes,
        num_decode_tokens=int(lens[:num_decodes].sum()),
        max_query_len=int(lens.max()),
        max_decode_query_len=int(lens[:num_decodes].max(initial=0)),
        max_seq_len=int((computed + lens).max()),
        block_size=BLOCK_SIZE,
        **arrays,
    )


def stock_generate(model: nn.Module, prompt: list[int], num_new: int) -> tuple[list[int], torch.Tensor]:
    """What transformers itself generates, greedily, and its logits of the prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist(), logits


def stock_confirm(model: nn.Module, prompt: list[int], tokens: list[int]) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy choices after the prompt and each of the tokens, and its logits of the prompt.

    One forward without a cache. The choices equal `tokens` exactly when these are what transformers generates.
    """
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist(), logits[: len(prompt)]


def make_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


class Tools:
    """What the tests use, handed over by a fixture: test files cannot import one another."""

    MODELS = MODELS
    THROUGH_THE_ENGINE = THROUGH_THE_ENGINE
    BLOCK_SIZE = BLOCK_SIZE
    Driver = Driver
    build_config = staticmethod(build_config)
    build_model = staticmethod(build_model)
    stock_confirm = staticmethod(stock_confirm)
    stock_generate = staticmethod(stock_generate)
    make_prompts = staticmethod(make_prompts)
    copy = staticmethod(copy.deepcopy)


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools
