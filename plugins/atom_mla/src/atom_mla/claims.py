"""Which modules this plugin offers to own."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from functools import cache
from typing import Any

from torch import nn

from atom_core.errors import LayerError
from atom_core.plugin import Claim
from atom_mla.families import FAMILIES, REFUSED, Family
from atom_mla.layer import LatentLayer
from atom_mla.sparse import SparseLatentLayer

__all__ = ["claim_layer"]

_MODELS = "transformers.models."


def claim_layer(module: nn.Module, module_name: str, tp_size: int) -> Claim | None:
    """Claim a latent attention module: exactly when its class is known, generically when its code is.

    Args:
        module: the candidate.
        module_name: its dotted name, for messages.
        tp_size: ranks that share the model.

    Raises:
        LayerError: a known class that this plugin cannot run, or has something unknown in it.
    """
    if not hasattr(module, "kv_a_proj_with_mqa"):
        return None
    owner = _class_of_forward(type(module))
    key = _key(owner)
    if key is not None and key in REFUSED:
        raise LayerError(f"atom-mla cannot run {module_name} ({owner.__name__}): {REFUSED[key]}")
    known = None if key is None else FAMILIES.get(key)
    family = known or _family_of_equal_code(owner)
    if family is None:
        return None
    rotary_source = importlib.import_module(owner.__module__)
    layer_class = LatentLayer if family.index_rotary is None else SparseLatentLayer
    return Claim(layer_class(module, module_name, family, rotary_source, tp_size), exact=known is not None)


def _class_of_forward(cls: type[nn.Module]) -> type[nn.Module]:
    """The class whose forward an instance of `cls` runs: a subclass with its own forward is another class."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def _key(cls: type[nn.Module]) -> tuple[str, str] | None:
    if not cls.__module__.startswith(_MODELS):
        return None
    return cls.__module__.removeprefix(_MODELS).split(".")[0], cls.__name__


def _family_of_equal_code(cls: type[nn.Module]) -> Family | None:
    """The family of a known dense class whose forward and expansion are the same code, names aside."""
    code = _code(cls)
    if code is None:
        return None
    for (folder, name), family in FAMILIES.items():
        if family.index_rotary is None and code == _known_code(folder, name):
            return family
    return None


@cache
def _known_code(folder: str, name: str) -> str | None:
    try:
        modeling = importlib.import_module(f"{_MODELS}{folder}.modeling_{folder}")
    except ImportError:
        return None
    return _code(getattr(modeling, name))


def _code(cls: type[Any]) -> str | None:
    """What `forward`, `expand_kv` and the rotary functions do: source without annotations, decorators, docstrings."""
    functions = [inspect.unwrap(vars(cls)["forward"]), getattr(cls, "expand_kv", None)]
    scope = functions[0].__globals__ if hasattr(functions[0], "__globals__") else {}
    functions += [scope[name] for name in sorted(scope) if name.startswith(("apply_rotary", "rotate_half"))]
    try:
        return "\n".join(_stripped(inspect.getsource(inspect.unwrap(function))) for function in functions)
    except (OSError, TypeError, SyntaxError):
        return None


def _stripped(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.dump(tree)
