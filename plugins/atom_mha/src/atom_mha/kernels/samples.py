"""Random inputs for tests of the `mha.*` kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atom_mha.kernels.float8 import quantize

__all__ = ["decode", "paged_case", "prefill", "prefill_case", "prefill_paged", "write_kv"]

_PLAIN: dict[str, Any] = {"window": None, "chunk": None, "soft_cap": None, "sinks": False}


def write_kv(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Tokens for random slots, with and without skipped ones, a head of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    cases: list[dict[str, Any]] = []
    shapes = ((1, 0, 16, 16, False), (13, 4, 16, 16, False), (40, 0, 24, 8, False), (13, 4, 24, 8, True))
    for num_tokens, num_skipped, head_dim, v_head_dim, float8 in shapes:
        slots = torch.randperm(8 * 16, generator=generator)[:num_tokens]
        slots[torch.randperm(num_tokens, generator=generator)[:num_skipped]] = -1
        key = _normal(generator, (num_tokens, 2, head_dim), device, dtype)
        key[0, 0] = 0
        cache_dtype = torch.float8_e4m3fn if float8 else dtype
        cases.append(
            {
                "key": key,
                "value": _normal(generator, (num_tokens, 2, v_head_dim), device, dtype),
                "k_cache": torch.zeros(8, 16, 2, head_dim, device=device, dtype=cache_dtype),
                "v_cache": torch.zeros(8, 16, 2, v_head_dim, device=device, dtype=cache_dtype),
                "k_scale": torch.zeros(8, 2, 16, device=device) if float8 else None,
                "v_scale": torch.zeros(8, 2, 16, device=device) if float8 else None,
                "slot_mapping": slots.to(device),
                "scratch": {},
            }
        )
    return cases


def decode(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Rows of one to four tokens at block boundaries and elsewhere, padding rows among them."""
    return [
        paged_case(seed, device, dtype, query_lens=[1], seq_lens=[1]),
        paged_case(seed, device, dtype, query_lens=[1] * 6, seq_lens=[16, 17, 1, 40, 64, 63]),
        paged_case(seed, device, dtype, query_lens=[1] * 4, seq_lens=[5, 33, 34, 90], window=20),
        paged_case(seed, device, dtype, query_lens=[1] * 4, seq_lens=[5, 16, 33, 90], chunk=16, num_heads=4),
        paged_case(seed, device, dtype, query_lens=[4, 4, 1, 0, 3], seq_lens=[4, 35, 70, 1, 20], window=9),
        paged_case(seed, device, dtype, query_lens=[1, 2, 2], seq_lens=[50, 51, 18], sinks=True, v_head_dim=8),
        paged_case(seed, device, dtype, query_lens=[1, 1, 3], seq_lens=[48, 7, 33], soft_cap=5.0, num_kv_heads=1),
        paged_case(seed, device, dtype, query_lens=[1, 3, 0], seq_lens=[48, 33, 9], float8=True, v_head_dim=8),
    ]


