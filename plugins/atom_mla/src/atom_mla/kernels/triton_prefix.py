# mypy: disallow-untyped-decorators=False
"""`mla.prefill_paged` in Triton: chunks over cached latents, prefix and chunk.

Latents are expanded in pieces that fit the scratch memory: gathered from their blocks, multiplied by the expansion,
then attended to by `triton_prefill`. Short chunks absorb the expansion instead, as decodes do: that costs more per
query and key and nothing per key.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_mla.kernels import LARGEST_PIECE_BYTES, triton_latent
from atom_mla.kernels.triton_prefill import Keys, PrefillTiles, State, launch

__all__ = ["prefill_paged"]

Host = np.ndarray[Any, Any]

_ALIGNMENT = 128
"""Segments begin at multiples of this many keys."""


def prefill_paged(
    query: Tensor,
    expansion: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_start_loc_host: Host,
    seq_lens_host: Host,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
) -> Tensor:
    """Chunks attend over cached latents, prefix and chunk; see `reference.prefill_paged`."""
    heads, expanded_dim, latent_dim = expansion.shape
    nope_dim = query.shape[-1] - (cache.shape[-1] - latent_dim)
    output = query.new_zeros(query.shape[0], heads, expanded_dim - nope_dim)
    query_lens = np.diff(query_start_loc_host)
    # Multiplications per key: absorbed, and expanded with the expansion itself.
    absorbs = query_lens * (2 * latent_dim - expanded_dim) <= latent_dim * expanded_dim
    edges = [0, *(np.flatnonzero(np.diff(absorbs)) + 1).tolist(), len(absorbs)]
    for first, last in pairwise(edges):
        start, stop = (query_start_loc_host[[first, last]] - query_start_loc_host[0]).tolist()
        if start == stop:
            continue
        own = slice(start, stop)
        lens_host = seq_lens_host[first:last]
        rows = (block_tables[first:last], query_start_loc[first : last + 1], seq_lens[first:last])
        longest = int(query_lens[first:last].max())
        if absorbs[first]:
            output[own] = _absorbed(query[own], expansion, cache, scale, *rows, longest, int(lens_host.max()), scaling)
        else:
            active = np.where(query_lens[first:last] > 0, lens_host, 0)
            _expanded(query[own], expansion, cache, scale, *rows, active, longest, scaling, output[own])
    return output


def _absorbed(
    query: Tensor,
    expansion: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scaling: float,
) -> Tensor:
    latent_dim = expansion.shape[2]
    nope_dim = query.shape[-1] - (cache.shape[-1] - latent_dim)
    by_head = torch.bmm(query[..., :nope_dim].transpose(0, 1), expansion[:, :nope_dim])
    absorbed = torch.cat((by_head.transpose(0, 1), query[..., nope_dim:]), -1)
    attended = triton_latent.attend_all(
        absorbed, cache, scale, block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len, scaling, latent_dim
    )
    return torch.bmm(attended.transpose(0, 1), expansion[:, nope_dim:].transpose(1, 2)).transpose(0, 1)


def _expanded(
    query: Tensor,
    expansion: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    seq_lens_host: Host,
    max_query_len: int,
    scaling: float,
    output: Tensor,
    tiles: PrefillTiles | None = None,
) -> None:
    heads, expanded_dim, latent_dim = expansion.shape
    nope_dim = query.shape[-1] - (cache.shape[-1] - latent_dim)
    room = LARGEST_PIECE_BYTES // (heads * expanded_dim * query.element_size()) // _ALIGNMENT * _ALIGNMENT
    pieces = _pieces(seq_lens_host, max(_ALIGNMENT, room))
    segments = torch.from_numpy(np.concatenate(pieces)).to(query.device)
    divided = any(first > 0 for piece in pieces for first in piece[:, 1].tolist())
    state = None
    if divided:
        state = State(
            torch.empty(query.shape[0], heads, output.shape[2], dtype=torch.float32, device=query.device),
            torch.empty(query.shape[0], heads, 2, dtype=torch.float32, device=query.device),
        )
    weight = expansion.flatten(0, 1).T
    number = 0
    for piece in pieces:
        own = segments[number : number + len(piece)]
        number += len(piece)
        latents = _gather(cache, scale, block_tables, own, piece, query.dtype)
        expanded = (latents[:, :latent_dim] @ weight).view(-1, heads, expanded_dim)
        rotary = latents[:, None, latent_dim:].expand(-1, heads, -1)
        keys = Keys(expanded[..., :nope_dim], rotary, expanded[..., nope_dim:])
        launch(query, keys, output, state, own, query_start_loc, seq_lens, max_query_len, 0, scaling, tiles)


def _pieces(seq_lens: Host, room: int) -> list[Host]:
    """Cut rows into pieces of at most `room` keys: [segments, 4] int32 each, as `_attend` reads them.

    A segment is a row, its first key, its number of keys, and where they begin in the piece.
    """
    pieces: list[Host] = []
    current: list[tuple[int, int, int, int]] = []
    used = 0
    for row, seq_len in enumerate(seq_lens.tolist()):
        first = 0
        while first < seq_len:
            if room - used < min(_ALIGNMENT, seq_len - first):
                pieces.append(np.array(current, dtype=np.int32))
                current, used = [], 0
            count = min(seq_len - first, (room - used) // _ALIGNMENT * _ALIGNMENT or room - used)
            current.append((row, first, count, used))
            used += -(-count // _ALIGNMENT) * _ALIGNMENT
            first += count
    if current:
        pieces.append(np.array(current, dtype=np.int32))
    return pieces


def _gather(
    cache: Tensor, scale: Tensor | None, block_tables: Tensor, segments: Tensor, piece: Host, dtype: torch.dtype
) -> Tensor:
    """The piece's latents, [keys, width]; keys between segments are not written."""
    width = cache.shape[2]
    latents = torch.empty(int(piece[-1, 2] + piece[-1, 3]), width, dtype=dtype, device=cache.device)
    tokens = 16
    _gather_segments[(triton.cdiv(int(piece[:, 2].max()), tokens), len(piece))](
        cache,
        segments if scale is None else scale,
        latents,
        block_tables,
        segments,
        cache.stride()[:2],
        1 if scale is None else scale.stride(0),
        block_tables.stride(0),
        TOKENS=tokens,
        BLOCK_SIZE=cache.shape[1],
        SIZE=width,
        WIDTH=triton.next_power_of_2(width),
        HAS_SCALE=scale is not None,
        num_warps=4,
    )
    return latents


