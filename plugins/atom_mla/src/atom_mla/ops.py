"""The ops of this plugin and the kernels it brings for them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from atom_core.plugin import Kernel, Op

if TYPE_CHECKING:
    import torch

__all__ = ["KERNELS", "OPS"]

_TOLERANCE = {"float32": (2e-5, 2e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)}
_EXACT = {"float32": (0.0, 0.0), "bfloat16": (0.0, 0.0), "float16": (0.0, 0.0)}


def _op(name: str, summary: str, tolerance: Mapping[str, tuple[float, float]], mutates: tuple[str, ...] = ()) -> Op:
    return Op(
        name=f"mla.{name}",
        reference=f"atom_mla.kernels.reference:{name}",
        tolerance=tolerance,
        sample_inputs=f"atom_mla.kernels.samples:{name}",
        summary=summary,
        mutates=mutates,
    )


def _cache_verdict(dtype: torch.dtype) -> bool | str:
    import torch

    if dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return True
    return f"needs a cache of floating point or float8_e4m3fn, not {dtype}"


def _by_torch(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    return _cache_verdict(dtypes["cache"])


def _by_triton(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    if device.type != "cuda":
        return f"runs on CUDA devices only, not on {device}"
    if facts["latent_dim"] > 512 or facts["rope_dim"] > 64:
        return f"latents of {facts['latent_dim']} + {facts['rope_dim']} are wider than 512 + 64"
    return _cache_verdict(dtypes["cache"])


def _on_hopper(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    import torch

    verdict = _by_triton(device, dtypes, facts)
    if verdict is not True:
        return verdict
    if find_spec("triton.experimental.gluon") is None:
        return "needs a triton with Gluon"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "needs the matrix units of compute capability 9"
    if dtypes["query"].itemsize != 2 or dtypes["cache"] != dtypes["query"]:
        return f"needs queries and cache of one 16 bit dtype, not {dtypes['query']} and {dtypes['cache']}"
    if (facts["latent_dim"], facts["rope_dim"]) != (512, 64):
        return f"needs latents of 512 + 64, not {facts['latent_dim']} + {facts['rope_dim']}"
    return True if facts["num_heads"] > 32 else f"{facts['num_heads']} heads do not fill its tiles of 64"


def _by_cudnn(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    import torch

    verdict = _by_triton(device, dtypes, facts)
    if verdict is not True:
        return verdict
    if dtypes["query"].itemsize != 2:
        return f"needs 16 bit floating point, not {dtypes['query']}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "measured on compute capability 9 only"
    sizes = facts["nope_dim"] + facts["rope_dim"], facts["value_dim"]
    return True if sizes == (192, 128) else f"head sizes {sizes} were not measured"


OPS = (
    _op("write_latent", "write latents or index keys into their paged cache", _EXACT, mutates=("cache", "scale")),
    _op("decode", "absorbed queries over cached latents", _TOLERANCE),
    _op("prefill", "chunks without a cached prefix over their own expanded keys and values", _TOLERANCE),
    _op("prefill_paged", "chunks over cached latents, prefix and chunk", _TOLERANCE),
    _op("select_tokens", "the indexer's best tokens for each query token", _EXACT),
    _op("attend_selected", "absorbed queries over each query token's own selection of latents", _TOLERANCE),
)

_TRITON = {
    "write_latent": "triton_cache",
    "decode": "triton_latent",
    "prefill": "triton_prefill",
    "prefill_paged": "triton_prefix",
    "select_tokens": "triton_select",
    "attend_selected": "triton_latent",
}
_EAGER = ("prefill", "prefill_paged")
"""These read lengths on the host."""

KERNELS: tuple[Kernel, ...] = tuple(
    Kernel(f"mla.{name}", "torch", f"atom_mla.kernels.torch_cpu:{name}", _by_torch)
    for name in ("decode", "prefill", "prefill_paged", "select_tokens", "attend_selected")
)
"""`write_latent` has no faster one in torch than its reference."""
if find_spec("triton") is not None:
    KERNELS += tuple(
        Kernel(
            f"mla.{name}",
            "triton",
            f"atom_mla.kernels.{module}:{name}",
            _by_triton,
            priority=10,
            capturable=name not in _EAGER,
        )
        for name, module in _TRITON.items()
    )
    KERNELS += tuple(
        Kernel(
            f"mla.{name}",
            "hopper",
            f"atom_mla.kernels.gluon_latent:{name}",
            _on_hopper,
            priority=20,
            capturable=True,
        )
        for name in ("decode", "attend_selected")
    )
    KERNELS += (Kernel("mla.prefill", "cudnn", "atom_mla.kernels.torch_cudnn:prefill", _by_cudnn, priority=20),)
