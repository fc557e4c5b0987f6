"""Random inputs of the ops, for kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["sample_causal_conv", "sample_chunk_delta_rule", "sample_decode"]


@dataclass(frozen=True)
class _Case:
    """Shapes of one sample.

    Attributes:
        lengths: tokens of each row; 0 for a padding row.
        k_heads: key heads.
        v_heads: value heads.
        head_k: key head dimension.
        head_v: value head dimension.
        taps: length of the convolution.
        before: tokens of the step in front of the op's rows.
        after: tokens of the step behind them.
        beta_scale: factor of the update strength.
    """

    lengths: Sequence[int]
    k_heads: int = 2
    v_heads: int = 4
    head_k: int = 16
    head_v: int = 8
    taps: int = 4
    before: int = 0
    after: int = 0
    beta_scale: float = 1.0

    @property
    def num_tokens(self) -> int:
        return self.before + sum(self.lengths) + self.after

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.head_k + self.v_heads * self.head_v


_CHUNKS = (
    _Case([1]),
    _Case([3, 0, 200, 64, 65, 1], before=5, after=2),
    _Case([130, 2], k_heads=4, v_heads=4, head_k=8, head_v=16, taps=2, beta_scale=2.0),
    _Case([63, 128], k_heads=1, v_heads=3, head_k=64, head_v=64, taps=7),
)
_DECODES = (
    _Case([1]),
    _Case([1, 1, 1, 1, 0, 0], after=2),
    _Case([3, 1, 4, 2], k_heads=4, v_heads=4, head_k=8, head_v=16, taps=2, beta_scale=2.0),
    _Case([5, 5], k_heads=1, v_heads=3, head_k=64, head_v=64, taps=7),
)


def sample_causal_conv(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `gdn.causal_conv`."""
    return [_conv(case, _Source(device, dtype, seed + index)) for index, case in enumerate(_CHUNKS)]


def sample_chunk_delta_rule(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `gdn.chunk_delta_rule`."""
    return [_chunk(case, _Source(device, dtype, seed + index)) for index, case in enumerate(_CHUNKS)]


def sample_decode(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `gdn.decode`."""
    return [_decode(case, _Source(device, dtype, seed + index)) for index, case in enumerate(_DECODES)]


class _Source:
    """Random tensors from a seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self._torch = torch.Generator().manual_seed(seed)
        self.numpy = np.random.default_rng(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._torch).to(self.device, dtype or self.dtype)

    def state(self, *shape: int) -> Tensor:
        return self.normal(*shape, dtype=torch.float32)

    def indices(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _conv(case: _Case, source: _Source) -> dict[str, Any]:
    addressing = _addressing(case, source, slots_per_row=1)
    return {
        "x": source.normal(case.num_tokens, case.channels),
        "weight": source.normal(case.channels, case.taps),
        "conv_state": source.normal(len(case.lengths) + 2, case.taps - 1, case.channels),
        "out": source.normal(case.num_tokens, case.channels),
        **addressing,
    }


def _chunk(case: _Case, source: _Source) -> dict[str, Any]:
    return {
        "qkv": source.normal(case.num_tokens, case.channels),
        **_head_inputs(case, source),
        "recurrent_state": source.state(len(case.lengths) + 2, case.v_heads, case.head_v, case.head_k),
        "out": source.normal(case.num_tokens, case.v_heads, case.head_v),
        **_addressing(case, source, slots_per_row=1),
    }


def _decode(case: _Case, source: _Source) -> dict[str, Any]:
    slots_per_row = max(case.lengths)
    num_slots = slots_per_row * len(case.lengths) + 2
    addressing = _addressing(case, source, slots_per_row)
    del addressing["query_start_loc_host"]
    return {
        "qkv": source.normal(case.num_tokens, case.channels),
        **_head_inputs(case, source),
        "weight": source.normal(case.channels, case.taps),
        "conv_state": source.normal(num_slots, case.taps - 1, case.channels),
        "recurrent_state": source.state(num_slots, case.v_heads, case.head_v, case.head_k),
        "out": source.normal(case.num_tokens, case.v_heads, case.head_v),
        **addressing,
    }


def _head_inputs(case: _Case, source: _Source) -> dict[str, Any]:
    return {
        "a": source.normal(case.num_tokens, case.v_heads),
        "b": source.normal(case.num_tokens, case.v_heads),
        "a_log": source.normal(case.v_heads),
        "dt_bias": source.normal(case.v_heads),
        "beta_scale": case.beta_scale,
    }


def _addressing(case: _Case, source: _Source, slots_per_row: int) -> dict[str, Any]:
    """Rows in groups of shuffled order: each reads any slot of its group, the first row starts from zeros.

    Token i of a row writes the group's slot i, or only the last token does where a row has a single slot; the last
    row writes nothing.
    """
    lengths = np.asarray(case.lengths)
    start_loc = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) + np.int32(case.before)
    groups = source.numpy.permutation(len(lengths)) * slots_per_row
    read = groups + source.numpy.integers(0, slots_per_row, len(lengths))
    write = np.full(case.num_tokens, -1, dtype=np.int64)
    for row, (start, length) in enumerate(zip(start_loc[:-1], lengths, strict=True)):
        if length and (row < len(lengths) - 1 or len(lengths) == 1):
            written = np.arange(length) if slots_per_row > 1 else np.arange(length - 1, length)
            write[start + written] = groups[row] + (written if slots_per_row > 1 else 0)
    if len(lengths) > 1:
        read[0] = -1
    return {
        "query_start_loc": source.indices(start_loc),
        "query_start_loc_host": start_loc,
        "state_read": source.indices(read.astype(np.int64)),
        "state_write": source.indices(write),
        "max_query_len": int(lengths.max()),
    }
