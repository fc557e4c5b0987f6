"""The state that a request keeps in every gated delta net layer, and the scratch memory of a step."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from atom_core.errors import ConfigError
from atom_core.plugin import TensorSpec
from atom_gdn.kernels.torch_cpu_chunks import SCRATCH_BYTES
from atom_gdn.layer import GatedDeltaNetLayer, HeadShape

__all__ = ["STATE_DTYPE_VARIABLE", "recurrent_dtype", "state_specs", "workspace_bytes"]

STATE_DTYPE_VARIABLE = "ATOM_GDN_STATE_DTYPE"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def recurrent_dtype(chosen: str | None) -> torch.dtype:
    """Return the dtype of the recurrent state: the one chosen, else the environment's, else float32.

    Args:
        chosen: `float32`, `bfloat16`, or `None` to ask the environment variable ATOM_GDN_STATE_DTYPE.

    Raises:
        ConfigError: another name.
    """
    name = chosen or os.environ.get(STATE_DTYPE_VARIABLE) or "float32"
    if name not in _DTYPES:
        source = "state_dtype of GdnPlugin" if chosen else f"the environment variable {STATE_DTYPE_VARIABLE}"
        raise ConfigError(f"{source} is {name!r}; plugin 'gdn' (atom-gdn) knows {' and '.join(_DTYPES)}")
    return _DTYPES[name]


def state_specs(layers: Sequence[GatedDeltaNetLayer], dtype: torch.dtype) -> list[TensorSpec]:
    """Declare a convolution state and a recurrent state per shape of layer.

    The convolution state has the dtype of the convolution's weights, which is that of the activations: what it holds
    are activations of past tokens.

    Args:
        layers: the plugin's layers.
        dtype: of the recurrent state.
    """
    alike: dict[tuple[HeadShape, torch.dtype], list[str]] = {}
    for layer in layers:
        alike.setdefault((layer.shape, layer.conv1d.weight.dtype), []).append(layer.module_name)
    specs = []
    for (shape, conv_dtype), names in alike.items():
        specs.append(TensorSpec("conv_state", (shape.taps - 1, shape.channels), conv_dtype, tuple(names)))
        recurrent = (shape.v_heads, shape.head_v, shape.head_k)
        specs.append(TensorSpec("recurrent_state", recurrent, dtype, tuple(names)))
    return specs


def workspace_bytes(layers: Sequence[GatedDeltaNetLayer], max_num_batched_tokens: int) -> int:
    """Scratch bytes of the widest layer in the largest step; layers run one after another.

    Per token the float32 inputs and result of the convolution beside its output, then the group of chunks that is
    solved at a time.
    """
    channels = max((layer.shape.channels for layer in layers), default=0)
    return max_num_batched_tokens * channels * 4 * 3 + SCRATCH_BYTES if channels else 0
