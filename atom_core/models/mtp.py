"""A model's own multi-token-prediction layers, as transformers' `MtpModel` has them.

The layers share embedding, head and rotary embedding with their model. The first one takes, for each token, the model's
last hidden state of the token before it, and predicts the token after it. It drafts further tokens from its own hidden
states; layers behind the first, each made for one distance, are not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from atom_core.errors import ConfigError, ModelError
from atom_core.models.quiet import first_line, quiet

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig
    from transformers.modeling_layers import MtpModel

__all__ = ["build_mtp", "load_mtp"]


def build_mtp(model: nn.Module, model_config: PreTrainedConfig) -> MtpModel:
    """Build the first layer on the meta device, for a model that is there.

    Raises:
        ConfigError: the model's config names none, or transformers cannot build them from it or run them.
    """
    with torch.device("meta"):
        return _first_layer(_build(model, model_config))


def load_mtp(model: nn.Module, model_config: PreTrainedConfig, random_weights: int | None) -> MtpModel:
    """Return the first layer with weights, on the model's device and in its dtype.

    Args:
        model: the model, not bound yet.
        model_config: its text config.
        random_weights: draw the weights from this seed; otherwise they come from the model's checkpoint.

    Raises:
        ConfigError: this version of transformers cannot run them.
        ModelError: the checkpoint does not have them.
    """
    if random_weights is not None:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(random_weights)
            layers = _build(model, model_config)
            for module in layers.layers.modules():
                model._init_weights(module)  # type: ignore[operator]  # what MtpModel's own does not know
        parameter = next(model.parameters())
        layers.layers.to(parameter.device, parameter.dtype)
        return _first_layer(layers)
    mtp_class = _mtp_class()
    try:
        with quiet():
            layers = mtp_class.from_pretrained(model, device_map={"": next(model.parameters()).device})
    except Exception as error:
        raise ModelError(
            f"the multi-token-prediction layers of {type(model).__name__} cannot be loaded: {first_line(error)}; "
            "speculation='mtp' needs a checkpoint that has them"
        ) from error
    return _first_layer(layers)


def _build(model: nn.Module, model_config: PreTrainedConfig) -> MtpModel:
    count = getattr(model_config, "num_mtp_layers", None)
    if not count:
        raise ConfigError(
            f"the config of {model_config.model_type} names no multi-token-prediction layers (num_mtp_layers is "
            f"{count}), which speculation='mtp' needs"
        )
    mtp_class = _mtp_class()
    try:
        with quiet():
            return mtp_class(model, count)
    except ValueError as error:
        raise ConfigError(
            f"transformers cannot build the multi-token-prediction layers of {model_config.model_type}: "
            f"{first_line(error)}"
        ) from error


def _mtp_class() -> type[MtpModel]:
    """Import transformers' class, if it is one that can run a layer by itself; that of 5.17 cannot.

    Raises:
        ConfigError: it is not.
    """
    import transformers
    from transformers import modeling_layers

    found = getattr(modeling_layers, "MtpModel", None)
    if not hasattr(found, "forward_layer"):
        raise ConfigError(
            f"speculation='mtp' needs a newer transformers: that of version {transformers.__version__} cannot run a "
            "multi-token-prediction layer by itself"
        )
    return cast("type[MtpModel]", found)


def _first_layer(layers: MtpModel) -> MtpModel:
    layers.layers = layers.layers[:1]
    layers.eval()
    layers.requires_grad_(False)
    return layers
