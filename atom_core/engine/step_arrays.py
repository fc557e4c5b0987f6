"""StepArrays: the arrays of a step in one piece of memory, so that a single copy uploads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["StepArrays"]

_ALIGNMENT = 256


class StepArrays:
    """Named arrays at fixed addresses, which the host fills and the device reads.

    On a GPU the host side is pinned and there twice: a step fills one half while the copy of the step before may
    still read the other. On the CPU both sides are the same memory.

    Args:
        fields: shape and dtype by name; the last one is uploaded up to the rows in use, all others whole.
        device: where they are read.

    Attributes:
        half: which of the host's halves the running step fills.
        host: by name, the numpy view of it.
        device: by name, what the device reads.
    """

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        offsets, size = {}, 0
        for name, (shape, dtype) in fields.items():
            offsets[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._last = list(fields)[-1]
        self._last_offset = offsets[self._last]

        def views(memory: Tensor) -> dict[str, Tensor]:
            return {
                name: memory[offsets[name] : offsets[name] + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for name, (shape, dtype) in fields.items()
            }

        self._halves = [torch.zeros(size, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(1 + self._pinned)]
        self._host_views = [{name: view.numpy() for name, view in views(half).items()} for half in self._halves]
        self._memory = self._halves[0].to(device) if self._pinned else self._halves[0]
        self.device: Mapping[str, Tensor] = views(self._memory)
        self.half = 0
        self.host: Mapping[str, np.ndarray[Any, Any]] = self._host_views[0]

    def begin(self) -> None:
        """Turn to the half whose copy is done; at most one step may be in flight."""
        self.half = (self.half + 1) % len(self._halves)
        self.host = self._host_views[self.half]

    def upload(self, num_rows: int) -> None:
        """Send everything to the device, in stream order.

        Args:
            num_rows: rows of the last array that are in use.
        """
        if self._pinned:
            last = self.device[self._last]
            size = self._last_offset + num_rows * last.stride(0) * last.element_size()
            self._memory[:size].copy_(self._halves[self.half][:size], non_blocking=True)
