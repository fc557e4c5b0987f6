"""What the twins have in common: Qwen2 attention modules taken over, with attention of their own and a dense oracle.

The twins replace rotary embedding by a bias that falls with distance, so that their oracle is a few lines: a copy of
the model with a plain module that sees the whole sequence at once.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from atom_core import hookimpl
from atom_core.plugin import AttentionLayer, Claim, LayoutPlugin, PluginInfo
from atom_core.testing import AttentionConformance, tiny

HEADS, KV_HEADS, DIM = 6, 2, 8
WINDOW = 6


def slopes() -> Tensor:
    """[heads] what a key's score loses per token of distance."""
    return torch.linspace(0.05, 0.4, HEADS)


class TwinLayer(AttentionLayer, nn.Module):
    """Takes over the projections."""

    plugin_name: str

    def __init__(self, original: nn.Module, tp_size: int = 1) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, getattr(original, name))
        self.num_kv_heads = self.share(KV_HEADS, tp_size)

    def share(self, num_heads: int, tp_size: int) -> int:
        """Heads of one rank; a head that cannot be divided is on every rank."""
        return num_heads // tp_size if num_heads % tp_size == 0 else num_heads

    @property
    def metadata(self):
        return self.step.metadata[self.plugin_name]

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [tokens, heads, dim], keys and values [tokens, kv heads, dim]."""
        return (
            self.q_proj(hidden).view(-1, HEADS, DIM),
            self.k_proj(hidden).view(-1, KV_HEADS, DIM),
            self.v_proj(hidden).view(-1, KV_HEADS, DIM),
        )

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        output = hidden_states.new_zeros(hidden_states.shape[1], HEADS * DIM)
        self.attend(hidden_states[0], output)
        return self.o_proj(output)[None], None

    def attend(self, hidden: Tensor, output: Tensor) -> None:
        """Fill the rows of the output that belong to requests."""
        raise NotImplementedError


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, key_positions: Tensor, visible: Tensor, sinks: Tensor
) -> Tensor:
    """Attention with a bias that falls with distance, and one sink logit per head; [tokens, heads * dim]."""
    groups, dtype = HEADS // KV_HEADS, query.dtype
    query, key, value = query.float(), key.float(), value.float()
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * DIM**-0.5
    scores = scores - slopes()[:, None, None] * (positions[:, None] - key_positions)
    scores = torch.cat([scores.masked_fill(~visible, -torch.inf), sinks[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :-1], value).flatten(1).to(dtype)


class TwinPlugin(LayoutPlugin):
    """A plugin of one layer class; claims the Qwen2 attention modules that `owns` accepts."""

    layer: type[TwinLayer]
    stateful = False

    def layer_classes(self):
        return (self.layer,)

    @hookimpl
    def atom_plugin_info(self):
        return PluginInfo(self.name, "for tests of the conformance kit", contract_version=1)

    @hookimpl
    def atom_model_types(self):
        return {self.name: ("qwen2",) if self.stateful else ()}

    @hookimpl
    def atom_claim_layer(self, module, module_name, model_config, tp_size):
        if type(module).__name__ != "Qwen2Attention" or not self.owns(module):
            return None
        return Claim(self.layer(module, tp_size), exact=self.exact(module))

    def owns(self, module) -> bool:
        return module.sliding_window is None

    def exact(self, module) -> bool:
        return True

    @hookimpl
    def atom_build_metadata(self, layers, batch):
        return {self.name: self.build(batch)} if self._own(layers) else {}

    def build(self, batch):
        return None


class TwinConformance(AttentionConformance):
    """The kit on a twin: two layers, and an oracle of plain modules."""

    plugin: TwinPlugin
    max_tokens = 40
    layer_types = ("full_attention", "full_attention")
    dense: dict[str, type[nn.Module]]

    @classmethod
    def configs(cls):
        from transformers import Qwen2Config

        return {
            "tiny": tiny(
                Qwen2Config,
                num_attention_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                hidden_size=HEADS * DIM,
                layer_types=list(cls.layer_types),
                use_sliding_window=True,
                sliding_window=WINDOW,
            )
        }

    def oracle(self, model):
        whole = copy.deepcopy(model)
        for layer, kind in zip(whole.model.layers, self.layer_types, strict=True):
            layer.self_attn = DENSE[kind if kind == "sliding_attention" else self.plugin.name](layer.self_attn)
        return whole


DENSE: dict[str, type[nn.Module]] = {}
"""By plugin's name, the module that sees the whole sequence."""


class Dense(nn.Module):
    """The same for one whole sequence, with nothing kept between calls."""

    project = TwinLayer.project

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, getattr(original, name))

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return self.o_proj(self.whole(hidden_states[0]))[None], None

    def whole(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError
