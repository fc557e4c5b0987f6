"""CompiledBlocks: what lies between the attention layers, compiled while decode steps are captured.

A captured step has no launch cost, but each small kernel still takes microseconds of the device. The compiler makes one
kernel of norms, rotations, activations and sums. Attention stays as its plugin made it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atom_core.models.binding import register_attention_interface

if TYPE_CHECKING:
    from atom_core.models.binding import ClaimedLayers

__all__ = ["CompiledBlocks"]


class CompiledBlocks:
    """Lets modules run compiled inside the context, and as they are outside.

    Modules of one class share their compiled code. So what the compiler leaves out is marked on classes, not on
    modules: it would compile once more for every module that has a function of its own.

    Args:
        claimed: the model's attention layers; what they do is not compiled.
        blocks: the modules to compile.
    """

    def __init__(self, claimed: ClaimedLayers, blocks: Iterable[nn.Module]) -> None:
        kinds = dict.fromkeys(type(layer) for layer in claimed.layers if isinstance(layer, nn.Module))
        self._opaque: list[Any] = list(kinds)
        self._blocks = list(blocks)
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> CompiledBlocks:
        register_attention_interface(self._disabled)
        for kind in self._opaque:
            self._restore.append(_restorer(kind, "forward"))
            kind.forward = self._disabled(kind.forward)
        for block in self._blocks:
            self._restore.append(_restorer(block, "forward"))
            block.forward = self._compiled(block)
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
    def _compiled(self) -> Callable[[nn.Module], Any]:
        return functools.cache(lambda block: torch.compile(block.forward, dynamic=True))


def _restorer(owner: Any, name: str) -> Callable[[], None]:
    """What puts an attribute back to how it is now: set on the owner itself, or inherited."""
    if name in vars(owner):
        return functools.partial(setattr, owner, name, vars(owner)[name])
    return functools.partial(delattr, owner, name)
