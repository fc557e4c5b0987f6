"""`mla.prefill` by cuDNN's attention, through torch, where it is the faster one: a long prompt that has the step alone.

cuDNN plans anew for every length, some 40 ms each (pytorch pull request 191576). So it takes whole multiples of
`_PLAN_TOKENS` of a single row, and the Triton kernel attends for the rest and for all other calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from atom_mla.kernels.triton_prefill import attend_chunks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["prefill"]

Host = np.ndarray[Any, Any]

_PLAN_TOKENS = 512
"""Lengths that cuDNN plans for are multiples of this."""
_LEAST_TOKENS = 2048
"""Shorter chunks are not worth a plan."""


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Host,
    max_query_len: int,
    scaling: float,
) -> Tensor:
    """Chunks attend causally to their own expanded keys and values; see `reference.prefill`."""
    num_tokens = query.shape[0]
    planned = num_tokens // _PLAN_TOKENS * _PLAN_TOKENS
    # A row as long as the batch is the whole batch: its first token is the batch's.
    if query_start_loc.shape[0] != 2 or max_query_len != num_tokens or num_tokens < _LEAST_TOKENS:
        return attend_chunks(query, key, value, query_start_loc, max_query_len, scaling)
    q, k, v = (tensor[:planned].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)[0].transpose(0, 1)
    if planned == num_tokens:
        return attended
    output = value.new_empty(value.shape)
    output[:planned] = attended
    return attend_chunks(query, key, value, query_start_loc, max_query_len, scaling, output=output, first_token=planned)
