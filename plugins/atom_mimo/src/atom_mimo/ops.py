"""The ops that this plugin defines, and its kernels for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atom_core.plugin import Kernel, Op

if TYPE_CHECKING:
    import torch

__all__ = ["KERNELS", "OPS"]

_EXACT = {"float64": (0.0, 0.0), "float32": (0.0, 0.0), "bfloat16": (0.0, 0.0), "float16": (0.0, 0.0)}
_TOLERANCE = {"float64": (1e-9, 1e-9), "float32": (2e-5, 2e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)}


def _op(name: str, summary: str, tolerance: Mapping[str, tuple[float, float]], mutates: tuple[str, ...]) -> Op:
    return Op(
        name=f"mimo.{name}",
        reference=f"atom_mimo.kernels.reference:{name}",
        tolerance=tolerance,
        sample_inputs=f"atom_mimo.kernels.samples:{name}",
        summary=summary,
        mutates=mutates,
    )


OPS = (
    _op("ring_decode", "rows of few tokens attend over their ring and themselves", _TOLERANCE, ("out",)),
    _op("ring_prefill", "chunks attend over their ring and themselves", _TOLERANCE, ("out",)),
    _op("ring_write", "write the last tokens of each row into its ring", _EXACT, ("ring_k", "ring_v")),
)


def _on_cpu(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    if device.type != "cpu":
        return f"runs on the CPU only, not on {device}"
    return True if dtypes["cache"].is_floating_point and dtypes["cache"].itemsize > 1 else "needs an unquantized cache"


KERNELS = tuple(
    Kernel(op.name, "torch_cpu", op.reference.replace("reference", "torch_cpu"), supports=_on_cpu, priority=10)
    for op in OPS
)
