"""What a latent layer refuses: modules when they are claimed, calls when they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from atom_core.errors import LayerError
from atom_mla.families import Family, Gate

__all__ = ["check_call", "check_original"]

_CHILDREN = frozenset(
    {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
)
_GATE_CHILDREN = {Gate.NONE: set[str](), Gate.HEAD: {"g_proj"}, Gate.QUERY: {"q_gate_proj"}}
_WITHOUT_MEANING = frozenset({"use_cache", "output_attentions", "is_causal"})


def check_original(module: Any, module_name: str, family: Family, tp_size: int) -> None:
    """Refuse what the forward of a known class would not show: parts and shapes that were not there before."""
    what = f"{module_name} ({type(module).__name__})"
    if module.num_heads % tp_size:
        raise LayerError(f"{what} has {module.num_heads} heads, which {tp_size} ranks cannot share evenly")
    if tp_size > 1 and family.shares_names:
        raise LayerError(
            f"{what} cannot be sharded over {tp_size} ranks: the model's other mixers have the same module names, "
            "so no tensor-parallel plan can tell them apart; use one rank"
        )
    if module.num_key_value_groups != 1:
        raise LayerError(
            f"{what} has num_key_value_groups {module.num_key_value_groups}; latent attention expands one key per "
            "head, so num_key_value_heads must equal num_attention_heads"
        )
    children = {name for name, _ in module.named_children()}
    known = _CHILDREN | _GATE_CHILDREN[family.gate] | ({"indexer"} if family.index_rotary else set())
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    if children - known or parameters:
        raise LayerError(
            f"{what} has parts that its class is not known to have: {', '.join(sorted(children - known | parameters))}"
        )
    if module.kv_b_proj.bias is not None:
        raise LayerError(f"{what} has a bias in kv_b_proj, which the absorbed form cannot express")


def check_call(what: str, num_tokens: int, hidden_states: Tensor, keywords: Mapping[str, Any]) -> None:
    """Refuse hidden states that are not the step's tokens, and keywords that carry a value.

    Args:
        what: name and class of the layer, for messages.
        num_tokens: the step's.
        hidden_states: [1, num_tokens, hidden_size].
        keywords: what the layer has no parameter for; a mask and a cache are among them and must be `None`.

    Raises:
        LayerError: as said.
    """
    if hidden_states.dim() != 3 or hidden_states.shape[:2] != (1, num_tokens):
        raise LayerError(
            f"{what} got hidden states of shape {tuple(hidden_states.shape)}; "
            f"expected [1, {num_tokens}, hidden_size], the step's tokens"
        )
    unknown = [name for name, value in keywords.items() if value is not None and name not in _WITHOUT_MEANING]
    if unknown:
        raise LayerError(
            f"{what} got {', '.join(sorted(unknown))}, which atom-mla does not apply: a layer knows its own mask and "
            "cache, and no other keyword may carry a value"
        )
