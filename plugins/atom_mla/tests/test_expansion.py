"""The absorbed form equals the expanded one, from plain and from quantized weights."""

import pytest
import torch
from torch import nn

from atom_mla.expansion import Expansion

HEADS, NOPE, ROPE, VALUE, LATENT = 3, 8, 4, 6, 16


class Packed(nn.Module):
    """A quantized projection: no dense weight to look at."""

    def __init__(self, weight):
        super().__init__()
        self.halves = nn.ParameterList([nn.Parameter(weight / 2), nn.Parameter(weight / 2)])

    def forward(self, latent):
        return latent @ (self.halves[0] + self.halves[1]).T


@pytest.mark.parametrize("quantized", [False, True])
def test_absorbing_equals_expanding(quantized):
    torch.manual_seed(0)
    linear = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
    projection = Packed(linear.weight.detach()) if quantized else linear
    with torch.inference_mode():
        expansion = Expansion(projection, HEADS, NOPE, LATENT, torch.float32)
        query, latent, rotary = torch.randn(5, HEADS, NOPE + ROPE), torch.randn(7, LATENT), torch.randn(7, ROPE)
        key_nope, value = projection(latent).view(7, HEADS, -1).split((NOPE, VALUE), -1)
        key = torch.cat((key_nope, rotary[:, None].expand(-1, HEADS, -1)), -1)
        expanded_scores = torch.einsum("qhd,khd->hqk", query, key)
        absorbed_scores = torch.einsum("qhd,kd->hqk", expansion.absorb(query), torch.cat((latent, rotary), -1))
        torch.testing.assert_close(absorbed_scores, expanded_scores)
        weights = expanded_scores.softmax(-1)
        outputs = torch.einsum("hqk,khd->qhd", weights, value)
        torch.testing.assert_close(
            expansion.expand_output(torch.einsum("hqk,kd->qhd", weights, latent)), outputs, atol=1e-5, rtol=1e-5
        )


def test_a_plain_weight_is_not_copied():
    linear = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
    expansion = Expansion(linear, HEADS, NOPE, LATENT, torch.float32)
    assert expansion.weight.data_ptr() == linear.weight.data_ptr()
