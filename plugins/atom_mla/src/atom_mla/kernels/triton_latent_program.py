# mypy: disallow-untyped-decorators=False
"""One program of `triton_latent`.

It takes a tile of query heads (times tokens) of one row and a stretch of its keys. A latent is loaded once and serves
as key and as value (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom_mla.kernels.triton_stretches import find_work, leave_part
from atom_mla.kernels.triton_tiles import MASKED_SCORE, load_columns

__all__ = ["attend"]


@triton.jit(do_not_specialize=["num_rows", "target", "top_k", "row_tiles", "table_stride"])
def attend(
    query: tl.tensor,
    factors: tl.tensor,
    chosen: tl.tensor,
    cache: tl.tensor,
    scale: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    score_factor: tl.tensor,
    num_rows: tl.tensor,
    target: tl.tensor,
    top_k: tl.tensor,
    row_tiles: tl.tensor,
    query_strides: tl.tensor,
    chosen_stride: tl.tensor,
    table_stride: tl.tensor,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    SELECTED: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    APART: tl.constexpr,
) -> None:
    """Attend with one tile of query rows to one stretch of keys, and write the output or leave a part."""
    item = tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) % row_tiles
    first_row = row_tile * TILE_ROWS
    row, token, num_tokens, num_keys, split, own_splits, part = find_work(
        item, query_start_loc, seq_lens, num_rows, target, top_k, ROWS, KEYS, SELECTED, MAY_SPLIT
    )
    if first_row >= num_tokens * HEADS:
        return
    num_tiles = tl.cdiv(num_keys, KEYS)
    begin = split * num_tiles // own_splits * KEYS
    end = tl.minimum((split + 1) * num_tiles // own_splits * KEYS, num_keys)

    rows = first_row + tl.arange(0, TILE_ROWS)
    tokens = rows // HEADS
    is_row = tokens < num_tokens
    last_key = end - 1
    if not SELECTED:
        last_key = tl.minimum(num_keys - num_tokens + tokens, end - 1)[:, None]
    query_start = query + token.to(tl.int64) * query_strides[0]
    query_rows = tokens * query_strides[0] + rows % HEADS * query_strides[1]
    q_latent = load_columns(query_start, query_rows, is_row, 0, LATENT, LATENT_WIDTH)
    q_rope = load_columns(query_start, query_rows, is_row, LATENT, ROPE, ROPE_WIDTH)
    row_factor = score_factor
    if HAS_FACTORS:
        row_factor *= tl.load(factors + token.to(tl.int64) * HEADS + rows, mask=is_row, other=0.0)[:, None]

    highest = tl.full([TILE_ROWS], MASKED_SCORE, tl.float32)
    totals = tl.zeros([TILE_ROWS, KEYS], tl.float32)
    attended = tl.zeros([TILE_ROWS, LATENT_WIDTH], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    chosen += token.to(tl.int64) * chosen_stride
    # Where a tile lies within a block, one number says where it is.
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % KEYS == 0 and not SELECTED
    slots = _slots(chosen, table, begin, end, KEYS, BLOCK_SIZE, SELECTED, ONE_BLOCK)
    # At least one tile, if of nothing: a loop that may not run keeps the assembler from overlapping its products.
    stop = tl.maximum(end, begin + 1)
    tl.assume(begin < stop)
    for tile in tl.range(begin, stop, KEYS):
        keys = tile + tl.arange(0, KEYS)
        # The next tile's blocks are asked for before this tile is used, so that nobody waits for the table.
        next_slots = _slots(chosen, table, tile + KEYS, end, KEYS, BLOCK_SIZE, SELECTED, ONE_BLOCK)
        latent, rope, scales, present = _load_tile(
            cache, scale, slots, keys < end, q_latent.dtype, KEYS, CACHE_STRIDE, LATENT, LATENT_WIDTH, ROPE, ROPE_WIDTH,
            HAS_SCALE, ONE_BLOCK,
        )  # fmt: skip
        latent_products = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        rope_products = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        # Scaled one by one: as a sum of products it would become a chain of them.
        products = latent_products * row_factor + rope_products * row_factor
        if HAS_SCALE:
            # A weight contains its value's scale, so that it multiplies the cached numbers; sums of weights do not.
            products = products * scales[None, :] + tl.log2(scales)[None, :]
        visible = present[None, :]
        if not SELECTED:
            visible = visible & (keys[None, :] <= last_key)
        if APART:
            # Always so. A branch hides from the compiler that products follow on products, where it would let every
            # four warps compute all scores; alone, it divides the scores of 64 rows among eight warps.
            weights = products
            fade = highest
            if tile < stop:
                weights, fade, highest, totals = _weigh(products, visible, scales, highest, totals, HAS_SCALE)
        else:
            weights, fade, highest, totals = _weigh(products, visible, scales, highest, totals, HAS_SCALE)
        attended = attended * fade[:, None]
        attended = tl.dot(weights.to(latent.dtype), latent, attended, input_precision="ieee")
        slots = next_slots

    total = tl.maximum(tl.sum(totals, axis=1), 1e-37)
    attended = attended / total[:, None]
    if own_splits > 1:
        lse = highest + tl.log2(total)
        first_place = (part * row_tiles + row_tile) * TILE_ROWS
        leave_part(partial, partial_lse, first_place, attended, lse, is_row, TILE_ROWS, LATENT, LATENT_WIDTH)
    else:
        # Rows of the output are query heads of tokens.
        columns = tl.arange(0, LATENT_WIDTH)
        places = output + (token.to(tl.int64) * HEADS + rows)[:, None] * LATENT + columns[None, :]
        tl.store(places, attended.to(output.dtype.element_ty), mask=is_row[:, None] & (columns < LATENT)[None, :])


@triton.jit
def _load_tile(
    cache: tl.tensor,
    scale: tl.tensor,
    slots: tl.tensor,
    before_end: tl.tensor,
    DTYPE: tl.constexpr,
    KEYS: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Latents [KEYS, LATENT_WIDTH] and rotary keys [KEYS, ROPE_WIDTH] as DTYPE, scales [KEYS], which keys are present.

    `slots` and ONE_BLOCK are as `_slots` has them. A cache has rows of CACHE_STRIDE numbers and no gaps.
    """
    present = before_end
    first_slot = tl.full([], 0, tl.int64)
    numbers = tl.arange(0, KEYS)
    if ONE_BLOCK:
        first_slot += slots
    else:
        present = slots >= 0
        numbers = slots.to(tl.int64)
    tile = cache + first_slot * CACHE_STRIDE
    latent = load_columns(tile, numbers * CACHE_STRIDE, present, 0, LATENT, LATENT_WIDTH).to(DTYPE)
    rope = load_columns(tile, numbers * CACHE_STRIDE, present, LATENT, ROPE, ROPE_WIDTH).to(DTYPE)
    scales = present
    if HAS_SCALE:
        scales = tl.load(scale + first_slot + numbers, mask=present, other=1.0)
    return latent, rope, scales, present


