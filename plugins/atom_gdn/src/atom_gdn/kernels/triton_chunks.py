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

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from atom_gdn.kernels.triton_chunk_scan import ScanTiles, scan
from atom_gdn.kernels.triton_chunk_systems import CHUNK_TOKENS, Solved, SystemTiles, solve
from atom_gdn.kernels.triton_parts import num_multiprocessors, num_places, unit_inner_stride

__all__ = ["ChunkTiles", "chunk_delta_rule"]

_PARTS = (1, 1)
"""Relative sizes of the parts of a single row: while the states pass over one, the next one's systems are solved beside
it. More parts save a few percent of the device's time and cost the host twice what two do.
"""
_WORTHWHILE_CHUNKS = 192
"""Fewer chunks are not cut into parts, which would cost more launches than they save."""


@dataclass(frozen=True)
class ChunkTiles:
    """How the work of both launches is cut; chosen by shape where `None`.

    Attributes:
        systems: of the systems.
        scan: of the scan.
        parts: relative sizes of the parts that the chunks of a single row are cut into.
    """

    systems: SystemTiles = field(default_factory=SystemTiles)
    scan: ScanTiles | None = None
    parts: tuple[int, ...] | None = None


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

    programs = num_rows * v_heads * scan_tiles.cut(head_v)[1]
    worthwhile = num_rows == 1 and places >= _WORTHWHILE_CHUNKS and 2 * programs <= multiprocessors
    parts = tiles.parts or (_PARTS if worthwhile else (1,))
    whole = len(parts) == 1
    carried = solved.factors if whole else qkv.new_empty((1, v_heads, head_v, head_k), dtype=torch.float32)
    side = None if whole else _Side(qkv.device)
    ends = [places * part // sum(parts) for part in accumulate(parts)]
    for chunks in map(range, [0, *ends], ends):
        with side or nullcontext():
            solve(
                *(qkv, a, b, a_log, dt_bias, beta_scale, solved, head_k, query_start_loc, num_rows, chunks),
                tiles.systems,
            )
        if side:
            side.wait()
        scan(
            *(qkv, solved, recurrent_state, out, query_start_loc, state_read, state_write, num_rows, chunks, carried),
            scan_tiles,
        )


class _Side:
    """A second stream that starts behind what was launched so far; on the CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._context: Any = None

    def __enter__(self) -> None:
        self._context = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        self._context.__enter__()

    def __exit__(self, *failure: object) -> None:
        self._context.__exit__(*failure)

    def wait(self) -> None:
        """Let the current stream wait for the second one."""
        if self._stream:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
