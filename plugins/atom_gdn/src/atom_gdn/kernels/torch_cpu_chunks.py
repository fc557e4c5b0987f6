"""The gated delta rule over chunks for the CPU: matrix products in place of a loop over tokens.

Rows are visited in the order of falling length: those which still have tokens are then always the first ones, a slice
rather than an index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom_gdn.kernels.torch_cpu import gates, read_states, repeat_heads, split_heads, write_states

__all__ = ["CHUNK_TOKENS", "SCRATCH_BYTES", "chunk_bytes", "chunk_delta_rule"]

CHUNK_TOKENS = 64
SCRATCH_BYTES = 32 << 20
"""Chunks are solved in groups of about this size."""


def chunk_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    beta_scale: float,
    recurrent_state: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: np.ndarray[Any, Any],
    state_read: Tensor,
    state_write: Tensor,
    max_query_len: int,
) -> None:
    """See `reference.chunk_delta_rule`; the chunkwise form of section 3.3 of arXiv 2412.06464.

    With G the sum of log decays from the chunk's start and S the state before the chunk, token i adds a rank-one
    update u_i k_i^T, where

        u_i = beta_i (v_i - exp(G_i) S k_i - sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j).

    This is one triangular system with two right sides, u = u_value - u_key S^T, solved for many chunks at once. What
    remains is one pass over the chunks of a row:

        o_i = exp(G_i) S q_i + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) u_j
        S  <- exp(G_last) S + sum_j exp(G_last - G_j) u_j k_j^T
    """
    start_loc = query_start_loc_host.astype(np.int64)
    waves = _Waves.cut(start_loc, min(CHUNK_TOKENS, max_query_len))
    if not waves.rows.size:
        return
    states = read_states(recurrent_state, state_read[torch.from_numpy(waves.rows)])
    group = max(1, SCRATCH_BYTES // chunk_bytes(waves.tokens.shape[1], *recurrent_state.shape[1:]))
    for first in range(0, len(waves.tokens), group):
        tokens = torch.from_numpy(waves.tokens[first : first + group])
        valid = torch.from_numpy(waves.valid[first : first + group])
        solved = _Solved.solve(
            split_heads(qkv[tokens].float(), recurrent_state),
            gates(a[tokens], b[tokens], a_log, dt_bias, beta_scale),
            valid,
        )
        for chunks, rows in waves.runs(first, first + len(tokens)):
            output = solved.advance(chunks, states[rows]).transpose(1, 2)
            keep = valid[chunks]
            out[tokens[chunks][keep]] = output[keep].to(out.dtype)
    last_tokens = torch.from_numpy(start_loc[waves.rows + 1] - 1)
    write_states(recurrent_state, state_write[last_tokens], states)


def chunk_bytes(chunk_tokens: int, v_heads: int, head_v: int, head_k: int) -> int:
    """Scratch bytes of one chunk: five matrices over its tokens, ten vectors of a head per token, in float32."""
    return 4 * chunk_tokens * v_heads * (5 * chunk_tokens + 5 * (head_v + head_k))


@dataclass(frozen=True)
class _Waves:
    """Rows cut into chunks; wave w holds the w-th chunk of every row that has one.

    Attributes:
        rows: [rows] rows with tokens, by falling number of chunks.
        starts: [waves + 1] each wave's first chunk.
        tokens: [chunks, chunk_tokens] tokens, wave after wave; past a row's end, its last token again.
        valid: [chunks, chunk_tokens] false past a row's end.
    """

    rows: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    tokens: np.ndarray[Any, Any]
    valid: np.ndarray[Any, Any]

    @classmethod
    def cut(cls, query_start_loc: np.ndarray[Any, Any], chunk_tokens: int) -> _Waves:
        """Cut the rows of [rows + 1] `query_start_loc`."""
        chunks = -(-np.diff(query_start_loc) // chunk_tokens)
        order = np.argsort(-chunks, kind="stable")
        rows = order[: np.count_nonzero(chunks)]
        waves = np.arange(chunks.max(initial=0))
        active = np.searchsorted(-chunks[rows], -waves, side="left")
        starts = np.concatenate([[0], np.cumsum(active)])
        wave = np.repeat(waves, active)
        row = rows[np.arange(wave.size) - starts[wave]]
        tokens = (query_start_loc[row] + wave * chunk_tokens)[:, None] + np.arange(chunk_tokens)
        ends = query_start_loc[row + 1][:, None]
        return cls(rows, starts, np.minimum(tokens, ends - 1), tokens < ends)

    def runs(self, first: int, last: int) -> Iterator[tuple[slice, slice]]:
        """For each wave in the chunks [first, last): its chunks, counted from `first`, and their rows in `rows`."""
        for wave_start, wave_end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            begin, end = max(first, wave_start), min(last, wave_end)
            if begin < end:
                yield slice(begin - first, end - first), slice(begin - wave_start, end - wave_start)


@dataclass(frozen=True)
class _Solved:
    """What can be computed of chunks before the states in front of them are known.

    Attributes:
        u_value: [chunks, v_heads, tokens, head_v].
        u_key: [chunks, v_heads, tokens, head_k].
        query: [chunks, v_heads, tokens, head_k], decayed since the chunk's start.
        key: [chunks, v_heads, tokens, head_k], decayed until the chunk's end.
        scores: [chunks, v_heads, tokens, tokens], decayed between the two tokens.
        decay: [chunks, v_heads, 1, 1], of the whole chunk.
    """

    u_value: Tensor
    u_key: Tensor
    query: Tensor
    key: Tensor
    scores: Tensor
    decay: Tensor

    @classmethod
    def solve(cls, heads: tuple[Tensor, Tensor, Tensor], gate: tuple[Tensor, Tensor], valid: Tensor) -> _Solved:
        """Solve the triangular systems.

        Args:
            heads: queries, keys and values, [chunks, tokens, heads, dim].
            gate: log decay and update strength, [chunks, tokens, v_heads].
            valid: [chunks, tokens]; other tokens neither decay nor update the state.
        """
        log_decay, beta = (part.masked_fill(~valid[..., None], 0.0).transpose(1, 2) for part in gate)
        query, key, value = (part.transpose(1, 2) for part in heads)
        repeats = value.shape[1] // key.shape[1]
        num_tokens = value.shape[2]

        total = log_decay.double().cumsum(-1)  # differences of long sums lose digits in float32
        future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        between = (total[..., :, None] - total[..., None, :]).float().masked_fill(future, -torch.inf).exp()
        since_start = total.float().exp()[..., None]
        until_end = (total[..., -1:] - total).float().exp()[..., None]

        system = repeat_heads(key @ key.mT, repeats) * between * beta[..., None]
        scores = repeat_heads(query @ key.mT, repeats) * between
        query, key = repeat_heads(query, repeats), repeat_heads(key, repeats)
        right_side = torch.cat([value, key * since_start], -1) * beta[..., None]
        solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        u_value, u_key = solved.split([value.shape[-1], key.shape[-1]], -1)
        return cls(u_value, u_key, query * since_start, key * until_end, scores, since_start[:, :, -1:])

    def advance(self, chunks: slice, state: Tensor) -> Tensor:
        """Take states over one chunk each, in place.

        Args:
            chunks: which chunks, of different rows.
            state: [rows, v_heads, head_v, head_k] in front of these chunks; after them on return.

        Returns:
            [rows, v_heads, tokens, head_v] outputs.
        """
        update = self.u_value[chunks] - self.u_key[chunks] @ state.mT
        output = self.query[chunks] @ state.mT + self.scores[chunks] @ update
        state.mul_(self.decay[chunks]).add_(update.mT @ self.key[chunks])
        return output
