"""Kernels of the `mla.*` ops: `reference` defines each op, `samples` makes test inputs.

`torch_cpu` is fast on the CPU and needs no other package. `triton_*` are for CUDA devices: `triton_latent` attends to
latents, all of them or selected ones, `gluon_latent` does so on Hopper; `triton_prefill` attends to expanded keys,
`triton_prefix` expands cached latents for it; `triton_select` is the indexer, `triton_cache` writes. `torch_cudnn` is
torch's own attention where that is faster.
"""

__all__ = ["LARGEST_PIECE_BYTES"]

LARGEST_PIECE_BYTES = 256 << 20
"""Most scratch memory of a kernel for CUDA devices at a time, unless a single query token needs more."""
