# mypy: disallow-untyped-decorators=False
"""`mla.write_latent` in Triton: one program per token, rows of a paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_mla.kernels.float8 import LARGEST, LEAST_SCALE
from atom_mla.kernels.triton_tiles import unit_inner_stride

__all__ = ["write_latent"]

_LARGEST = tl.constexpr(LARGEST)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


def write_latent(
    latent: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None, slot_mapping: torch.Tensor
) -> None:
    """Write one step's latents, or index keys, into their paged cache; see `reference.write_latent`."""
    num_tokens, width = latent.shape
    if num_tokens == 0:
        return
    latent = unit_inner_stride(latent)
    _write[(num_tokens,)](
        latent,
        cache,
        latent if scale is None else scale,
        slot_mapping,
        latent.stride(0),
        cache.stride(0),
        cache.stride(1),
        1 if scale is None else scale.stride(0),
        BLOCK_SIZE=cache.shape[1],
        SIZE=width,
        WIDTH=triton.next_power_of_2(width),
        HAS_SCALE=scale is not None,
        num_warps=4 if width > 256 else 1,
    )


@triton.jit
def _write(
    latent: tl.tensor,
    cache: tl.tensor,
    scale: tl.tensor,
    slot_mapping: tl.tensor,
    latent_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    scale_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    columns = tl.arange(0, WIDTH)
    numbers = tl.load(latent + token * latent_stride + columns, mask=columns < SIZE, other=0.0)
    if HAS_SCALE:
        wide = numbers.to(tl.float32)
        factor = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), axis=0), _LARGEST), _LEAST_SCALE)
        tl.store(scale + slot // BLOCK_SIZE * scale_stride + slot % BLOCK_SIZE, factor)
        numbers = tl.minimum(tl.maximum(tl.div_rn(wide, factor), -_LARGEST), _LARGEST)
    place = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    tl.store(place + columns, numbers.to(cache.dtype.element_ty), mask=columns < SIZE)
