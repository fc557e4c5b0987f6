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
        name=f"mha.{name}",
        reference=f"atom_mha.kernels.reference:{name}",
        tolerance=tolerance,
        sample_inputs=f"atom_mha.kernels.samples:{name}",
        summary=summary,
        mutates=mutates,
    )


OPS = (
    _op(
        "write_kv",
        "write a step's keys and values into the paged cache",
        _EXACT,
        ("k_cache", "v_cache", "k_scale", "v_scale"),
    ),
    _op("decode", "rows of few query tokens attend over the paged cache", _TOLERANCE, ("out",)),
    _op("prefill", "chunks without a cached prefix attend to their own keys", _TOLERANCE, ("out",)),
    _op("prefill_paged", "chunks attend over the paged cache, where their keys are too", _TOLERANCE, ("out",)),
)


def _on_cpu(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    if device.type != "cpu":
        return f"runs on the CPU only, not on {device}"
    return _cache_verdict(dtypes["cache"])


def _cache_verdict(dtype: torch.dtype) -> bool | str:
    import torch

    if dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return True
    return f"needs a cache of floating point or float8_e4m3fn, not {dtype}"


def _by_triton(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    import torch

    if device.type != "cuda":
        return f"runs on CUDA devices only, not on {device}"
    if dtypes["cache"].itemsize == 8 or _cache_verdict(dtypes["cache"]) is not True:
        return f"cannot read a cache of {dtypes['cache']}"
    if dtypes["cache"].itemsize == 1 and torch.cuda.get_device_capability(device) < (8, 9):
        return "float8_e4m3fn needs compute capability 8.9"
    widest = max(facts["head_dim"], facts["v_head_dim"])
    return True if widest <= 256 else f"heads of {widest} are wider than 256"


def _by_cudnn(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    import torch

    verdict = _by_triton(device, dtypes, facts)
    if verdict is not True:
        return verdict
    if dtypes["cache"].itemsize > 2:
        return f"computes in 16 bit, the cache is of {dtypes['cache']}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "measured on compute capability 9 only"
    sizes = facts["head_dim"], facts["v_head_dim"]
    known = max(sizes) <= 128 or sizes == (192, 128)
    return True if known and not any(size % 8 for size in sizes) else f"head sizes {sizes} were not measured"


_TRITON = {
    "write_kv": "triton_cache",
    "decode": "triton_decode",
    "prefill": "triton_prefill",
    "prefill_paged": "triton_prefill",
}

KERNELS: tuple[Kernel, ...] = tuple(
    Kernel(op.name, "torch_cpu", op.reference.replace("reference", "torch_cpu"), supports=_on_cpu, priority=10)
    for op in OPS
)
if find_spec("triton") is not None:
    KERNELS += tuple(
        Kernel(
            f"mha.{name}",
            "triton",
            f"atom_mha.kernels.{module}:{name}",
            supports=_by_triton,
            priority=10,
            capturable=True,
        )
        for name, module in _TRITON.items()
    )
    KERNELS += (
        Kernel("mha.prefill", "cudnn", "atom_mha.kernels.torch_cudnn:prefill", supports=_by_cudnn, priority=20),
    )
