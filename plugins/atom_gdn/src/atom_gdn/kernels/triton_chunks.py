# mypy: disallow-untyped-decorators=False
"""`gdn.chunk_delta_rule` in Triton: the chunkwise form of section 3.3 of arXiv 2412.06464, in two launches.

With G the sum of log decays from the chunk's start, S the state before the chunk and k, q of unit length, token i adds
a rank-one update u_i k_i^T to the state, where

    u_i = beta_i (v_i - exp(G_i) S k_i - sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j).

In matrices, U = T (V - diag(exp G) K S^T) with T = (I + A)^-1 diag(beta), the triangular matrix that arXiv 2406.06484
uses for the plain delta rule. `triton_chunk_systems` computes, for all chunks at once, what does not depend on the
state: T and the decayed scores of queries and keys. `triton_chunk_scan` then carries the states over the chunks of each
row, reading them from their slots and writing them there. All work per key channel happens on the inputs as they are;
norms, decays and the scale of queries are factors per token, applied to rows of products.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from atom_gdn.kernels.triton_chunk_scan import ScanTiles, scan
from atom_gdn.kernels.triton_chunk_systems import CHUNK_TOKENS, Solved, SystemTiles, solve
from atom_gdn.kernels.triton_parts import num_multiprocessors, num_places, unit_inner_stride

__all__ = ["ChunkTiles", "chunk_delta_rule"]


@dataclass(frozen=True)
class ChunkTiles:
    """How the work of both launches is cut; chosen by shape where `None`.

    Attributes:
        systems: of the systems.
        scan: of the scan.
    """

    systems: SystemTiles = field(default_factory=SystemTiles)
    scan: ScanTiles | None = None


def chunk_delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    beta_scale: float,
    recurrent_state: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_start_loc_host: np.ndarray[Any, Any],
    state_read: torch.Tensor,
    state_write: torch.Tensor,
    max_query_len: int,
    tiles: ChunkTiles | None = None,
) -> None:
    """See `reference.chunk_delta_rule`.

    Args:
        qkv: as there.
        a: as there.
        b: as there.
        a_log: as there.
        dt_bias: as there.
        beta_scale: as there.
        recurrent_state: as there.
        out: as there.
        query_start_loc: as there.
        query_start_loc_host: as there.
        state_read: as there.
        state_write: as there.
        max_query_len: as there.
        tiles: how to cut the work; chosen by shape when `None`.
    """
    num_rows, num_tokens = len(query_start_loc_host) - 1, int(query_start_loc_host[-1] - query_start_loc_host[0])
    if num_tokens == 0:
        return
    tiles = tiles or ChunkTiles()
    qkv, a, b = unit_inner_stride(qkv), unit_inner_stride(a), unit_inner_stride(b)
    v_heads, head_v, head_k = recurrent_state.shape[1:]
    k_heads = (qkv.shape[1] - v_heads * head_v) // (2 * head_k)
    multiprocessors = num_multiprocessors(qkv.device)
    scan_tiles = tiles.scan or ScanTiles.choose(qkv.dtype, head_v, v_heads * num_rows, multiprocessors)
    places = num_places(num_tokens, num_rows, CHUNK_TOKENS)
    solved = Solved.empty(qkv, places, v_heads, k_heads)

    solve(qkv, a, b, a_log, dt_bias, beta_scale, solved, head_k, query_start_loc, num_rows, places, tiles.systems)
    scan(qkv, solved, recurrent_state, out, query_start_loc, state_read, state_write, num_rows, scan_tiles)
