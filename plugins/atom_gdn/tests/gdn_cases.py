"""Inputs of the ops beyond their samples: any heads and lengths, on any device, with gates like a trained model's."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from atom_core.plugin.ops import load_function
from atom_gdn.plugin import plugin

OPS = {op.name.removeprefix("gdn."): op for op in plugin.atom_ops()}


@dataclass(frozen=True)
class Heads:
    k_heads: int = 2
    v_heads: int = 4
    head_k: int = 16
    head_v: int = 16
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.head_k + self.v_heads * self.head_v


QWEN3_NEXT = Heads(16, 32, 128, 128, 4)


def make_case(
    op: str,
    lengths: list[int],
    heads: Heads = Heads(),
    *,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    before: int = 0,
    after: int = 0,
    slots_per_row: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of the op; rows read and write their own slots, so states are updated in place.

    Tokens outside of the rows, and slots that no row reads, are NaN; so is the output before the call.
    """
    torch.manual_seed(seed)
    host = (np.concatenate([[0], np.cumsum(lengths)]) + before).astype(np.int32)
    num_tokens, num_slots = int(host[-1]) + after, len(lengths) * slots_per_row + 2

    def poisoned(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        tensor = torch.randn(num_tokens, *shape, device=device, dtype=torch.float32).to(kind)
        tensor[: host[0]] = tensor[host[-1] :] = torch.nan
        return tensor

    base = np.random.default_rng(seed).permutation(len(lengths)) * slots_per_row + 1
    read = base + np.arange(len(lengths)) % slots_per_row
    write = np.full(num_tokens, -1, dtype=np.int64)
    for row, (start, end) in enumerate(pairwise(host)):
        if start < end and slots_per_row == 1:
            write[end - 1] = base[row]
        elif start < end:
            write[start:end] = base[row] + np.arange(end - start)

    def state(*shape: int, kind: torch.dtype) -> torch.Tensor:
        tensor = torch.full((num_slots, *shape), torch.nan, device=device, dtype=kind)
        tensor[read] = (torch.randn(len(lengths), *shape, device=device) * 0.5).to(kind)
        return tensor

    v_heads = heads.v_heads
    channels = poisoned(heads.channels)
    everything = {
        "x": channels,
        "qkv": channels,
        "a": poisoned(v_heads),
        "b": poisoned(v_heads),
        "a_log": torch.empty(v_heads, device=device).uniform_(0.1, 16.0).log(),
        "dt_bias": torch.empty(v_heads, device=device).uniform_(-7.0, -2.2).exp().expm1().log(),
        "beta_scale": 1.0,
        "weight": torch.randn(heads.channels, heads.taps, device=device).to(dtype) * 0.5,
        "conv_state": state(heads.taps - 1, heads.channels, kind=dtype),
        "recurrent_state": state(v_heads, heads.head_v, heads.head_k, kind=state_dtype),
        "out": torch.full((num_tokens, v_heads, heads.head_v), torch.nan, device=device, dtype=dtype),
        "query_start_loc": torch.from_numpy(host).to(device),
        "query_start_loc_host": host,
        "state_read": torch.from_numpy(read.astype(np.int64)).to(device),
        "state_write": torch.from_numpy(write).to(device),
        "max_query_len": max(lengths),
    }
    if op == "causal_conv":
        everything["out"] = torch.full_like(channels, torch.nan)
    return {name: everything[name] for name in inspect.signature(load_function(OPS[op].reference)).parameters}


def copy_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in case.items()}


def widened(case: dict[str, Any]) -> dict[str, Any]:
    """The case in float32, for the reference."""
    own = copy_of(case)
    return {n: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in own.items()}


def run(op: str, case: dict[str, Any], kernel: str = "triton_ops") -> dict[str, Any]:
    """A copy of the case after the kernel ran on it."""
    own = copy_of(case)
    load_function(f"atom_gdn.kernels.{kernel}:{op}")(**own)
    return own


def assert_alike(op: str, found: dict[str, Any], expected: dict[str, Any], atol: float, rtol: float) -> None:
    """Everything that the op writes is close, and NaN where nothing was to be written; the rest is unchanged."""
    for name, value in found.items():
        if not torch.is_tensor(value):
            continue
        if name in OPS[op].mutates:
            wanted = expected[name].to(value.dtype)
            torch.testing.assert_close(value, wanted, atol=atol, rtol=rtol, equal_nan=True)
        else:
            torch.testing.assert_close(value.float(), expected[name].float(), atol=0, rtol=0, equal_nan=True)