@triton.jit
def _weigh(
    products: tl.tensor,
    visible: tl.tensor,
    scales: tl.tensor,
    highest: tl.tensor,
    totals: tl.tensor,
    HAS_SCALE: tl.constexpr,
) -> tl.tensor:
    """One step of the online softmax: weights, what fades earlier ones, the new maximum and sums of weights."""
    scores = tl.where(visible, products, MASKED_SCORE)
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(highest - higher)
    if HAS_SCALE:
        totals = totals * fade[:, None] + weights * (1.0 / scales)[None, :]
    else:
        totals = totals * fade[:, None] + weights
    return weights, fade, higher, totals


@triton.jit
def _slots(
    chosen: tl.tensor,
    table: tl.tensor,
    tile: tl.tensor,
    end: tl.tensor,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SELECTED: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Slots of the KEYS keys from `tile` on, or of the selected tokens with these numbers; -1 from `end` on.

    With ONE_BLOCK the slot of the first one alone. A slot is `block * BLOCK_SIZE + offset`, below 2^31.
    """
    if ONE_BLOCK:
        slots = tl.load(table + tile // BLOCK_SIZE, mask=tile < end, other=0) * BLOCK_SIZE + tile % BLOCK_SIZE
    else:
        positions = tile + tl.arange(0, KEYS)
        present = positions < end
        if SELECTED:
            positions = tl.load(chosen + positions, mask=present, other=-1)
            present = positions >= 0
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=present, other=0)
        slots = tl.where(present, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
    return slots
