"""Violation, and how two runs are compared: where they differ first, by how much, and in which layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Trace", "Violation", "difference", "error_of"]


class Violation(AssertionError):
    """An invariant does not hold; the message is the whole report, one or two lines."""


@dataclass(frozen=True)
class Trace:
    """What a model gave for consecutive tokens of one request.

    Attributes:
        logits: [num_tokens, vocab_size] float32.
        layers: by module name, in the order in which the layers run, [num_tokens, width] outputs of each claimed layer.
    """

    logits: Tensor
    layers: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.logits)

    def between(self, start: int, end: int) -> Trace:
        """The part of some consecutive tokens."""
        return Trace(self.logits[start:end], {name: output[start:end] for name, output in self.layers.items()})

    @classmethod
    def join(cls, parts: Sequence[Trace]) -> Trace:
        """Put traces of consecutive tokens behind each other."""
        layers = {name: torch.cat([part.layers[name] for part in parts]) for name in parts[0].layers}
        return cls(torch.cat([part.logits for part in parts]), layers)


def error_of(expected: Tensor, found: Tensor) -> Tensor:
    """Error per token, [num_tokens], relative to the largest expected value or 1; infinite where not finite."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    errors = (found.float() - expected.float()).abs().flatten(1).amax(1) / scale
    return torch.where(torch.isfinite(errors), errors, torch.inf)


def difference(expected: Trace, found: Trace, tolerance: float, first_token: int = 0) -> str | None:
    """Say where two traces of the same tokens differ.

    Args:
        expected: what must be.
        found: what is.
        tolerance: largest error of logits, as `error_of` counts it.
        first_token: number of the traces' first token, for the message.

    Returns:
        For example `differs at token 61, max error 0.13, layers 2..`, or `None` where they agree.
    """
    errors = error_of(expected.logits, found.logits)
    wrong = (errors > tolerance).nonzero()
    if not len(wrong):
        return None
    token = first_token + int(wrong[0])
    shown = f"differs at token {token}, max error {float(errors.max()):.2g}"
    return f"{shown}, {_layers(expected, found, tolerance)}"


def _layers(expected: Trace, found: Trace, tolerance: float) -> str:
    """Name the first layer that differs; every later one follows from it."""
    for name, output in expected.layers.items():
        other = found.layers.get(name)
        if other is not None and bool((error_of(output, other) > tolerance).any()):
            return f"layers {_number(name)}.."
    return "no claimed layer differs by itself"


def _number(module_name: str) -> str:
    """A decoder layer's number where the module's name has one, else the whole name."""
    found = re.search(r"\.(\d+)(?:\.|$)", module_name)
    return found.group(1) if found else module_name
