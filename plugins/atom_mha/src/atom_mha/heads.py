"""Heads: how many heads of which size a module has on this rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from atom_core.errors import LayerError

__all__ = ["Heads", "learn_heads"]

_SEPARATE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("Wq", "Wk", "Wv"))
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "att_proj", "qkv", "in_proj")
_HEAD_DIM_NAMES = ("head_dim", "attention_head_size", "head_size")


@dataclass(frozen=True)
class Heads:
    """Shapes of a module's queries, keys and values on this rank.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of a query and a key.
        v_head_dim: size of a value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int


def learn_heads(module: Any, module_name: str, model_config: Any, tp_size: int) -> Heads | None:
    """Learn shapes from the projections, and from the config where they leave them open.

    Args:
        module: the attention module, whole (not sharded), perhaps on `meta`.
        module_name: its dotted name.
        model_config: the model's config, used where the module has none of its own.
        tp_size: ranks that share the model.

    Returns:
        Shapes on this rank, or `None` for a module without query, key and value projections.

    Raises:
        LayerError: projections and config contradict each other, or heads cannot be divided among the ranks.
    """
    config = getattr(module, "config", model_config)
    separate = next((names for names in _SEPARATE if _width(module, names[0])), None)
    fused = next((name for name in _FUSED if _width(module, name)), None)
    if separate is not None:
        heads = _from_separate(module, separate, config)
        projection = separate[1]
    elif fused is not None:
        heads = _from_fused(module, fused, config)
        projection = fused
    else:
        return None
    if heads is None:
        return None
    if tp_size > 1 and _is_divided(f"{module_name}.{projection}", model_config):
        return _divide(heads, tp_size)
    return heads


def _width(module: Any, name: str) -> int | None:
    """Output features of a linear child (`nf` in GPT-2's Conv1D), whole."""
    child = module._modules.get(name)
    width = getattr(child, "out_features", None) or getattr(child, "nf", None)
    return width if isinstance(width, int) else None


def _from_separate(module: Any, names: tuple[str, str, str], config: Any) -> Heads | None:
    head_dim = _head_dim(module, config)
    q_width, k_width, v_width = (_width(module, name) for name in names)
    assert q_width is not None, "the caller found the query projection"
    if k_width is None:
        # A layer without keys of its own is handed those of an earlier layer.
        if not getattr(module, "is_kv_shared_layer", False):
            return None
        num_heads = q_width // head_dim
        return Heads(num_heads, num_heads // module.num_key_value_groups, head_dim, head_dim)
    num_kv_heads = _quotient(k_width, head_dim, names[1])
    groups = getattr(module, "num_key_value_groups", None)
    num_heads = num_kv_heads * groups if isinstance(groups, int) else _quotient(q_width, head_dim, names[0])
    v_head_dim = head_dim if v_width is None else _quotient(v_width, num_kv_heads, names[2])
    return Heads(num_heads, num_kv_heads, head_dim, v_head_dim)


def _from_fused(module: Any, name: str, config: Any) -> Heads:
    head_dim = _head_dim(module, config)
    width = _width(module, name)
    assert width is not None, "the caller found the projection"
    num_heads = config.num_attention_heads
    num_kv_heads = (_quotient(width, head_dim, name) - num_heads) // 2
    if num_kv_heads < 1 or (num_heads + 2 * num_kv_heads) * head_dim != width or num_heads % num_kv_heads:
        raise LayerError(
            f"{name} gives {width} features, which {num_heads} query heads of {head_dim} and an equal number of "
            "key and value heads do not add up to"
        )
    return Heads(num_heads, num_kv_heads, head_dim, head_dim)


def _head_dim(module: Any, config: Any) -> int:
    for name in _HEAD_DIM_NAMES:
        found = getattr(module, name, None)
        if isinstance(found, int):
            return found
    configured = getattr(config, "head_dim", None)
    return configured if isinstance(configured, int) else int(config.hidden_size // config.num_attention_heads)


def _quotient(width: int, size: int, name: str) -> int:
    if width % size:
        raise LayerError(f"{name} gives {width} features, which is no multiple of {size}")
    return width // size


def _is_divided(projection_name: str, model_config: Any) -> bool:
    """Whether the model's tensor-parallel plan leaves each rank only its share of a projection's output."""
    plan = getattr(model_config, "base_model_tp_plan", None) or {}
    for pattern, style in plan.items():
        expression = r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"[^.]+")
        if re.fullmatch(expression, projection_name):
            return str(style) in ("colwise", "packed_colwise")
    return False


def _divide(heads: Heads, tp_size: int) -> Heads:
    if heads.num_kv_heads % tp_size or heads.num_heads % tp_size:
        raise LayerError(
            f"{heads.num_heads} query heads and {heads.num_kv_heads} key heads cannot be divided among {tp_size} "
            "ranks; choose a tensor-parallel size that divides both"
        )
    return Heads(heads.num_heads // tp_size, heads.num_kv_heads // tp_size, heads.head_dim, heads.v_head_dim)
