"""Mixture-of-experts layers in captured steps: implementations that never wait for the device.

transformers lets a model's expert layers run by any function that is registered under a name. The one registered here
chooses by the number of pairs of token and expert: few pairs read the experts' weights in one pass each, where the
compiler makes one kernel of the lookup and the sum; many go through transformers' grouped product, which is one launch
whatever the routing, but exists on the device for bfloat16 alone; other dtypes gather weights and multiply in batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EXPERTS_NAME", "choose_experts", "is_experts", "run_experts"]

EXPERTS_NAME = "atom"
_MAX_GATHERED_BYTES = 2**31
"""Weights that may be gathered at once; more go to the grouped product, which may wait for the device then."""


def choose_experts(model: nn.Module) -> int:
    """Let the model's expert layers run by `run_experts`.

    Args:
        model: any; one without such layers stays as it is.

    Returns:
        How many expert layers there are.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    layers: list[Any] = [module for module in model.modules() if is_experts(module)]
    if layers:
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, run_experts)
    for layer in layers:
        layer.config._experts_implementation = EXPERTS_NAME
    return len(layers)


def run_experts(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a layer's experts; arguments and answer are those of transformers' experts interface.

    Args:
        layer: the module that holds the experts' weights.
        hidden_states: [num_tokens, hidden_size].
        top_k_index: [num_tokens, top_k], the experts of each token.
        top_k_weights: [num_tokens, top_k].

    Returns:
        [num_tokens, hidden_size]
    """
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

    first: Tensor = layer.gate_up_proj if layer.has_gate else layer.up_proj
    num_pairs = top_k_index.numel()
    if torch.compiler.is_compiling() and 2 * num_pairs <= layer.num_experts:
        return _run_pairs(layer, first, hidden_states, top_k_index, top_k_weights)
    gathered_bytes = 2 * num_pairs * first[0].numel() * first.element_size()
    if first.dtype is torch.bfloat16 or gathered_bytes > _MAX_GATHERED_BYTES:
        output: Tensor = grouped_mm_experts_forward(layer, hidden_states, top_k_index, top_k_weights)
    else:
        output = batched_mm_experts_forward(layer, hidden_states, top_k_index, top_k_weights)
    return output


def _run_pairs(layer: Any, first: Tensor, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each pair of token and expert by itself, as sums of products."""
    num_tokens, top_k = top_k_index.shape
    experts = top_k_index.reshape(-1)
    states = hidden_states.repeat_interleave(top_k, dim=0)
    first_bias = second_bias = None
    if layer.has_bias:
        first_bias = layer.gate_up_proj_bias if layer.has_gate else layer.up_proj_bias
        second_bias = layer.down_proj_bias
    inner = _pair_product(states, first, first_bias, experts, layer.is_transposed)
    inner = layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner)
    outer = _pair_product(inner, layer.down_proj, second_bias, experts, layer.is_transposed)
    weighted = outer * top_k_weights.reshape(-1, 1)
    return weighted.view(num_tokens, top_k, -1).sum(1).to(hidden_states.dtype)


def _pair_product(states: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> Tensor:
    """[pairs, out] from states [pairs, in] and weight [experts, out, in], or [experts, in, out] if transposed."""
    chosen = weight[experts].float()
    if transposed:
        product = (chosen * states.float().unsqueeze(2)).sum(1)
    else:
        product = (chosen * states.float().unsqueeze(1)).sum(2)
    if bias is not None:
        product = product + bias[experts].float()
    return product.to(states.dtype)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts' weights and runs by transformers' experts interface."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_transposed", "has_bias", "config"))
