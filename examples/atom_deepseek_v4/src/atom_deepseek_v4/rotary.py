"""The rotation of DeepSeek-V4: pairs of neighbouring channels, in the last channels of a head."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate"]


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last `2 * pairs` channels by each token's angles; computed in float32 (`apply_rotary_pos_emb`).

    Args:
        states: [tokens, dim] or [tokens, heads, dim].
        cos: [tokens, pairs].
        sin: [tokens, pairs]; negated for the opposite rotation.
    """
    if states.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    split = states.shape[-1] - 2 * cos.shape[-1]
    even, odd = states[..., split::2].float(), states[..., split + 1 :: 2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((states[..., :split], rotated.to(states.dtype)), dim=-1)
