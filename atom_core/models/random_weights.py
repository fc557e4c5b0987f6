"""Models with random weights that depend on a seed only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["cast_like", "random_model"]


def random_model(
    build: Callable[[PreTrainedConfig, torch.dtype], PreTrainedModel],
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
) -> PreTrainedModel:
    """Build a model with its own initialization, drawn from `seed`.

    The weights do not depend on the global random state, which is left as it was. For the CPU they are drawn in
    float32 and cast to `dtype`; on a GPU they are drawn there in `dtype`, in seconds for any size: other weights.
    """
    if device.type == "cuda":
        with torch.random.fork_rng(devices=[device]), device:
            torch.cuda.manual_seed(seed)
            return build(model_config, dtype)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = build(model_config, torch.float32)
    if dtype != torch.float32:
        with torch.device("meta"):
            cast_like(model, build(model_config, dtype))
    return model


@torch.no_grad()
def cast_like(model: torch.nn.Module, template: torch.nn.Module) -> None:
    """Give every parameter and buffer the dtype it has in `template`, a model of the same structure.

    `Module.to(dtype)` would also cast what a model keeps in float32, such as rotary frequencies.
    """
    parameters = dict(template.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(parameters[name].dtype)
    buffers = dict(template.named_buffers(remove_duplicate=False))
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(buffers[name].dtype)
