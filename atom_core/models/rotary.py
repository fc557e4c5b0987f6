"""Rotary scalings that depend on a whole batch's positions, fixed at the longest request."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["fix_rotary_scaling"]

_FIXED = "fixed by atom"


def fix_rotary_scaling(model: nn.Module, max_model_len: int) -> list[str]:
    """Evaluate `dynamic` and `longrope` scalings once, at `max_model_len`, and switch their updates off.

    transformers recomputes these frequencies from the largest position of a batch, so that one request's
    length would change another's output (transformers `modeling_rope_utils.dynamic_rope_update`).

    Returns:
        Names of the modules that were fixed.
    """
    fixed = []
    for name, module in model.named_modules():
        kinds = module.__dict__.get("rope_type")
        by_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
        changing = [key for key, kind in by_layer_type.items() if isinstance(kind, str) and _depends_on_batch(kind)]
        for layer_type in changing:
            _evaluate(module, max_model_len, layer_type)
            if layer_type is None:
                module.__dict__["rope_type"] = _FIXED
            else:
                by_layer_type[layer_type] = _FIXED
        if changing:
            fixed.append(name)
    return fixed


def _depends_on_batch(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _evaluate(module: nn.Module, max_model_len: int, layer_type: str | None) -> None:
    device = next(module.buffers()).device
    positions = torch.tensor([[max_model_len - 1]], device=device)
    extra = {} if layer_type is None else {"layer_type": layer_type}
    with torch.no_grad():
        module(torch.zeros(1, device=device), positions, **extra)
