"""Random inputs of the ops, for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["attend", "compress", "select", "write_ring"]

GARBAGE = 1e4
"""What rings and blocks hold where nothing was written; a kernel must not let it through, nor NaN in its place."""


@dataclass(frozen=True)
class _Case:
    """Shapes of one sample.

    Attributes:
        lengths: tokens of each row; 0 for a padding row.
        num_computed: tokens of each row before.
        ratio: tokens per entry.
        overlaps: whether windows overlap, and whether tokens select their entries.
        block_size: tokens per block.
        window: tokens that a token sees.
        drafts: rows of a ring beyond what must be kept.
        top_k: entries that a token selects.
        num_heads: query heads.
        dim: elements of a head.
        padding: tokens behind the last row.
    """

    lengths: tuple[int, ...]
    num_computed: tuple[int, ...]
    ratio: int = 4
    overlaps: bool = True
    block_size: int = 16
    window: int = 8
    drafts: int = 0
    top_k: int = 3
    num_heads: int = 4
    dim: int = 16
    padding: int = 0


_CASES = (
    _Case((1,), (7,)),
    _Case((1, 4, 2, 0), (3, 29, 100, 0), drafts=3, padding=2),
    _Case((5, 40, 17), (0, 0, 33), top_k=6),
    _Case((16, 1, 3), (16, 63, 30), ratio=16, overlaps=False, num_heads=2, padding=1),
    _Case((130, 1), (100, 255), ratio=128, overlaps=False, block_size=128, window=128, dim=64),
)


class _Sample:
    """One case's rows, slots, blocks and random tensors."""

    def __init__(self, case: _Case, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self.generator = torch.Generator().manual_seed(seed)
        numpy_generator = np.random.default_rng(seed)
        self.lengths, self.computed = np.array(case.lengths), np.array(case.num_computed)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.num_tokens = int(self.starts[-1]) + case.padding
        self.num_slots = len(self.lengths) + 2
        self.slots = np.where(self.lengths > 0, numpy_generator.permutation(self.num_slots)[: len(self.lengths)], -1)
        ends = self.computed + self.lengths
        width = -(-int(ends.max()) // case.block_size)
        self.num_blocks = width * len(self.lengths) + 1
        self.tables = numpy_generator.permutation(self.num_blocks)[: width * len(self.lengths)].reshape(-1, width)
        self.row_of_token = np.repeat(np.arange(len(self.lengths)), self.lengths)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.asarray(array, dtype=np.int64)).to(self.device)

    def ring(self, num_rows: int, *shape: int) -> Tensor:
        """Rows of tokens before the step are random, others garbage."""
        ring = torch.full((self.num_slots, num_rows, *shape), GARBAGE, dtype=self.dtype, device=self.device)
        for slot, computed in zip(self.slots, self.computed, strict=True):
            if slot >= 0:
                rows = np.arange(max(0, computed - num_rows), computed) % num_rows
                ring[slot, self.tensor(rows)] = self.normal(len(rows), *shape)
        return ring

    def entries(self, dim: int) -> Tensor:
        """Entries of complete windows are random, others garbage."""
        per_block = self.case.block_size // self.case.ratio
        entries = torch.full((self.num_blocks, per_block, dim), GARBAGE, dtype=self.dtype, device=self.device)
        for table, end in zip(self.tables, self.computed + self.lengths, strict=True):
            numbers = np.arange(end // self.case.ratio)
            blocks = self.tensor(table[numbers // per_block])
            entries[blocks, self.tensor(numbers % per_block)] = self.normal(len(numbers), dim)
        return entries

    def rows(self) -> dict[str, Any]:
        return {
            "query_start_loc_host": self.starts.astype(np.int32),
            "num_computed_host": self.computed.astype(np.int32),
            "block_tables": self.tensor(self.tables).int(),
        }

    def positions(self) -> Any:
        offsets = (self.computed - self.starts[:-1])[self.row_of_token]
        return np.pad(np.arange(len(self.row_of_token)) + offsets, (0, self.case.padding))


def _samples(device: torch.device, dtype: torch.dtype, seed: int) -> list[_Sample]:
    return [_Sample(case, device, dtype, seed + index) for index, case in enumerate(_CASES)]


def write_ring(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `deepseek_v4.write_ring`."""
    found = []
    for sample in _samples(device, dtype, seed):
        ends = (sample.computed + sample.lengths)[sample.row_of_token]
        pad = (0, sample.case.padding)
        found.append(
            {
                "values": sample.normal(sample.num_tokens, 2, sample.case.dim),
                "ring": sample.ring(sample.case.window + sample.case.drafts, 2, sample.case.dim),
                "positions": sample.tensor(sample.positions()),
                "token_slots": sample.tensor(np.pad(sample.slots[sample.row_of_token], pad, constant_values=-1)),
                "token_ends": sample.tensor(np.pad(ends, pad)),
            }
        )
    return found


def compress(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `deepseek_v4.compress`."""
    found = []
    for sample in _samples(device, dtype, seed):
        case = sample.case
        windows: list[int] = []
        rows: list[int] = []
        for row, (computed, length) in enumerate(zip(sample.computed, sample.lengths, strict=True)):
            closed = range(computed // case.ratio, (computed + length) // case.ratio)
            windows += closed
            rows += [row] * len(closed)
        series = 2 if case.overlaps else 1
        gates = torch.randn(case.ratio, series * case.dim, generator=sample.generator)
        found.append(
            {
                "values": sample.normal(sample.num_tokens, 2, series * case.dim),
                "ring": sample.ring(series * case.ratio + case.drafts, 2, series * case.dim),
                "position_bias": gates.to(device, torch.promote_types(dtype, torch.float32)),
                "windows": sample.tensor(windows),
                "slots": sample.tensor(sample.slots[rows]),
                "num_computed": sample.tensor(sample.computed[rows]),
                "token_offsets": sample.tensor((sample.starts[:-1] - sample.computed)[rows]),
                "overlaps": case.overlaps,
            }
        )
    return found


def select(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `deepseek_v4.select`."""
    found = []
    for sample in _samples(device, dtype, seed):
        case = sample.case
        num_heads = 4 * case.num_heads  # with few heads several scores are 0, and the best of them is arbitrary
        weights = torch.randn(sample.num_tokens, num_heads, generator=sample.generator)
        found.append(
            {
                "index_query": sample.normal(sample.num_tokens, num_heads, case.dim),
                "head_weights": weights.to(device, torch.promote_types(dtype, torch.float32)),
                "index_keys": sample.entries(case.dim),
                **sample.rows(),
                "scaling": case.dim**-0.5,
                "top_k": min(case.top_k, int((sample.computed + sample.lengths).max()) // case.ratio),
                "ratio": case.ratio,
            }
        )
    return found


def attend(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `deepseek_v4.attend`: each case with all entries, with a selection where it has one, and with none."""
    found = []
    for sample in _samples(device, dtype, seed):
        case = sample.case
        common = {
            "query": sample.normal(sample.num_tokens, case.num_heads, case.dim),
            "key": sample.normal(sample.num_tokens, case.dim),
            "ring": sample.ring(case.window + case.drafts, case.dim),
            "entries": sample.entries(case.dim),
            "selection": None,
            "out": sample.normal(sample.num_tokens, case.num_heads, case.dim),
            **sample.rows(),
            "slots_host": sample.slots,
            "scaling": case.dim**-0.5,
            "window": case.window,
            "ratio": case.ratio,
            "sinks": sample.normal(case.num_heads),
        }
        found += [common, {**_fresh(common), "entries": None, "ratio": None}]
        if case.overlaps:
            found.append({**_fresh(common), "selection": _selection(sample)})
    return found


def _fresh(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "out": inputs["out"].clone()}


def _selection(sample: _Sample) -> Tensor:
    """For each token, a random subset of the entries it may see, anywhere among -1."""
    selection = torch.full((sample.num_tokens, sample.case.top_k), -1)
    for token, position in enumerate(sample.positions()[: len(sample.row_of_token)]):
        visible = torch.randperm((int(position) + 1) // sample.case.ratio, generator=sample.generator)
        chosen = visible[: sample.case.top_k]
        places = torch.randperm(sample.case.top_k, generator=sample.generator)[: len(chosen)]
        selection[token, places] = chosen
    return selection.to(sample.device)
