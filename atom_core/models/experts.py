"""Mixture-of-experts layers in captured steps: implementations that never wait for the device.

transformers lets a model's expert layers run by any function that is registered under a name. The one registered here
chooses by the number of pairs of token and expert. Few pairs go to the kernel that a plugin brings for
`core.expert_rows`; without one, very few read the experts' weights in one pass each where the compiler makes one kernel
of the lookup and the sum. Many go through transformers' grouped product, which is one launch whatever the routing, but
exists on the device for bfloat16 alone; other dtypes gather weights and multiply in batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from atom_core.plugin.ops import KernelTable, SelectedKernel

__all__ = ["EXPERTS_NAME", "choose_experts", "is_experts", "prepare_experts", "run_experts"]

EXPERTS_NAME = "atom"
_MAX_KERNEL_PAIRS = 512
"""Pairs that go to a plugin's kernel; from there on, most experts have enough rows for the grouped product."""
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


def prepare_experts(model: nn.Module, kernels: KernelTable) -> None:
    """Give every expert layer a kernel for few rows, if a plugin brings one.

    Args:
        model: the model.
        kernels: where kernels are selected.
    """
    for layer in filter(is_experts, model.modules()):
        weight: Tensor = _first_weight(layer)
        selected = kernels.select(
            "core.expert_rows",
            device=weight.device,
            dtypes={"weight": weight.dtype},
            facts={"num_experts": len(weight)},
        )
        layer.__dict__["_atom_rows"] = None if selected.name == "reference" else selected


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

    first = _first_weight(layer)
    num_pairs = top_k_index.numel()
    kernel: SelectedKernel | None = layer.__dict__.get("_atom_rows")
    if kernel is not None and num_pairs <= _MAX_KERNEL_PAIRS:
        return _run_pairs(layer, kernel, hidden_states, top_k_index, top_k_weights)
    if torch.compiler.is_compiling() and 2 * num_pairs <= layer.num_experts:
        return _run_pairs(layer, _sum_of_products, hidden_states, top_k_index, top_k_weights)
    gathered_bytes = 2 * num_pairs * first[0].numel() * first.element_size()
    if first.dtype is torch.bfloat16 or gathered_bytes > _MAX_GATHERED_BYTES:
        output: Tensor = grouped_mm_experts_forward(layer, hidden_states, top_k_index, top_k_weights)
    else:
        output = batched_mm_experts_forward(layer, hidden_states, top_k_index, top_k_weights)
    return output


def _first_weight(layer: Any) -> Tensor:
    weight: Tensor = layer.gate_up_proj if layer.has_gate else layer.up_proj
    return weight


def _run_pairs(
    layer: Any,
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Each pair of token and expert by itself; `product` is called as `core.expert_rows`."""
    num_tokens, top_k = top_k_index.shape
    experts = top_k_index.reshape(-1)

    def project(states: Tensor, name: str) -> Tensor:
        weight: Tensor = getattr(layer, name)
        projected = product(states, weight.mT if layer.is_transposed else weight, experts)
        if layer.has_bias:
            projected = projected + getattr(layer, f"{name}_bias")[experts]
        return projected

    inner = project(hidden_states, "gate_up_proj" if layer.has_gate else "up_proj")
    inner = layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner)
    outer = project(inner, "down_proj")
    if getattr(layer, "has_post_expert_norm", False):  # since transformers 5.24
        outer = layer.post_expert_norm(outer)
    weighted = outer.view(num_tokens, top_k, -1) * top_k_weights.unsqueeze(2)
    return weighted.sum(1).to(hidden_states.dtype)


def _sum_of_products(states: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """`core.expert_rows` such that the compiler makes one kernel of it."""
    rows = states.repeat_interleave(experts.shape[0] // states.shape[0], dim=0)
    return (weight[experts].float() * rows.float().unsqueeze(1)).sum(2).to(states.dtype)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts' weights and runs by transformers' experts interface."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_transposed", "has_bias", "config"))
