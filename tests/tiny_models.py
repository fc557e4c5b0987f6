"""Tiny models of every causal language model type of transformers, with weights lively enough to compare tokens.

`tiny_config` shrinks the default config of a type by the names of its fields; what no rule can know about a type is in
`tiny_overrides.py`. `reference_generate` is transformers' own answer, which Atom's must equal.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_overrides import OVERRIDES

__all__ = ["MODEL_TYPES", "reference_generate", "reference_outputs", "tiny_config", "tiny_model"]

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS, _VOCAB, _POSITIONS = 64, 4, 2, 16, 4, 128, 2048

_SIZES: tuple[tuple[int, str], ...] = (
    (
        _HIDDEN,
        "hidden_size n_embd d_model dim emb_dim word_embed_proj_dim embedding_size lru_width input_embedding_size "
        "output_embedding_size attention_hidden_size embedding_dim router_hidden_size",
    ),
    (
        _LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks "
        "encoder_layers num_encoder_layers",
    ),
    (
        _HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
        "num_decoder_attention_heads swa_num_attention_heads linear_num_heads linear_num_value_heads "
        "encoder_attention_heads num_encoder_attention_heads",
    ),
    (_KV_HEADS, "num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads linear_num_key_heads"),
    (
        _HEAD_DIM,
        "head_dim v_head_dim qk_nope_head_dim swa_head_dim swa_v_head_dim index_head_dim linear_head_dim kv_channels "
        "linear_key_head_dim linear_value_head_dim d_head dim_head attention_head_size mamba_d_state ssm_state_size "
        "state_size mamba_d_head mamba_head_dim attention_head_dim global_head_dim mamba_headdim",
    ),
    (
        _HEAD_DIM // 2,
        "qk_rope_head_dim rotary_dim sliding_window sliding_window_size attention_window_size window_size index_topk "
        "local_attention attention_chunk_size hidden_size_per_layer_input laurel_rank adapter_rank gated_norm_rank "
        "mamba_num_heads mamba_n_heads num_buckets n_mamba_heads",
    ),
    (_HEAD_DIM + _HEAD_DIM // 2, "qk_head_dim"),
    (_VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (
        _POSITIONS,
        "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len max_target_positions "
        "context_length model_max_length",
    ),
    (
        2 * _HIDDEN,
        "intermediate_size ffn_dim n_inner dim_ff dff d_inner ffn_hidden_size decoder_ffn_dim feed_forward_size "
        "dense_intermediate_size intermediate_size_mlp mamba_d_ssm encoder_ffn_dim",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size shared_experts_intermediate_size q_lora_rank kv_lora_rank o_lora_rank "
        "moe_latent_size index_n_heads",  # with few heads many scores are exactly 0, and the top k is arbitrary
    ),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts time_step_rank mamba_dt_rank"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k num_selected_experts top_k_experts zero_expert_num"),
    (
        1,
        "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers n_groups mamba_n_groups "
        "mamba_ngroups moe_layer_start_index sep_token_id cls_token_id n_shared_experts num_shared_experts "
        "moe_num_shared_experts",
    ),
    (0, "num_kv_shared_layers num_nextn_predict_layers"),
)
_SIZE_OF = {name: size for size, names in _SIZES for name in names.split()}
_ALWAYS = {"is_decoder": True, "is_encoder_decoder": False, "tie_word_embeddings": False}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id")
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "layer_rope_theta",
                "activation_sparsity_pattern", "num_attention_heads_per_layer", "no_rope_layers")  # fmt: skip


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Make a config of this type with tiny sizes, full-length greedy generation and at least 1024 positions.

    Args:
        model_type: any type of transformers' causal language model mapping.
        overrides: fields to set, after all rules.

    Raises:
        ValueError: no recipe makes a config that builds and runs; says what the last one failed with.
    """
    error: Exception | None = None
    for recipe in _recipes(model_type):
        try:
            config = recipe(overrides)
            _check_runs(config)
            return config
        except Exception as failure:
            error = error or failure
    raise ValueError(f"no tiny {model_type}: {type(error).__name__}: {error}") from error


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a tiny float32 model in evaluation mode, its weights drawn from `seed` with a large spread."""
    model = _build(tiny_config(model_type, **overrides), seed)
    model.generation_config.eos_token_id = None  # some types insist on an id in the config
    return enliven(model, seed)


@torch.no_grad()
def enliven(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Redraw weights so that greedy outputs change with the input: matrices, gates and routers too."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for name, parameter in sorted(model.named_parameters()):
        if id(parameter) in seen or not parameter.is_floating_point():
            continue
        seen.add(id(parameter))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2 or name.endswith(("A_log", "dt_bias", ".D", "conv1d.weight")):
            parameter.add_(0.1 * noise)
        elif "embed" in name and parameter.shape[0] >= _VOCAB:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(noise * 2.0 / parameter.shape[-1] ** 0.5)
    return model


def reference_generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations by transformers' `generate`, one prompt at a time, with its own cache."""
    return [tokens for tokens, _ in reference_outputs(model, prompts, num_tokens)]


