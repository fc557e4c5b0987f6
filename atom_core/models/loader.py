"""Loading a model with transformers: its config, its dtype and device, its modules and weights.

Everything here is quiet on the terminal, and every failure is a ModelError or a ConfigError that says what to do.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from atom_core.config import EngineConfig
from atom_core.errors import ConfigError, ModelError
from atom_core.models import gguf_cache
from atom_core.models.model_config import resolve_config
from atom_core.models.quiet import first_line, quiet
from atom_core.models.random_weights import cast_like, random_model
from atom_core.models.source import locate
from atom_core.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "build_meta_model",
    "load_model",
    "load_tokenizer",
    "resolve_cache_dtype",
    "resolve_config",
    "resolve_device",
    "resolve_dtype",
    "weight_bytes",
]

_T = TypeVar("_T")
_Module = TypeVar("_Module", bound=nn.Module)

# Where checkpoints of multimodal wrappers keep the language model, for its own class (`model.`, `lm_head.`).
_WRAPPER_PREFIXES = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}


def resolve_dtype(config: EngineConfig, model_config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype of weights and activations: the one asked for, else the checkpoint's, else float32.

    Raises:
        ModelError: the checkpoint's config names no floating dtype of torch.
    """
    if config.dtype != "auto":
        named: torch.dtype = getattr(torch, config.dtype)
        return named
    if isinstance(config.model, nn.Module):
        return next((p.dtype for p in config.model.parameters() if p.is_floating_point()), torch.float32)
    dtype = getattr(model_config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if dtype is None:
        return torch.float32
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"the checkpoint's dtype is {dtype}, expected float32, bfloat16 or float16; pass dtype=")
    return dtype


def resolve_device(config: EngineConfig) -> torch.device:
    """Return the device to run on; `auto` is CUDA where there is one.

    Raises:
        ConfigError: CUDA is asked for and not there, or has no such index.
    """
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(config.device)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigError(
                f"device is {config.device}, but torch {torch.__version__} finds no CUDA device; use device=cpu, or "
                "install a CUDA build of torch and check the driver"
            )
        if device.index is not None and device.index >= count:
            raise ConfigError(f"device is {config.device}, but there are {count} CUDA devices, cuda:0 first")
    return device


def resolve_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of paged tensors: the one asked for, else that of the activations."""
    if config.cache_dtype == "auto":
        return dtype
    named: torch.dtype = getattr(torch, config.cache_dtype)
    return named


def build_meta_model(model_config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """Build the model on the meta device: every module and shape, no memory.

    Raises:
        ModelError: transformers cannot build a causal language model from this config.
    """
    with torch.device("meta"):
        model: nn.Module = _build(model_config, dtype)
    return _freeze(model)


def load_model(
    config: EngineConfig,
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None] | None = None,
) -> nn.Module:
    """Return the model with weights on `device`, frozen, its attention set to the implementation `atom`.

    A model that was loaded by the caller is used as it is: moved, cast and switched in place.

    Args:
        config: says where the model comes from.
        model_config: from `resolve_config`.
        dtype: from `resolve_dtype`.
        device: from `resolve_device`.
        progress: told before anything slow.

    Raises:
        ModelError: weights are missing, damaged or do not fit the config.
    """
    if isinstance(config.model, nn.Module):
        model: nn.Module = _adopt(config.model, model_config, dtype)
    elif config.random_weights is not None:
        if progress is not None:
            progress(f"making random weights from seed {config.random_weights}")
        model = random_model(_build, model_config, dtype, config.random_weights, device)
    else:
        place = locate(config.model, "weights", revision=config.revision, progress=progress)
        if place.suffix == ".gguf":
            place = gguf_cache.converted(place, dtype, progress)
        if progress is not None:
            progress(f"loading weights of {config.model}")
        model = _load(place, config, model_config, dtype, device)
    return _freeze(model.to(device))


def weight_bytes(model: PreTrainedModel, tp_size: int = 1) -> int:
    """Return the bytes of the parameters and buffers on one rank, each counted once where modules share it.

    Args:
        model: whole, perhaps on `meta`.
        tp_size: ranks that share the model by its tensor-parallel plan; what the plan does not divide, each rank has.
    """
    plan = getattr(model, "_tp_plan", None) or {}
    # A rowwise projection adds its whole bias after the sum over ranks.
    endings = {"colwise": r"(\.\w+)?", "rowwise": r"(\.weight)?"}
    divided = [
        re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + ending)
        for pattern, style in plan.items()
        for kind, ending in endings.items()
        if kind in str(style)
    ]
    total = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shares = tp_size if tp_size > 1 and any(pattern.fullmatch(name) for pattern in divided) else 1
        total += -(-tensor.numel() // shares) * tensor.element_size()
    return total


def _build(model_config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    # A config class from the model's own code exists only because that code was trusted when the config was read.
    trusted = type(model_config).__module__.startswith("transformers_modules")

    def build(attention: str) -> PreTrainedModel:
        fresh = copy.deepcopy(model_config)  # from_config writes into it
        with quiet():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                fresh, dtype=dtype, attn_implementation=attention, trust_remote_code=trusted
            )
        return model

    try:
        return _with_attention(build)
    except Exception as error:
        raise ModelError(
            f"transformers cannot build a model from this {type(model_config).__name__} "
            f"(model_type {model_config.model_type!r}): {first_line(error)}"
        ) from error


def _load(
    place: Path, config: EngineConfig, model_config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    kwargs: dict[str, Any] = {"config": model_config, "dtype": dtype, "trust_remote_code": config.trust_remote_code}
    if device.type == "cuda":
        kwargs["device_map"] = {"": device}
    if json.loads((place / "config.json").read_text(encoding="utf-8")).get("model_type") != model_config.model_type:
        kwargs["key_mapping"] = _WRAPPER_PREFIXES

    def load(attention: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(place), attn_implementation=attention, output_loading_info=True, **kwargs
            )
        return model, info

    try:
        model, info = _with_attention(load)
    except Exception as error:
        raise ModelError(f"transformers cannot load the weights in {place}: {first_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            raise ModelError(
                f"the weights in {place} do not fit its config: {len(info[kind])} {kind.replace('_', ' ')} of "
                f"{type(model).__name__}, for example {sorted(map(str, info[kind]))[0]}; the download may be incomplete"
            )
    return model


def _with_attention(make: Callable[[str], _T]) -> _T:
    """Call `make` with the attention implementation that dispatches to plugins.

    A few old classes pick their attention module from a table by this name. They are built with their own attention:
    a plugin may replace it, and binding refuses a model in which one is left.
    """
    from atom_core.models.binding import ATTENTION_NAME, register_attention_interface

    register_attention_interface()
    try:
        return make(ATTENTION_NAME)
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        return make("eager")


def _adopt(model: PreTrainedModel, model_config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import PreTrainedConfig

    from atom_core.models.binding import ATTENTION_NAME, register_attention_interface

    register_attention_interface()
    if any(p.is_floating_point() and p.dtype != dtype for p in model.parameters()) and model.dtype != dtype:
        with torch.device("meta"):
            cast_like(model, _build(model.config, dtype))
    # set_attn_implementation skips classes whose source does not look right to it; which layers can run is
    # decided by the claims, so the name is set on every config that a module may read it from.
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._attn_implementation = ATTENTION_NAME
    model_config._attn_implementation = ATTENTION_NAME
    return model


def _freeze(model: _Module) -> _Module:
    model.eval()
    model.requires_grad_(False)
    return model
