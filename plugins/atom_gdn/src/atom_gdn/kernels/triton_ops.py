"""The `gdn.*` ops in Triton, with the ops' signatures; importable where Triton is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = ["causal_conv", "chunk_delta_rule", "decode"]


def causal_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: np.ndarray[Any, Any],
    state_read: Tensor,
    state_write: Tensor,
    max_query_len: int,
) -> None:
    """Convolve each channel of each row causally; see `reference.causal_conv`."""
    from atom_gdn.kernels import triton_conv

    triton_conv.causal_conv(
        x,
        weight,
        conv_state,
        out,
        query_start_loc,
        query_start_loc_host,
        state_read,
        state_write,
        max_query_len,
    )


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
    """Run the gated delta rule over chunks of any length; see `reference.chunk_delta_rule`."""
    from atom_gdn.kernels import triton_chunks

    triton_chunks.chunk_delta_rule(
        qkv,
        a,
        b,
        a_log,
        dt_bias,
        beta_scale,
        recurrent_state,
        out,
        query_start_loc,
        query_start_loc_host,
        state_read,
        state_write,
        max_query_len,
    )


def decode(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    beta_scale: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    max_query_len: int,
) -> None:
    """Run convolution and delta rule over rows of a few tokens; see `reference.decode`."""
    from atom_gdn.kernels import triton_decode

    triton_decode.decode(
        qkv,
        a,
        b,
        weight,
        a_log,
        dt_bias,
        beta_scale,
        conv_state,
        recurrent_state,
        out,
        query_start_loc,
        state_read,
        state_write,
        max_query_len,
    )
