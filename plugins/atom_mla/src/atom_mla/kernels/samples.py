"""Fresh random inputs of every op, for the tests of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["attend_selected", "decode", "prefill", "prefill_paged", "select_tokens", "write_latent"]

_ROWS = (
    ((1, 1, 1), (1, 16, 45)),
    ((2, 0, 3), (7, 0, 40)),
    ((1,), (33,)),
    ((5, 20, 1), (5, 52, 17)),
)
"""Query tokens and all tokens per row: one-token rows, verify rows with an empty one, a single row, chunks."""


def write_latent(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `mla.write_latent`: widths with and without a power of two, some tokens skipped; float8 ones exact."""
    generator = torch.Generator().manual_seed(seed)
    cases: list[dict[str, Any]] = []
    for width in (24, 64):
        slots = torch.randperm(6 * 8, generator=generator)[:11]
        slots[[2, 7]] = -1
        latent = torch.randn(11, width, generator=generator)
        cache = torch.randn(6, 8, width, generator=generator)
        cases.append({"latent": latent.to(device, dtype), "cache": cache.to(device, dtype)})
        cases[-1] |= {"scale": None, "slot_mapping": slots.to(device)}
        numbers = (latent * 60).to(torch.float8_e4m3fn).to(dtype)
        numbers[:, 0] = 448
        quantized = torch.zeros(6, 8, width, dtype=torch.float8_e4m3fn), torch.zeros(6, 8)
        cache, scale = (tensor.to(device) for tensor in quantized)
        cases.append({**cases[-1], "latent": numbers.to(device), "cache": cache, "scale": scale})
    return cases


