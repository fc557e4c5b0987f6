"""Linear layers prepared once for the CPU: weights packed as its matrix products are fastest with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["PreparedLinear", "prepare_linears"]

_ROWS_HINT = 16
"""Rows that oneDNN packs for; any number may come."""


class PreparedLinear(nn.Module):
    """`nn.Linear` with its weight packed for oneDNN, which reads it once and in order.

    Where the CPU has no instructions for bfloat16 or float16, products of many rows in these dtypes are several times
    slower than float32's: they are computed in float32 then, and rounded once. A single row is bound by memory, and
    half the bytes win: it takes the weight as it was.

    Args:
        linear: the layer; on the CPU.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.weight.dtype
        self._compute_dtype = self._dtype if _has_instructions(self._dtype) else torch.float32
        weight = linear.weight.detach().to(self._compute_dtype).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._packed_bias = None if linear.bias is None else linear.bias.detach().to(self._compute_dtype)
        self._original = None if self._compute_dtype is self._dtype else linear

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], for code that reads it, as some routers do; unpacked each time."""
        if self._original is not None:
            return self._original.weight
        weight: Tensor = self._packed.to_dense()
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[out_features], or `None`."""
        return self._packed_bias if self._original is None else self._original.bias

    def forward(self, states: Tensor) -> Tensor:
        """Return `states @ weight.T + bias` in the layer's dtype.

        Args:
            states: [..., in_features]
        """
        if self._original is not None and states.numel() == self.in_features:
            return functional.linear(states, self._original.weight, self._original.bias)
        rows = states.to(self._compute_dtype)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._packed_bias, "none", [], "")
        return output.to(self._dtype)


def prepare_linears(model: nn.Module, skip: frozenset[str], budget_bytes: int) -> int:
    """Replace the linear layers of a CPU model by prepared ones, if there is memory for it.

    Args:
        model: weights loaded, on the CPU.
        skip: names of modules whose linear layers stay: their code reads the weights itself.
        budget_bytes: most bytes that the prepared weights may take.

    Returns:
        Bytes that the prepared weights take; 0 if they stay as they are.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    found = [
        (parent, name, child)
        for parent_name, parent in model.named_modules()
        if not any(parent_name == skipped or parent_name.startswith(skipped + ".") for skipped in skip)
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    needed = sum(4 * child.weight.numel() for _, _, child in found)
    if needed > budget_bytes:
        return 0
    for parent, name, child in found:
        parent._modules[name] = PreparedLinear(child)
    return needed


def _has_instructions(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