def prefill_paged(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Chunks over prefixes shorter and longer than window and chunk."""
    return [
        paged_case(seed, device, dtype, query_lens=[1], seq_lens=[2]),
        paged_case(seed, device, dtype, query_lens=[16, 5, 33], seq_lens=[32, 21, 60]),
        paged_case(seed, device, dtype, query_lens=[30, 3], seq_lens=[34, 80], window=12),
        paged_case(seed, device, dtype, query_lens=[30, 40], seq_lens=[47, 41], chunk=16),
        paged_case(seed, device, dtype, query_lens=[20, 7], seq_lens=[40, 8], sinks=True, window=5, v_head_dim=8),
        paged_case(seed, device, dtype, query_lens=[20, 300], seq_lens=[21, 310], soft_cap=5.0),
        paged_case(seed, device, dtype, query_lens=[300], seq_lens=[600], num_kv_heads=6),
        paged_case(seed, device, dtype, query_lens=[20, 9], seq_lens=[70, 9], float8=True, window=30),
    ]


def prefill(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Chunks from position 0, shorter and longer than window and chunk."""
    return [
        prefill_case(seed, device, dtype, query_lens=[1, 7, 64]),
        prefill_case(seed, device, dtype, query_lens=[30, 300], window=12),
        prefill_case(seed, device, dtype, query_lens=[16, 40, 17], chunk=16, num_kv_heads=1),
        prefill_case(seed, device, dtype, query_lens=[20, 33], sinks=True, v_head_dim=8),
        prefill_case(seed, device, dtype, query_lens=[20, 33], soft_cap=5.0, window=8),
    ]


def paged_case(
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int = 16,
    block_size: int = 16,
    shuffled: bool = True,
    float8: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Inputs of `mha.decode` and `mha.prefill_paged`; memory that no row has written holds NaN.

    Args:
        seed: of the values.
        device: where.
        dtype: of query and cache.
        query_lens: new tokens per row.
        seq_lens: keys per row.
        num_heads: query heads.
        num_kv_heads: key heads.
        head_dim: of queries and keys.
        v_head_dim: of values.
        block_size: tokens per block.
        shuffled: whether a row's blocks are scattered.
        float8: whether the cache is quantized.
        options: `window`, `chunk`, `soft_cap`, and `sinks` as a bool.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    blocks = torch.arange(1, sum(num_blocks) + 1)
    if shuffled:
        blocks = blocks[torch.randperm(len(blocks), generator=generator)]
    block_tables = torch.zeros(len(seq_lens), max(num_blocks) + 1, dtype=torch.int32)
    k_cache = torch.full((len(blocks) + 2, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    v_cache = torch.full((len(blocks) + 2, block_size, num_kv_heads, v_head_dim), float("nan"), dtype=dtype)
    taken = 0
    for row, seq_len in enumerate(seq_lens):
        own = blocks[taken : taken + num_blocks[row]]
        taken += num_blocks[row]
        block_tables[row, : len(own)] = own
        positions = torch.arange(seq_len)
        slots = own[positions // block_size] * block_size + positions % block_size
        cpu = torch.device("cpu")
        k_cache.flatten(0, 1)[slots] = _normal(generator, (seq_len, num_kv_heads, head_dim), cpu, dtype)
        v_cache.flatten(0, 1)[slots] = _normal(generator, (seq_len, num_kv_heads, v_head_dim), cpu, dtype)
    num_tokens = sum(query_lens)
    k_scale = v_scale = None
    if float8:
        (k_cache, k_scale), (v_cache, v_scale) = quantize(k_cache), quantize(v_cache)
    return {
        "query": _normal(generator, (num_tokens, num_heads, head_dim), device, dtype),
        "k_cache": k_cache.to(device),
        "v_cache": v_cache.to(device),
        "k_scale": None if k_scale is None else k_scale.transpose(1, 2).contiguous().to(device),
        "v_scale": None if v_scale is None else v_scale.transpose(1, 2).contiguous().to(device),
        "out": torch.zeros(num_tokens, num_heads, v_head_dim, device=device, dtype=dtype),
        "query_start_loc": _starts(query_lens, device),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=device),
        "block_tables": block_tables.to(device),
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        **_options(generator, num_heads, head_dim, device, options),
    }


def prefill_case(
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    query_lens: Sequence[int],
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int = 16,
    **options: Any,
) -> dict[str, Any]:
    """Inputs of `mha.prefill`; arguments as in `paged_case`."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(query_lens)
    return {
        "query": _normal(generator, (num_tokens, num_heads, head_dim), device, dtype),
        "key": _normal(generator, (num_tokens, num_kv_heads, head_dim), device, dtype),
        "value": _normal(generator, (num_tokens, num_kv_heads, v_head_dim), device, dtype),
        "out": torch.zeros(num_tokens, num_heads, v_head_dim, device=device, dtype=dtype),
        "query_start_loc": _starts(query_lens, device),
        "max_query_len": max(query_lens),
        **_options(generator, num_heads, head_dim, device, options),
    }


def _options(
    generator: torch.Generator, num_heads: int, head_dim: int, device: torch.device, options: dict[str, Any]
) -> dict[str, Any]:
    chosen = {**_PLAIN, **options}
    sinks = torch.randn(num_heads, generator=generator).to(device) if chosen["sinks"] else None
    return {**chosen, "sinks": sinks, "scaling": head_dim**-0.5, "scratch": {}}


def _starts(query_lens: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _normal(generator: torch.Generator, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
