"""`mha.prefill` by cuDNN's attention, through torch, where it is the faster one: long rows of equal length.

cuDNN plans anew for every shape, some 40 to 70 ms each (pytorch pull request 191576), its calls for several lengths at
once keep no plan in torch 2.11, and those with a plan for any length (TORCH_CUDNN_SDPA_AVOID_RECOMPILE) take 7% longer.
So it takes whole multiples of `_PLAN_TOKENS`, of rows as long as each other. The Triton kernel attends for the rest,
beside it, and for all other calls: short steps, uneven rows, sinks, soft-caps, masks that cut.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from atom_mha.kernels import triton_prefill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["prefill"]

_PLAN_TOKENS = 512
"""Lengths that cuDNN plans for are multiples of this."""
_LEAST_TOKENS = 2048
"""Shorter steps are not worth a plan."""
_DTYPES = (torch.bfloat16, torch.float16)


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scaling: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    scratch: dict[Any, Any],
) -> None:
    """Chunks without a cached prefix attend to their own keys; see `reference.prefill`."""
    rows = query_start_loc.shape[0] - 1
    # Rows as long as the batch together are all as long as the longest, and the first token is the batch's.
    even = rows * max_query_len == query.shape[0]
    causal = all(bound is None or bound >= max_query_len for bound in (window, chunk))
    plain = soft_cap is None and sinks is None and query.dtype in _DTYPES
    worthwhile = query.shape[0] >= _LEAST_TOKENS and max_query_len >= _PLAN_TOKENS
    planned = max_query_len // _PLAN_TOKENS * _PLAN_TOKENS if even and causal and plain and worthwhile else 0
    with _beside(query.device) if 0 < planned < max_query_len else nullcontext() as done:
        triton_prefill.prefill_from(
            planned, query, key, value, out, query_start_loc, max_query_len, scaling, window, chunk, soft_cap, sinks
        )
    if planned == 0:
        return
    q, k, v = (
        tensor.view(rows, max_query_len, *tensor.shape[1:])[:, :planned].transpose(1, 2)
        for tensor in (query, key, value)
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    attended = attended.transpose(1, 2)
    if done is None:
        _hand_over(attended.flatten(0, 1), out)
    else:
        out.view(rows, max_query_len, *out.shape[1:])[:, :planned].copy_(attended)
        done.wait()


@contextmanager
def _beside(device: torch.device) -> Iterator[torch.cuda.Event]:
    """Launch on a second stream, behind what was launched so far; the event is what the first one has to wait for."""
    side, done = torch.cuda.Stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield done
        done.record()


def _hand_over(attended: Tensor, out: Tensor) -> None:
    """Make `out` hold what torch returned, without a copy (4% of the time) where nobody else can see its memory."""
    alone = not out._is_view() and out.untyped_storage().nbytes() == out.nbytes
    if alone and attended.stride() == out.stride():
        out.set_(attended)  # type: ignore[call-overload]
    else:
        out.copy_(attended)
