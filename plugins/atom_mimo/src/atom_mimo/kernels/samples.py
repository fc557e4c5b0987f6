"""Random inputs of the ops, for kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Case", "attention_case", "ring_decode", "ring_prefill", "ring_write", "write_case"]


@dataclass(frozen=True)
class Case:
    """Shapes of one sample.

    Attributes:
        lengths: tokens of each row; 0 for a padding row.
        num_computed: tokens of each row before.
        window: keys that a token sees.
        spare: ring rows beyond the window.
        num_heads: query heads.
        num_kv_heads: key heads.
        head_dim: size of a query and a key.
        v_head_dim: size of a value.
        sinks: whether there are.
        before: tokens of the step in front of the op's rows.
        after: tokens of the step behind them.
        stateless: rows that have no ring.
    """

    lengths: Sequence[int]
    num_computed: Sequence[int]
    window: int = 8
    spare: int = 0
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 24
    v_head_dim: int = 16
    sinks: bool = True
    before: int = 0
    after: int = 0
    stateless: Sequence[int] = ()


_DECODES = (
    Case([1], [5]),
    Case([1, 1, 1, 1, 0, 0], [7, 8, 9, 1000, 0, 3], after=2),
    Case([4, 4, 1, 2, 4], [1, 8, 17, 40, 6], spare=3, before=1, after=3),
    Case([1, 3], [2, 5], window=1, spare=2, num_kv_heads=8, sinks=False),
    Case([1, 1, 1], [4, 300, 129], window=129, num_heads=16, num_kv_heads=8, head_dim=192, v_head_dim=128),
    Case([2, 2], [0, 30], window=12, spare=1, num_heads=4, num_kv_heads=1, stateless=[1]),
)
_CHUNKS = (
    Case([1], [0]),
    Case([5, 0, 8, 9, 1, 40], [0, 0, 0, 3, 12, 21], before=3, after=2),
    Case([13, 11, 2], [5, 0, 7], window=5, spare=3, num_kv_heads=8, sinks=False),
    Case([200, 260], [100, 0], window=129, num_heads=16, num_kv_heads=8, head_dim=192, v_head_dim=128),
    Case([3, 150], [9, 2], window=1, num_kv_heads=4),
    Case([7, 7], [20, 20], window=6, num_heads=4, num_kv_heads=1, stateless=[0]),
)


def ring_decode(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `mimo.ring_decode`."""
    return [attention_case(case, device, dtype, seed + index) for index, case in enumerate(_DECODES)]


def ring_prefill(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `mimo.ring_prefill`."""
    return [attention_case(case, device, dtype, seed + index) for index, case in enumerate(_CHUNKS)]


def ring_write(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `mimo.ring_write`."""
    return [write_case(case, device, dtype, seed + index) for index, case in enumerate((*_DECODES, *_CHUNKS))]


def write_case(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Inputs of `mimo.ring_write` for one case."""
    unused = {"query", "out", "scaling", "window", "sinks"}
    sample = attention_case(case, device, dtype, seed)
    return {name: value for name, value in sample.items() if name not in unused}


def attention_case(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Rings in shuffled slots; what a ring holds of no computed position is far too large."""
    generator, numpy_generator = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    lengths, num_computed = np.asarray(case.lengths), np.asarray(case.num_computed, dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) + np.int32(case.before)
    num_tokens, ring_rows = int(starts[-1]) + case.after, case.window + case.spare
    slots = numpy_generator.permutation(len(lengths) + 2)[: len(lengths)].astype(np.int64)
    written = torch.zeros(len(lengths) + 2, ring_rows, 1, 1, dtype=torch.bool)
    for slot, count in zip(slots, num_computed, strict=True):
        written[slot, : int(count)] = True
    slots[list(case.stateless)] = -1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def ring(dim: int) -> torch.Tensor:
        content = normal(len(written), ring_rows, case.num_kv_heads, dim)
        return content.masked_fill(~written.to(device), 1e4)

    return {
        "query": normal(num_tokens, case.num_heads, case.head_dim),
        "key": normal(num_tokens, case.num_kv_heads, case.head_dim),
        "value": normal(num_tokens, case.num_kv_heads, case.v_head_dim),
        "ring_k": ring(case.head_dim),
        "ring_v": ring(case.v_head_dim),
        "out": normal(num_tokens, case.num_heads, case.v_head_dim),
        "query_start_loc": torch.from_numpy(starts).to(device),
        "query_start_loc_host": starts,
        "num_computed": torch.from_numpy(num_computed).to(device),
        "num_computed_host": num_computed,
        "slots": torch.from_numpy(slots).to(device),
        "slots_host": slots,
        "max_query_len": int(lengths.max()),
        "scaling": case.head_dim**-0.5,
        "window": case.window,
        "sinks": normal(case.num_heads) if case.sinks else None,
        "scratch": {},
    }
