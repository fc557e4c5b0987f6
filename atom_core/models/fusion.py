"""Linear layers that read the same input, computed as one product.

Which layers these are is seen in a step, not read from names: siblings that get the same tensor one after another.
Their weights become rows of one matrix; the first of them computes the whole product, the others take their columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.fx import Graph

    from atom_core.plugin.ops import KernelTable, SelectedKernel

__all__ = ["DeviceLinear", "FusedLinear", "LinearCalls", "fuse_linears", "graph_joins", "prepare_linears"]


@dataclass
class _Call:
    """One call of a linear layer in the step watched: its input, kept so that no other tensor takes its place."""

    linear: nn.Linear
    parent: nn.Module
    states: Tensor


class LinearCalls:
    """Watches the linear layers during one step; use as a context manager around it.

    Args:
        model: the model, its attention layers bound.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[_Call] = []
        self._handles: list[Any] = []

    def __enter__(self) -> LinearCalls:
        for parent in self._model.modules():
            for child in parent.children():
                if type(child) is nn.Linear:
                    self._handles.append(child.register_forward_pre_hook(self._watch(parent)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def groups(self) -> list[list[nn.Linear]]:
        """Return siblings that were called one after another with one tensor, each of them once in the step."""
        counts: dict[nn.Linear, int] = {}
        for call in self._calls:
            counts[call.linear] = counts.get(call.linear, 0) + 1
        runs: list[list[_Call]] = []
        for call in self._calls:
            last = runs[-1][-1] if runs else None
            if last is None or last.parent is not call.parent or last.states is not call.states:
                runs.append([])
            runs[-1].append(call)
        found = [[call.linear for call in run] for run in runs]
        return [group for group in found if len(group) > 1 and all(counts[linear] == 1 for linear in group)]

    def _watch(self, parent: nn.Module) -> Any:
        def watch(linear: nn.Linear, arguments: tuple[Tensor, ...]) -> None:
            self._calls.append(_Call(linear, parent, arguments[0]))

        return watch


class DeviceLinear(nn.Linear):
    """A linear layer that has a kernel for a single row, where a plugin brings one that beats the library's product."""

    _row_kernel: SelectedKernel | None

    def forward(self, states: Tensor) -> Tensor:
        """Return `states @ weight.T + bias`.

        Args:
            states: [..., in_features]
        """
        return _linear(states, self.weight, self.bias, self._row_kernel)


class FusedLinear(DeviceLinear):
    """One of several linear layers over the same input.

    `weight` and `bias` stay what they were, as rows of the joint ones. A call with an input that the first of the
    layers did not just get computes this layer alone.
    """

    _product: _Product
    _start: int

    def forward(self, states: Tensor) -> Tensor:
        """Return `states @ weight.T + bias`, columns of the joint product where there is one.

        Args:
            states: [..., in_features]
        """
        joint = self._product.of(states, self._start)
        if joint is None:
            return _linear(states, self.weight, self.bias, self._row_kernel)
        return joint[..., self._start : self._start + self.out_features]


class _Product:
    """The joint product of one group, from its first layer's call until its last layer's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, last_start: int, row_kernel: SelectedKernel | None) -> None:
        self._weight = weight
        self._bias = bias
        self._last_start = last_start
        self._row_kernel = row_kernel
        self._states: Tensor | None = None
        self._joint: Tensor | None = None

    def of(self, states: Tensor, start: int) -> Tensor | None:
        if start == 0:
            self._states = states
            self._joint = _linear(states, self._weight, self._bias, self._row_kernel)
        joint = self._joint if states is self._states else None
        if start == self._last_start:
            self._states = self._joint = None
        return joint


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None, row_kernel: SelectedKernel | None) -> Tensor:
    if row_kernel is not None and states.numel() == weight.shape[1]:
        row: Tensor = row_kernel(states, weight, bias)
        return row
    return functional.linear(states, weight, bias)


def _row_kernel(weight: Tensor, kernels: KernelTable) -> SelectedKernel | None:
    """A plugin's kernel for a single row; the reference is no better than what it stands for."""
    selected = kernels.select(
        "core.linear_row",
        device=weight.device,
        dtypes={"weight": weight.dtype},
        facts={"in_features": weight.shape[1], "out_features": weight.shape[0]},
    )
    return None if selected.name == "reference" else selected


def prepare_linears(model: nn.Module, kernels: KernelTable) -> None:
    """Give every linear layer a kernel for a single row, if there is one; its weight stays what it is.

    Args:
        model: the model.
        kernels: where kernels are selected.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            _become(module, DeviceLinear, _row_kernel(module.weight, kernels))


def graph_joins(modules: Iterable[nn.Module]) -> list[Callable[[Graph], None]]:
    """Return what joins the kernels of linear layers with their neighbours in compiled graphs; each function once."""
    inner = (child for module in modules for child in module.modules() if isinstance(child, DeviceLinear))
    kernels = (kernel for child in inner if (kernel := child._row_kernel) is not None)
    return list(dict.fromkeys(kernel.joins for kernel in kernels if kernel.joins is not None))


def _become(linear: nn.Linear, kind: type[DeviceLinear], row_kernel: SelectedKernel | None) -> DeviceLinear:
    linear.__class__ = kind
    assert isinstance(linear, DeviceLinear), "the class was just changed"
    linear._row_kernel = row_kernel
    return linear


@torch.no_grad()
def fuse_linears(groups: list[list[nn.Linear]], kernels: KernelTable) -> int:
    """Join the weights of each group; nothing else needs to know.

    Args:
        groups: from `LinearCalls.groups`.
        kernels: where kernels are selected.

    Returns:
        How many groups were joined; layers of different dtypes, or with and without bias, stay apart.
    """
    joined = 0
    for group in groups:
        if len({(linear.weight.dtype, linear.bias is None, linear.weight.device) for linear in group}) > 1:
            continue
        weight = torch.cat([linear.weight for linear in group])
        bias = None if group[0].bias is None else torch.cat([linear.bias for linear in group])
        last_start = weight.shape[0] - group[-1].out_features
        product = _Product(weight, bias, last_start, _row_kernel(weight, kernels))
        start = 0
        for linear in group:
            rows = slice(start, start + linear.out_features)
            linear.weight = nn.Parameter(weight[rows], requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias[rows], requires_grad=False)
            fused = _become(linear, FusedLinear, _row_kernel(linear.weight, kernels))
            assert isinstance(fused, FusedLinear), "the class was just changed"
            fused._product, fused._start = product, start
            start += linear.out_features
        joined += 1
    return joined
