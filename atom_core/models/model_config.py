"""The transformers config of a model: the causal language model's, of whatever the user named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from atom_core.config import EngineConfig
from atom_core.errors import ConfigError, ModelError
from atom_core.models import gguf_cache
from atom_core.models.quiet import first_line, quiet
from atom_core.models.source import locate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["resolve_config"]


def resolve_config(config: EngineConfig) -> PreTrainedConfig:
    """Return the transformers config of the model, without reading weights; the language model's of a multimodal one.

    Raises:
        ModelError: the model cannot be found, or is no causal language model that transformers knows.
        ConfigError: `random_weights` with a loaded model.
    """
    from transformers import PreTrainedConfig

    if isinstance(config.model, nn.Module):
        return _config_of_loaded(config)
    if isinstance(config.model, PreTrainedConfig):
        if config.random_weights is None:
            raise ModelError(
                f"the model is a {type(config.model).__name__}, which has no weights; pass random_weights=SEED, or "
                "name a folder with weights"
            )
        return _language_config(copy.deepcopy(config.model), config)
    place = locate(config.model, "config", revision=config.revision)
    if place.suffix == ".gguf":
        folder = gguf_cache.find_converted(place, gguf_cache.weight_dtype(config))
        if folder is None:
            return _language_config(gguf_cache.read_config(place), config)
        place = folder
    elif place.suffix == ".json" and config.random_weights is None:
        raise ModelError(
            f"{place} is a config without weights; pass random_weights=SEED, or name a folder with weights"
        )
    return _language_config(_read_config(place, config), config)


def _config_of_loaded(config: EngineConfig) -> PreTrainedConfig:
    from transformers import PreTrainedModel

    if not isinstance(config.model, PreTrainedModel):
        raise ModelError(f"the model is a {type(config.model).__name__}, expected a transformers PreTrainedModel")
    if config.random_weights is not None:
        raise ConfigError("random_weights cannot be used with a loaded model; pass its config instead")
    if config.model.config.is_encoder_decoder or not config.model.can_generate():
        raise ModelError(f"{type(config.model).__name__} is not a causal language model, which Atom needs")
    text_config: PreTrainedConfig = config.model.config.get_text_config(decoder=True)
    return text_config


def _read_config(place: Path, config: EngineConfig) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    file = place if place.suffix == ".json" else place / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    if model_type is None:
        raise ModelError(f"{file} names no model_type; expected the config.json of a transformers model")
    if model_type not in CONFIG_MAPPING and not ("auto_map" in fields and config.trust_remote_code):
        import transformers

        remedy = "pass trust_remote_code=True to run it" if "auto_map" in fields else "a newer transformers may know it"
        brings = ", and the model brings its own code" if "auto_map" in fields else ""
        raise ModelError(
            f"transformers {transformers.__version__} does not know model_type {model_type!r} of {file}{brings}; "
            f"{remedy}"
        )
    try:
        with quiet():
            found: PreTrainedConfig = AutoConfig.from_pretrained(str(place), trust_remote_code=config.trust_remote_code)
    except Exception as error:
        raise ModelError(f"transformers refuses {file}: {first_line(error)}") from error
    return found


def _language_config(found: PreTrainedConfig, config: EngineConfig) -> PreTrainedConfig:
    """Return the config of the causal language model in `found`: itself, or its text part."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = found.get_text_config(decoder=True)
    if text is not found and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        for name in ("dtype", "quantization_config"):
            if getattr(text, name, None) is None and getattr(found, name, None) is not None:
                setattr(text, name, getattr(found, name))
        return text
    remote = "AutoModelForCausalLM" in (getattr(found, "auto_map", None) or {}) and config.trust_remote_code
    if found.is_encoder_decoder or (type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote):
        raise ModelError(
            f"model_type {found.model_type!r} ({type(found).__name__}) has no causal language model in transformers, "
            "which Atom needs"
        )
    return found
