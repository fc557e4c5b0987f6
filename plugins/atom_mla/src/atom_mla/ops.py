"""The ops of this plugin and the kernels it brings for them."""

from __future__ import annotations

from collections.abc import Mapping
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


def _supports(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool | str:
    """Support the floating-point dtypes that convert to float32 without a scale."""
    narrow = [f"{name} {dtype}" for name, dtype in dtypes.items() if dtype.itemsize < 2 or not dtype.is_floating_point]
    return f"needs unscaled floating point of 16 bits or more, found {', '.join(narrow)}" if narrow else True


def _kernel(name: str) -> Kernel:
    return Kernel(f"mla.{name}", "torch", f"atom_mla.kernels.torch_cpu:{name}", _supports)


OPS = (
    _op("write_latent", "write latents or index keys into their paged cache", _EXACT, mutates=("cache",)),
    _op("decode", "absorbed queries over cached latents", _TOLERANCE),
    _op("prefill", "chunks without a cached prefix over their own expanded keys and values", _TOLERANCE),
    _op("prefill_paged", "chunks over cached latents, prefix and chunk", _TOLERANCE),
    _op("select_tokens", "the indexer's best tokens for each query token", _EXACT),
    _op("attend_selected", "absorbed queries over each query token's own selection of latents", _TOLERANCE),
)
"""Every op; `write_latent` has its reference only."""

KERNELS = tuple(_kernel(name) for name in ("decode", "prefill", "prefill_paged", "select_tokens", "attend_selected"))
