"""The ops that this plugin defines, and its kernels for them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
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


def _by_triton(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    if device.type != "cuda":
        return f"runs on CUDA devices only, not on {device}"
    if not dtypes["cache"].is_floating_point or dtypes["cache"].itemsize not in (2, 4):
        return f"cannot read rings of {dtypes['cache']}"
    widest = max(facts["head_dim"], facts["v_head_dim"])
    return True if widest <= 256 else f"heads of {widest} are wider than 256"


def _on_hopper(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    import torch

    verdict = _by_triton(device, dtypes, facts)
    if verdict is not True:
        return verdict
    if find_spec("triton.experimental.gluon") is None:
        return "needs a triton with Gluon"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return "needs the matrix units of compute capability 9"
    if dtypes["cache"].itemsize != 2:
        return f"computes in 16 bit, the rings are of {dtypes['cache']}"
    sizes, group = (facts["head_dim"], facts["v_head_dim"]), facts["num_heads"] // facts["num_kv_heads"]
    if sizes != (192, 128) or group != 8:
        return f"is written for 8 query heads of a key head and sizes of 192 and 128, not for {group} and {sizes}"
    return True if facts["window"] <= 128 else f"keeps windows of up to 128 tokens, not of {facts['window']}"


_TRITON = {"ring_decode": "triton_ring", "ring_prefill": "triton_ring", "ring_write": "triton_ring_write"}

KERNELS: tuple[Kernel, ...] = tuple(
    Kernel(op.name, "torch_cpu", op.reference.replace("reference", "torch_cpu"), supports=_on_cpu, priority=10)
    for op in OPS
)
if find_spec("triton") is not None:
    KERNELS += tuple(
        Kernel(
            f"mimo.{name}",
            "triton",
            f"atom_mimo.kernels.{module}:{name}",
            supports=_by_triton,
            priority=10,
            capturable=True,
        )
        for name, module in _TRITON.items()
    )
    KERNELS += (
        Kernel(
            "mimo.ring_prefill",
            "hopper",
            "atom_mimo.kernels.gluon_ring:ring_prefill",
            supports=_on_hopper,
            priority=20,
            capturable=True,
        ),
    )
