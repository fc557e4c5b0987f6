"""What the kernels support, and what follows for graphs; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from atom_core.plugin import GraphSupport

if TYPE_CHECKING:
    import torch

    from atom_gdn.layer import GatedDeltaNetLayer

__all__ = ["WIDEST_KEY", "by_triton", "graph_support", "on_cpu"]

WIDEST_KEY = 128
"""Most numbers of a key in the Triton kernels: a state's rows live in registers."""


def on_cpu(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    """Support every shape and dtype on the CPU."""
    return device.type == "cpu" or f"runs on the CPU only, not on {device.type}"


def by_triton(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    """Support 16 and 32 bit states with keys of up to `WIDEST_KEY` numbers on GPUs."""
    if device.type != "cuda":
        return f"runs on CUDA devices only, not on {device.type}"
    for name in ("conv_state", "recurrent_state"):
        if not dtypes[name].is_floating_point or dtypes[name].itemsize not in (2, 4):
            return f"needs a {name} of 16 or 32 bit floating point, not {dtypes[name]}"
    return _fits(facts["head_k"])


def graph_support(layers: Sequence[GatedDeltaNetLayer]) -> GraphSupport:
    """Steps of equal rows, where Triton's decode kernel takes every layer; the others wait for the device."""
    fit = all(_fits(layer.shape.head_k) is True for layer in layers)
    return GraphSupport.UNIFORM if fit else GraphSupport.NEVER


def _fits(head_k: int) -> bool | str:
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    return head_k <= WIDEST_KEY or f"keys of {head_k} are wider than {WIDEST_KEY}"
