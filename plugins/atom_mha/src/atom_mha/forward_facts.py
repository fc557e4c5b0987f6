"""ForwardFacts: what an attention class's forward does, read from its source.

Every attention class of transformers calls the attention interface in the same way. Whatever deviates from that
way (a keyword, a parameter, a use of the cache that is not known) is a reason to refuse the class, because a flat
batch over a paged cache could be silently wrong.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["ForwardFacts", "read_forward"]

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_CACHE_NAMES = frozenset({"cache", "past_key_values", "past_key_value", "layer_past", "cache_params"})
_KNOWN_CACHE_USES = frozenset({"update", "is_updated", "self_attention_cache", "cross_attention_cache"})
_KNOWN_PARAMETERS = _CACHE_NAMES | {
    "self",
    "hidden_states",
    "query",
    "q",
    "k",
    "v",
    "position_embeddings",
    "position_ids",
    "cache_position",
    "attention_mask",
    "attention_scaling",
    "use_cache",
    "output_attentions",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "shared_kv_states",
    "kwargs",
    "flash_attn_kwargs",
}
_KNOWN_KEYWORDS = frozenset({"scaling", "dropout", "attention_mask", "sliding_window", "softcap", "s_aux"}) | {
    "position_ids",
    "output_attentions",
    "use_cache",
}
_FOREIGN_KEYWORDS = frozenset({"is_causal", "cu_seq_lens_q"})
_CROSS_PARAMETERS = frozenset({"key_value_states", "cross_attention_states"})
_KNOWN_EAGER_ATTRIBUTES = frozenset({"num_key_value_groups", "head_dim", "training", "sinks"})


@dataclass(frozen=True)
class ForwardFacts:
    """What was read.

    Attributes:
        parameters: names of forward's parameters.
        keywords: keywords that forward passes to the attention interface.
        foreign: the class is not causal self attention; nothing to claim.
        cross_capable: forward takes another sequence's hidden states.
        deviations: each one a reason to refuse the class.
    """

    parameters: frozenset[str]
    keywords: frozenset[str]
    foreign: bool
    cross_capable: bool
    deviations: tuple[str, ...]


@cache
def read_forward(cls: type[Any]) -> ForwardFacts | None:
    """Read a class's forward.

    Returns:
        The facts, or `None` for a class that does not call transformers' attention interface.
    """
    forward = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    if code is None or _INTERFACE not in code.co_names:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        empty: frozenset[str] = frozenset()
        return ForwardFacts(empty, empty, False, False, ("the source of its forward cannot be read",))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef), f"forward of {cls.__name__} is not a function"
    return _read(function, forward)


def _read(function: ast.FunctionDef, forward: Callable[..., Any]) -> ForwardFacts:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.kwarg]
    parameters = frozenset(argument.arg for argument in named if argument is not None)
    calls = _interface_calls(function)
    keywords = frozenset(keyword.arg for call in calls for keyword in call.keywords if keyword.arg)
    deviations: list[str] = []
    if len(calls) != 1:
        deviations.append(f"it calls the attention interface in {len(calls)} places, expected one")
    deviations += [f"it takes {name!r}" for name in sorted(parameters - _KNOWN_PARAMETERS)]
    deviations += [f"it passes {name!r} to the attention interface" for name in sorted(keywords - _KNOWN_KEYWORDS)]
    deviations += _mask_deviations(function, calls)
    deviations += _cache_deviations(function)
    deviations += _eager_deviations(forward, keywords)
    if any(isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.arange" for node in ast.walk(function)):
        deviations.append("it counts positions itself, which is wrong in a flat batch")
    masks = [_mask_argument(call) for call in calls]
    return ForwardFacts(
        parameters=parameters,
        keywords=keywords,
        foreign=bool(_FOREIGN_KEYWORDS & keywords) or (bool(masks) and all(mask == "None" for mask in masks)),
        cross_capable=bool((_CROSS_PARAMETERS | {"encoder_hidden_states"}) & parameters),
        deviations=tuple(deviations),
    )


def _interface_calls(function: ast.FunctionDef) -> list[ast.Call]:
    """Calls of whatever local name was assigned from `ALL_ATTENTION_FUNCTIONS`."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _names(node.value, _INTERFACE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def _names(tree: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def _mask_argument(call: ast.Call) -> str:
    for keyword in call.keywords:
        if keyword.arg == "attention_mask":
            return ast.unparse(keyword.value)
    return ast.unparse(call.args[4]) if len(call.args) > 4 else "None"


def _mask_deviations(function: ast.FunctionDef, calls: list[ast.Call]) -> Iterator[str]:
    """The mask must reach the interface as the model built it."""
    for call in calls:
        argument = _mask_argument(call)
        if argument != "attention_mask":
            yield f"it passes {argument!r} as the mask instead of the model's"
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_names(target, "attention_mask") for target in targets) and (
                ast.unparse(node.value) != "encoder_attention_mask"
            ):
                yield f"it changes the mask ({ast.unparse(node)[:80]})"


def _cache_deviations(function: ast.FunctionDef) -> Iterator[str]:
    """The cache may be updated with keys and values, compared, renamed; anything else reads state."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _CACHE_NAMES:
            if node.attr not in _KNOWN_CACHE_USES:
                yield f"it reads {node.attr!r} of the cache"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) != "isinstance":
            passed = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(value, ast.Name) and value.id in _CACHE_NAMES for value in passed):
                yield f"it hands the cache to {ast.unparse(node.func)!r}"


def _eager_deviations(forward: Callable[..., Any], keywords: frozenset[str]) -> Iterator[str]:
    """The file's eager attention must not read from the module what the call does not pass."""
    eager = forward.__globals__.get("eager_attention_forward")
    if eager is None:
        return
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(eager)))).body[0]
    except (OSError, SyntaxError):
        return
    assert isinstance(function, ast.FunctionDef), "eager_attention_forward is not a function"
    module_name = function.args.args[0].arg
    read = {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module_name
    }
    known = _KNOWN_EAGER_ATTRIBUTES if "s_aux" in keywords else _KNOWN_EAGER_ATTRIBUTES - {"sinks"}
    yield from (f"its eager attention reads {name!r} of the module" for name in sorted(read - known))