@torch.no_grad()
def reference_outputs(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[tuple[list[int], list[float]]]:
    """As `reference_generate`, each token with its logprob."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            max_new_tokens=num_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = result.sequences[0, len(prompt) :]
        logprobs = torch.cat(result.logits).float().log_softmax(-1).gather(1, tokens[:, None])
        outputs.append((tokens.tolist(), logprobs[:, 0].tolist()))
    return outputs


def _recipes(model_type: str) -> Iterator[Callable[[dict[str, Any]], PreTrainedConfig]]:
    config_class = CONFIG_MAPPING[model_type]
    template = config_class()
    text = template.get_text_config(decoder=True)
    fixed = {**OVERRIDES.get(text.model_type, {}), **OVERRIDES.get(model_type, {})}

    def make(fields: dict[str, Any], extra: dict[str, Any]) -> PreTrainedConfig:
        config = type(text)(**{**fields, **extra})
        if text is not template and text.model_type not in MODEL_TYPES:
            config = config_class(text_config=config.to_dict())
        return config

    for tokens in ({}, {"pad_token_id": 0}, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}):
        for cycle in (True, False):
            yield functools.partial(make, {**_shrunk(text, cycle), **tokens, **fixed})


def _shrunk(config: PreTrainedConfig, cycle: bool) -> dict[str, Any]:
    """Return the fields of a config with every known size made tiny; unset and unknown fields stay away."""
    fields: dict[str, Any] = {name: None for name in _TOKENS if name in _own_fields(config)}
    fields |= {name: value for name, value in _ALWAYS.items() if name in _own_fields(config)}
    for name, value in _own_fields(config).items():
        if name == "head_dim" and value is None:
            fields[name] = _HEAD_DIM
        elif name in _SIZE_OF and value is not None and not isinstance(value, (bool, dict)):
            fields[name] = _same_shape(value, _SIZE_OF[name])
        elif name in _LAYER_LISTS and isinstance(value, list) and cycle:
            fields[name] = _cycled(value)
        elif isinstance(value, PreTrainedConfig):
            fields[name] = type(value)(**_shrunk(value, cycle))
    heads = _first(config, "num_attention_heads", "n_head"), _first(config, "num_key_value_heads", "num_kv_heads")
    if heads[0] is not None and heads[0] == heads[1]:
        fields |= {name: _HEADS for name in ("num_key_value_heads", "num_kv_heads") if name in fields}
    return fields


def _own_fields(config: PreTrainedConfig) -> dict[str, Any]:
    names = set(vars(config)) | set(getattr(type(config), "__dataclass_fields__", {}))
    names -= {"attribute_map", "sub_configs", "transformers_version", "model_type"}
    fields = {}
    for name in sorted(names):
        if not name.startswith("_"):
            with contextlib.suppress(Exception):  # a few values differ by layer and refuse to be read as one
                fields[name] = getattr(config, name)
    return fields


def _same_shape(value: Any, size: int) -> Any:
    return [size] * min(len(value), _LAYERS) if isinstance(value, (list, tuple)) else size


def _cycled(values: list[Any]) -> list[Any]:
    kinds = list(dict.fromkeys(values))
    return [kinds[i % len(kinds)] for i in range(_LAYERS)]


def _first(config: PreTrainedConfig, *names: str) -> Any:
    fields = _own_fields(config)
    return next((fields[name] for name in names if name in fields), None)


def _build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def _check_runs(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in _build(config).parameters())
    if size > 5_000_000:
        raise ValueError(f"{size} parameters are not tiny")
    logits = _build(config)(torch.arange(1, 25)[None]).logits
    if logits.shape[:2] != (1, 24) or not torch.isfinite(logits).all():
        raise ValueError(f"logits of shape {tuple(logits.shape)}, or not finite")
