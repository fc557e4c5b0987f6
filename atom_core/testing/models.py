"""Tiny models: configs shrunk, weights lively, and transformers' own answer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from atom_core.models.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["lively_model", "stock_logits", "stock_model", "tiny"]

Config = TypeVar("Config", bound="PreTrainedConfig")

_TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny(config_class: type[Config], **fields: Any) -> Config:
    """Make a config of a class of transformers with tiny sizes; give the fields that matter to your attention.

    Fields that the class does not have are left out of the tiny ones, never out of yours.
    """
    known = set(vars(config_class())) | set(getattr(config_class, "attribute_map", {}))
    made: Config = config_class(**{**{name: value for name, value in _TINY.items() if name in known}, **fields})
    if not hasattr(made, "max_position_embeddings"):
        # Some classes name no maximum length, though the config files of their checkpoints do.
        made.max_position_embeddings = _TINY["max_position_embeddings"]
    return made


@torch.no_grad()
def lively_model(config: PreTrainedConfig, seed: int = 0) -> nn.Module:
    """Build a float32 model whose weights are neither tiny nor constant, so that a wrong key shows in the output.

    The weights depend on `seed` alone; the global random state stays as it was.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), quiet():
        torch.default_generator.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
        embedded = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn_like(parameter)
            if parameter.ndim < 2:
                parameter.add_(0.2 * noise)
            elif id(parameter) in embedded:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = None
    made: nn.Module = model
    return made


def stock_model(model: nn.Module) -> nn.Module:
    """Copy a model for use as the oracle, with transformers' own eager attention."""
    stock: Any = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    return stock  # type: ignore[no-any-return]


@torch.inference_mode()
def stock_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    """Logits of one sequence in one forward without any cache, [num_tokens, vocab_size] float32."""
    device = next(model.parameters()).device
    logits: Tensor = model(torch.tensor([tokens], device=device), use_cache=False).logits[0]
    return logits.float()
