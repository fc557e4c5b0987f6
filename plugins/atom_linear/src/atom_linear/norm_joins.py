"""The norm of a single row in compiled code, and the sum that it is of, become one kernel that begins early.

The pattern is the usual one, `weight * (x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)` with x in float32.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from atom_linear.kernels import triton_norm

__all__ = ["PRODUCTS", "SUMS", "join_norms"]

SUMS = (operator.add, torch.add)
PRODUCTS = (operator.mul, torch.mul)


class _Norm(NamedTuple):
    """What a norm is of: the nodes of its row and its weight, and its eps, a number or a node."""

    states: fx.Node
    weight: fx.Node
    eps: Any


def join_norms(graph: fx.Graph) -> None:
    """Put a kernel in the place of each norm of a single row; what nobody reads then is left to the compiler.

    Args:
        graph: changed in place; nothing in it may change a tensor in place.
    """
    target: Any = triton_norm.rms_norm._opoverload
    for last in [node for node in graph.nodes if node.target in PRODUCTS]:
        norm = _norm_of(last)
        if norm is None:
            continue
        terms = _terms(norm.states)
        known_later = isinstance(norm.eps, fx.Node)
        eps = (norm.eps.args[0], 0.0) if known_later else (None, norm.eps)
        with graph.inserting_before(last):
            both = graph.call_function(target, (*terms, norm.weight, *eps))
            summed, normed = (graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
        summed.meta, normed.meta = dict(norm.states.meta), dict(last.meta)
        last.replace_all_uses_with(normed)
        if terms[1] is not None:
            norm.states.replace_all_uses_with(summed, delete_user_cb=set(_behind(summed)).__contains__)


def _norm_of(last: fx.Node) -> _Norm | None:
    for weight, cast in _orders(last, *PRODUCTS):
        if not isinstance(weight, fx.Node) or not _calls(cast, "to", "type_as"):
            continue
        for wide, root in _orders(cast.args[0], *PRODUCTS):
            norm = _norm_of_parts(weight, cast, wide, root)
            if norm is not None:
                return norm
    return None


def _norm_of_parts(weight: fx.Node, cast: Any, wide: Any, root: Any) -> _Norm | None:
    if not _calls(root, torch.rsqrt) or not _calls(wide, "to", "float"):
        return None
    if wide.kwargs or wide.args[1:] not in ((), (torch.float32,)):
        return None
    for mean, eps in _orders(root.args[0], *SUMS):
        if not _calls(mean, "mean") or mean.args[1:] != (-1,) or mean.kwargs != {"keepdim": True}:
            continue
        square = mean.args[0]
        if not _calls(square, "pow") or square.args != (wide, 2):
            continue
        if (isinstance(eps, float) or _calls(eps, "item")) and _is_row(wide.args[0], weight, cast):
            return _Norm(wide.args[0], weight, eps)
    return None


def _is_row(states: fx.Node, weight: fx.Node, cast: fx.Node) -> bool:
    row, factors, rounded = _values(states, weight, cast)
    if not all(isinstance(value, torch.Tensor) for value in (row, factors, rounded)):
        return False
    size = factors.shape[0] if factors.dim() == 1 else None
    return bool(row.shape[-1] == size and row.numel() == size and row.dtype == factors.dtype == rounded.dtype)


def _terms(states: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The two tensors that a row is the sum of, or the row."""
    for first, second in _orders(states, *SUMS)[:1]:
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            own, *values = _values(states, first, second)
            if all(value.shape == own.shape and value.dtype == own.dtype for value in values):
                return first, second
    return states, None


def _values(*nodes: fx.Node) -> list[Any]:
    return [node.meta.get("example_value") for node in nodes]


def _orders(node: Any, *targets: Any) -> tuple[tuple[Any, Any], ...]:
    """Both orders of a call's two arguments; none if it is no such call."""
    if not _calls(node, *targets) or len(node.args) != 2 or node.kwargs:
        return ()
    first, second = node.args
    return (first, second), (second, first)


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in targets


def _behind(node: fx.Node) -> list[fx.Node]:
    found = []
    while (node := node.next).op != "root":
        found.append(node)
    return found