def decode(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `mla.decode`: one and many heads."""
    cases = []
    for number, rows in _steps(device, dtype, seed):
        heads = (1, 4, 16, 3)[number]
        query = rows.random(rows.num_tokens, heads, 32 + 8)
        cases.append({"query": query, **rows.cache(32 + 8), **rows.paged(), "scaling": 0.3, "value_dim": 32})
    return cases


def prefill(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `mla.prefill`: values narrower and wider than keys, rows from an offset."""
    cases = []
    for number, (query_lens, _) in enumerate(_ROWS):
        rows = _Rows(device, dtype, seed * 10 + number, query_lens, query_lens)
        heads, key_dim, value_dim = ((1, 24, 16), (4, 24, 24), (2, 16, 24), (3, 24, 16))[number]
        paged = rows.paged()
        case = {
            "query": rows.random(rows.num_tokens, heads, key_dim),
            "key": rows.random(rows.num_tokens, heads, key_dim),
            "value": rows.random(rows.num_tokens, heads, value_dim),
            "scaling": 0.2,
        }
        names = ("query_start_loc", "query_start_loc_host", "max_query_len")
        cases.append({**case, **{name: paged[name] for name in names}})
    return cases


def prefill_paged(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `mla.prefill_paged`: small and large latents, so that both expanding and absorbing happen."""
    cases = []
    for number, rows in _steps(device, dtype, seed):
        heads, latent_dim, value_dim = ((1, 16, 8), (4, 64, 12), (2, 32, 16), (3, 48, 8))[number]
        case = {
            "query": rows.random(rows.num_tokens, heads, 16 + 8),
            "expansion": rows.random(heads, 16 + value_dim, latent_dim) * latent_dim**-0.5,
            **rows.cache(latent_dim + 8),
        }
        cases.append({**case, **rows.paged(), "scaling": 0.2})
    return cases


def select_tokens(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `mla.select_tokens`: contexts above and below `top_k`; small integers, so that many scores tie."""
    cases = []
    for number, rows in _steps(device, dtype, seed):
        case = {
            "query": rows.random(rows.num_tokens, 2, 16).round(),
            "head_weights": rows.random(rows.num_tokens, 2).round().float(),
            **rows.cache(16, whole=True),
        }
        cases.append({**case, **rows.paged(), "scaling": 0.25, "top_k": (4, 8, 64, 9)[number]})
    return cases


def attend_selected(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Inputs of `mla.attend_selected`: random causal selections with gaps at the end."""
    cases = []
    for number, rows in _steps(device, dtype, seed):
        heads, top_k = ((1, 4), (4, 8), (2, 64), (3, 9))[number]
        case = {
            "query": rows.random(rows.num_tokens, heads, 32 + 8),
            "selected": rows.selection(top_k),
            **rows.cache(32 + 8),
        }
        cases.append({**case, **rows.paged(), "scaling": 0.3, "value_dim": 32})
    return cases


def _steps(device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[tuple[int, _Rows]]:
    """Number in `_ROWS` and rows: each with a cache of `dtype`, some with one of float8 too."""
    for number, (query_lens, seq_lens) in enumerate(_ROWS):
        yield number, _Rows(device, dtype, seed * 10 + number, query_lens, seq_lens)
    for number in (1, 3):
        query_lens, seq_lens = _ROWS[number]
        yield number, _Rows(device, dtype, seed * 10 + number, query_lens, seq_lens, float8=True)


class _Rows:
    """Rows of a step with shuffled blocks; cached values that no row owns are NaN, as a poisoned cache has them."""

    block_size = 8

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        float8: bool = False,
    ) -> None:
        self.device, self.dtype, self.float8 = device, dtype, float8
        self.generator = torch.Generator().manual_seed(seed)
        self.query_lens, self.seq_lens = query_lens, seq_lens
        self.num_tokens = sum(query_lens)
        blocks = [-(-seq_len // self.block_size) for seq_len in seq_lens]
        self.num_blocks = sum(blocks) + 2
        order = torch.randperm(self.num_blocks, generator=self.generator).to(torch.int32)
        self.block_tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, count in enumerate(blocks):
            start = sum(blocks[:row])
            self.block_tables[row, :count] = order[start : start + count]

    def random(self, *shape: int) -> Tensor:
        """Standard normal values."""
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def cache(self, width: int, whole: bool = False) -> dict[str, Any]:
        """A cache, [num_blocks, block_size, width], of integers if `whole`, and its scales."""
        cache = torch.full((self.num_blocks, self.block_size, width), float("nan"))
        scale = torch.full((self.num_blocks, self.block_size), float("nan"))
        for row, seq_len in enumerate(self.seq_lens):
            for position in range(seq_len):
                place = self.block_tables[row, position // self.block_size], position % self.block_size
                token = torch.randn(width, generator=self.generator)
                cache[place] = token.round() if whole else token
                scale[place] = 0.25 if whole else torch.rand((), generator=self.generator) + 0.5
        if not self.float8:
            return {"cache": cache.to(self.device, self.dtype), "scale": None}
        return {"cache": cache.to(torch.float8_e4m3fn).to(self.device), "scale": scale.to(self.device)}

    def selection(self, top_k: int) -> Tensor:
        """[num_tokens, top_k] int32, random positions that each token may see, then -1."""
        selected = torch.full((self.num_tokens, top_k), -1, dtype=torch.int32)
        token = 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            for visible in range(seq_len - query_len + 1, seq_len + 1):
                chosen = torch.randperm(visible, generator=self.generator)[:top_k].sort().values
                selected[token, : chosen.numel()] = chosen.to(torch.int32)
                token += 1
        return selected.to(self.device)

    def paged(self) -> dict[str, Any]:
        """Block tables and lengths; the rows start at token 3 of their step."""
        starts = np.cumsum((3, *self.query_lens), dtype=np.int32)
        lens = np.array(self.seq_lens, dtype=np.int32)
        return {
            "block_tables": self.block_tables.to(self.device),
            "query_start_loc": torch.from_numpy(starts.copy()).to(self.device),
            "seq_lens": torch.from_numpy(lens.copy()).to(self.device),
            "query_start_loc_host": starts,
            "seq_lens_host": lens,
            "max_query_len": max(self.query_lens),
            "max_seq_len": max(self.seq_lens),
        }