@triton.jit(do_not_specialize=["table_stride"])
def _gather_segments(
    cache: tl.tensor,
    scale: tl.tensor,
    latents: tl.tensor,
    block_tables: tl.tensor,
    segments: tl.tensor,
    cache_strides: tl.tensor,
    scale_stride: tl.tensor,
    table_stride: tl.tensor,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    segments += tl.program_id(1) * 4
    row = tl.load(segments).to(tl.int64)
    first_key = tl.load(segments + 1)
    num_keys = tl.load(segments + 2)
    place = tl.load(segments + 3).to(tl.int64)
    numbers = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = numbers < num_keys
    keys = first_key + numbers
    blocks = tl.load(block_tables + row * table_stride + keys // BLOCK_SIZE, mask=present, other=0)
    offsets = blocks.to(tl.int64) * cache_strides[0] + keys % BLOCK_SIZE * cache_strides[1]
    columns = tl.arange(0, WIDTH)
    mask = present[:, None] & (columns < SIZE)[None, :]
    tile = tl.load(cache + offsets[:, None] + columns[None, :], mask=mask)
    if HAS_SCALE:
        offsets = blocks.to(tl.int64) * scale_stride + keys % BLOCK_SIZE
        tile = tile.to(tl.float32) * tl.load(scale + offsets, mask=present, other=0.0)[:, None]
    places = latents + (place + numbers)[:, None] * SIZE + columns[None, :]
    tl.store(places, tile.to(latents.dtype.element_ty), mask=mask)
