"""CompiledBlocks: what lies between the attention kernels, compiled while decode steps are captured.

A captured step has no launch cost, but each small kernel still takes microseconds of the device. The compiler makes one
kernel of norms, rotations, activations and sums. Attention stays as its plugin made it, but for the methods that the
plugin says are tensors from tensors alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atom_core.models.binding import register_attention_interface
from atom_core.models.fusion import graph_joins

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph, GraphModule

    from atom_core.models.binding import ClaimedLayers

__all__ = ["CompiledBlocks"]


class CompiledBlocks:
    """Lets modules run compiled inside the context, and as they are outside.

    Modules of one class share their compiled code. So what the compiler leaves out is marked on classes, not on
    modules: it would compile once more for every module that has a function of its own.

    Args:
        claimed: the model's attention layers; of what they do, only the methods named in `compiled` are compiled.
        blocks: the modules to compile.
    """

    def __init__(self, claimed: ClaimedLayers, blocks: Iterable[nn.Module]) -> None:
        self._kinds: list[Any] = list(
            dict.fromkeys(type(layer) for layer in claimed.layers if isinstance(layer, nn.Module))
        )
        self._blocks = list(blocks)
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> CompiledBlocks:
        register_attention_interface(self._disabled)
        changes: list[tuple[Any, str, Any]] = []
        for kind in self._kinds:
            changes.append((kind, "forward", self._disabled(kind.forward)))
            changes += [(kind, name, self._compiled(getattr(kind, name))) for name in kind.compiled]
        changes += [(block, "forward", self._compiled(block.forward)) for block in self._blocks]
        for owner, name, function in changes:
            self._restore.append(_restorer(owner, name))
            setattr(owner, name, function)
        return self

    def __exit__(self, *_: object) -> None:
        while self._restore:
            self._restore.pop()()
        register_attention_interface()

    @functools.cached_property
    def _disabled(self) -> Callable[[Any], Any]:
        disable: Callable[[Any], Any] = torch.compiler.disable
        return functools.cache(disable)

    @functools.cached_property
    def _compiled(self) -> Callable[[Any], Any]:
        backend = functools.partial(_compile_graph, graph_joins(self._blocks))
        return functools.cache(lambda function: torch.compile(function, dynamic=True, backend=backend))


def _compile_graph(joins: list[Callable[[Graph], None]], traced: GraphModule, inputs: list[Tensor]) -> Any:
    """Let the kernels of linear layers join what stands beside them; then torch's own compiler does the rest.

    A function of its own, since torch keeps what it compiles with for good: it must not hold the model.
    """
    from torch._inductor.compile_fx import compile_fx

    for join in joins:
        join(traced.graph)
    traced.recompile()
    # The analysis fails an assertion of its own (torch 2.11) on some graphs of any number of tokens.
    return compile_fx(traced, inputs, config_patches={"triton.coalesce_tiling_analysis": False})


def _restorer(owner: Any, name: str) -> Callable[[], None]:
    """What puts an attribute back to how it is now: set on the owner itself, or inherited."""
    if name in vars(owner):
        return functools.partial(setattr, owner, name, vars(owner)[name])
    return functools.partial(delattr, owner, name)
