"""What stands behind a single row's product in compiled code becomes part of its kernel: a gate, a sum.

The graphs are those of torch's tracer, before anything is decomposed. Where a pattern is not exactly there, nothing
changes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from atom_linear.kernels import triton_row
from atom_linear.norm_joins import PRODUCTS, SUMS, join_norms

__all__ = ["join_rows"]

_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem"}


def join_rows(graph: fx.Graph) -> None:
    """Join `silu(first half) * second half` and `residual + product` with the product in front of them; join norms.

    Args:
        graph: changed in place.
    """
    if not any(_changes_in_place(node) for node in graph.nodes):
        join_norms(graph)
    row: Any = triton_row.linear_row._opoverload
    for node in [node for node in graph.nodes if node.target is row]:
        gate = _gate_behind(node)
        if gate is not None and _may_move(node, gate):
            _replace(graph, [*node.users, *gate.args, gate], node, gated=True)
    for node in [node for node in graph.nodes if node.target is row]:
        addition = _only_user(node)
        if addition is not None and addition.target in SUMS and not addition.kwargs and len(addition.args) == 2:
            first, second = addition.args
            residual = second if first is node else first
            if isinstance(residual, fx.Node) and _alike(residual, node) and _may_move(node, addition):
                _replace(graph, [addition], node, residual=residual)


def _gate_behind(node: fx.Node) -> fx.Node | None:
    """The product of the halves, if the first alone goes through silu and nothing else reads either."""
    halves = _halves(node)
    if halves is None:
        return None
    activated, product = _only_user(halves[0]), _only_user(halves[1])
    if activated is None or activated.target is not functional.silu or activated.args != (halves[0],):
        return None
    if product is None or product.target not in PRODUCTS or _only_user(activated) is not product:
        return None
    return product if set(product.args) == {activated, halves[1]} and not product.kwargs else None


def _halves(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two slices that are all that is read of a product."""
    width = node.meta["example_value"].shape[-1]
    indices = [(Ellipsis, slice(0, width // 2, None)), (Ellipsis, slice(width // 2, width, None))]
    users = list(node.users)
    if len(users) != 2 or any(user.target is not operator.getitem or user.args[0] is not node for user in users):
        return None
    by_place = [next((user for user in users if user.args[1] == index), None) for index in indices]
    return None if by_place[0] is None or by_place[1] is None else (by_place[0], by_place[1])


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _may_move(node: fx.Node, last: fx.Node) -> bool:
    """Whether nothing between two nodes changes a tensor in place, so that the first may be computed at the last."""
    while (node := node.next) is not last:
        if _changes_in_place(node):
            return False
    return True


def _changes_in_place(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _IN_PLACE or name.endswith("_") or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are different tensors of one shape, dtype and device."""
    if node is other:
        return False
    one, two = (which.meta.get("example_value") for which in (node, other))
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    return one.shape == two.shape and one.dtype == two.dtype and one.device == two.device


def _replace(
    graph: fx.Graph, replaced: list[Any], node: fx.Node, *, residual: fx.Node | None = None, gated: bool = False
) -> None:
    """Put a product that does more in the place of one and of the nodes behind it.

    Nothing else is taken out of the graph: what nobody reads may still change a tensor in place.
    """
    last: fx.Node = replaced[-1]
    options = dict(node.kwargs)
    if gated:
        options["gated"] = True
    if residual is not None:
        options["residual"] = residual
    target: Any = node.target
    with graph.inserting_before(last):
        joined = graph.call_function(target, node.args, options)
    joined.meta = dict(last.meta)
    last.replace_all_uses_with(joined)
    for dead in (*reversed(list(dict.fromkeys(replaced))), node):
        graph.erase_node(dead)
