"""The weight between a latent and its heads, used in both directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Expansion"]


class Expansion:
    """`kv_b_proj` as a dense tensor: expands latents, or is absorbed into queries and outputs.

    DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 and appendix C.

    Attributes:
        weight: [heads, nope_dim + value_dim, latent_dim], this rank's heads.
    """

    def __init__(
        self, projection: nn.Module, num_heads: int, nope_dim: int, latent_dim: int, dtype: torch.dtype
    ) -> None:
        """Take the projection's weight as it is, or make it dense where it is quantized.

        Args:
            projection: `kv_b_proj`, without bias; sharded over its output or not.
            num_heads: of this rank.
            nope_dim: of a head's key without its rotary part.
            latent_dim: `kv_lora_rank`.
            dtype: the model's.
        """
        weight = getattr(projection, "weight", None)
        if isinstance(projection, nn.Linear) and isinstance(weight, Tensor) and weight.dtype == dtype:
            dense = weight.to_local() if isinstance(weight, DTensor) else weight
        else:
            device = next(iter(projection.parameters())).device
            dense = projection(torch.eye(latent_dim, dtype=dtype, device=device)).T
        self.weight = dense.detach().reshape(num_heads, -1, latent_dim)
        self._nope_dim = nope_dim

    def absorb(self, query: Tensor) -> Tensor:
        """Turn queries that meet expanded keys into queries that meet latents.

        Args:
            query: [num_tokens, heads, nope_dim + rope_dim].

        Returns:
            [num_tokens, heads, latent_dim + rope_dim]
        """
        nope, rope = query[..., : self._nope_dim], query[..., self._nope_dim :]
        absorbed = _by_head(nope, self.weight[:, : self._nope_dim])
        return torch.cat((absorbed, rope), -1)

    def expand_output(self, attended: Tensor) -> Tensor:
        """Turn attention output over latents into output over values.

        Args:
            attended: [num_tokens, heads, latent_dim].

        Returns:
            [num_tokens, heads, value_dim]
        """
        return _by_head(attended, self.weight[:, self._nope_dim :].transpose(1, 2))


def _by_head(states: Tensor, weight: Tensor) -> Tensor:
    """[num_tokens, heads, out] from states [num_tokens, heads, in] and weight [heads, in, out]."""
    if torch.compiler.is_compiling() and states.shape[0] == 1:
        # Of one token, a sum of products: the compiler makes one kernel of it and of what stands beside it.
        return (states[0].float().unsqueeze(2) * weight.float()).sum(1)[None].to(states.dtype)
    return torch.bmm(states.transpose(0, 1), weight).transpose(0, 1)
