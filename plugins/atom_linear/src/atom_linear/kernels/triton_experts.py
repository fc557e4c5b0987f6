# mypy: disallow-untyped-decorators=False
"""`core.expert_rows` in Triton: each expert's weight is read once, by the programs of the first row that chose it.

There is a program for every row and stretch of the output. It looks through the experts of all rows: if an earlier row
has its expert it ends, else it computes this row and all later ones of the same expert. So nothing is sorted, and what
is launched does not depend on who chose whom.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom_linear.kernels.early import can_start_early

__all__ = ["ExpertTiles", "choose_tiles", "expert_rows", "launch"]

_ROWS = 16
_MANY_PROGRAMS = 512


@dataclass(frozen=True)
class ExpertTiles:
    """How the work is cut.

    Attributes:
        out: columns of the output of a program.
        columns: of the weight, taken at a time.
        num_warps: warps of a program.
        num_stages: tiles in flight, and one.
    """

    out: int
    columns: int = 128
    num_warps: int = 4
    num_stages: int = 4


def choose_tiles(num_pairs: int, out_features: int) -> ExpertTiles:
    """Choose by measured shapes: wide tiles where they leave enough programs to keep the memory busy."""
    return ExpertTiles(64 if num_pairs * out_features >= 64 * _MANY_PROGRAMS else 32)


@torch.library.custom_op(
    "atom_linear::expert_rows", mutates_args=(), schema="(Tensor states, Tensor weight, Tensor experts) -> Tensor"
)
def expert_rows(states: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return rows times the weights of their experts; see the op's reference.

    Args:
        states: [rows, in_features].
        weight: [num_experts, out_features, in_features], of any strides.
        experts: [pairs], a multiple of the rows.

    Returns:
        [pairs, out_features], in the dtype of `states`.
    """
    out = states.new_empty((experts.shape[0], weight.shape[1]))
    if experts.shape[0]:
        launch(states.contiguous(), weight, experts.contiguous(), out, choose_tiles(*out.shape))
    return out


def launch(
    states: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, out: torch.Tensor, tiles: ExpertTiles
) -> None:
    """Fill `out`; arguments as of `expert_rows`, contiguous but for the weight."""
    num_pairs, (num_experts, out_features, in_features) = experts.shape[0], weight.shape
    early = can_start_early(states.device)
    _expert_rows[(triton.cdiv(out_features, tiles.out), num_pairs)](
        states,
        weight,
        experts,
        out,
        num_pairs,
        num_experts,
        out_features,
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        SHARE=num_pairs // states.shape[0],
        IN_FEATURES=in_features,
        PAIRS=max(_ROWS, triton.next_power_of_2(num_pairs)),
        ROWS=_ROWS,
        OUT=tiles.out,
        COLUMNS=tiles.columns,
        EXACT=states.dtype == torch.float32,
        EARLY=early,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **({"launch_pdl": True} if early else {}),
    )


@expert_rows.register_fake
def _fake_rows(states: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """What comes out, without computing it."""
    return states.new_empty((experts.shape[0], weight.shape[1]))


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_rows(
    states: tl.tensor,
    weight: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    out_features: tl.tensor,
    expert_stride: tl.tensor,
    out_stride: tl.tensor,
    in_stride: tl.tensor,
    SHARE: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = tl.load(experts + pair)
    places = tl.arange(0, PAIRS)
    chosen = tl.load(experts + places, mask=places < num_pairs, other=-1)
    mine = (chosen == expert) & (places < num_pairs)
    if tl.min(tl.where(mine, places, PAIRS), 0) < pair:
        return
    count = tl.sum(mine.to(tl.int32), 0)
    ranks = tl.cumsum(mine.to(tl.int32), 0) - 1
    outs = tl.program_id(0) * OUT + tl.arange(0, OUT)
    is_out = (outs < out_features) & (expert >= 0) & (expert < num_experts)
    expert = tl.minimum(tl.maximum(expert, 0), num_experts - 1).to(tl.int64)
    starts = weight + expert * expert_stride + outs.to(tl.int64) * out_stride
    first = 0
    while first < count:
        wanted = first + tl.arange(0, ROWS)
        is_row = wanted < count
        found = mine[None, :] & (ranks[None, :] == wanted[:, None])
        rows = tl.sum(tl.where(found, places[None, :], 0), 1).to(tl.int64)
        sources = states + rows // SHARE * IN_FEATURES
        total = tl.zeros([ROWS, OUT], tl.float32)
        for column in range(0, IN_FEATURES, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            inside = columns < IN_FEATURES
            row = tl.load(sources[:, None] + columns[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
            factors = tl.load(
                starts[None, :] + columns[:, None] * in_stride, mask=is_out[None, :] & inside[:, None], other=0.0
            )
            total = tl.dot(row, factors, total, input_precision="ieee" if EXACT else None)
        places_out = out + rows[:, None] * out_features + outs[None, :]
        tl.store(places_out, total.to(out.dtype.element_ty), mask=is_row[:, None] & (outs < out_features)[None, :])
        first += ROWS
