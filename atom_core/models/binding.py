"""Claim a model's attention layers, check that none is left out, and bind them to a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from atom_core.errors import ClaimError, EngineError, LayerError
from atom_core.plugin import KEYWORDS_WITHOUT_MEANING, AttentionLayer, Step
from atom_core.plugin.known_layers import distribution_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from atom_core.plugin.registry import PluginRegistry

__all__ = [
    "ATTENTION_NAME",
    "ClaimedLayers",
    "LayerProbe",
    "bind_layers",
    "claim_layers",
    "decoder_layers",
    "register_attention_interface",
]

ATTENTION_NAME = "atom"
"""Name under which transformers finds the core's attention function."""

_CACHE_PARAMETERS = frozenset({"cache", "cache_params", "layer_past", "past_key_value", "past_key_values"})


@dataclass(frozen=True)
class ClaimedLayers:
    """The layers of one model, in the order of its modules.

    Attributes:
        layers: every claimed layer; `module_name` is set.
        modules: by module name, the claimed module.
        owners: by module name, the owning plugin's name.
        warnings: what the user should know about who owns what.
    """

    layers: tuple[AttentionLayer, ...]
    modules: dict[str, nn.Module]
    owners: dict[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def replaced(self) -> frozenset[str]:
        """Names of the modules that a layer replaces, rather than serves through the attention interface."""
        return frozenset(layer.module_name for layer in self.layers if isinstance(layer, nn.Module))


def register_attention_interface(wrapped: Callable[[Any], Any] = lambda function: function) -> None:
    """Make transformers call the bound layers for models whose attention implementation is `atom`.

    No mask function goes with it: transformers then builds no mask, and the layers know theirs.

    Args:
        wrapped: what to make of the function that dispatches.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, wrapped(_attend))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Dispatch a call of transformers' attention interface to the layer that is bound to the module.

    Args:
        module: the attention module.
        query: [1, heads, num_tokens, dim].
        key: [1, kv_heads, num_tokens, dim].
        value: [1, kv_heads, num_tokens, value_dim].
        attention_mask: must be `None`; the layer knows its mask.
        scaling: factor of the scores; 1 / sqrt(dim) when `None`.
        dropout: must be 0.
        keywords: whatever else the module passes.

    Returns:
        [1, num_tokens, heads, value_dim], and no attention weights.

    Raises:
        LayerError: the call has something that the layer does not know.
    """
    layer = module.__dict__.get("_atom_layer")
    if layer is None:
        raise LayerError(f"{type(module).__name__} calls the attention interface but was not claimed")
    if attention_mask is not None or dropout:
        raise LayerError(
            f"{layer.module_name} ({type(module).__name__}) passed an attention mask or dropout {dropout}; "
            "a layer applies only the mask it learned when it was claimed"
        )
    num_tokens = layer.step.batch.num_tokens
    if query.shape[0] != 1 or query.shape[2] != num_tokens or key.shape[2] != num_tokens:
        raise LayerError(
            f"{layer.module_name} ({type(module).__name__}) passed queries {tuple(query.shape)} and keys "
            f"{tuple(key.shape)}; expected [1, heads, {num_tokens}, dim], the step's tokens"
        )
    known = {}
    for name, argument in keywords.items():
        if name in layer.known_keywords:
            known[name] = argument
        elif argument is not None and name not in KEYWORDS_WITHOUT_MEANING:
            raise LayerError(
                f"{layer.module_name} ({type(module).__name__}) passed {name!r} to the attention interface, which "
                f"{type(layer).__name__} does not know; it knows {', '.join(sorted(layer.known_keywords)) or 'none'}"
            )
    output = layer.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        **known,
    )
    return output.unsqueeze(0), None


def claim_layers(
    model: nn.Module, registry: PluginRegistry, model_config: PreTrainedConfig, tp_size: int
) -> ClaimedLayers:
    """Ask the plugins for every module of the model, parents first, and check that nothing is left out.

    Args:
        model: the model, with or without weights.
        registry: the plugins.
        model_config: the model's text config.
        tp_size: ranks that share the model.

    Raises:
        ClaimError: two plugins claim a module, or a module that needs an owner has none.
        LayerError: a plugin's module has something that it cannot express.
    """
    layers: list[AttentionLayer] = []
    modules: dict[str, nn.Module] = {}
    owners: dict[str, str] = {}
    warnings: dict[str, None] = {}
    for name, module in _outside_claimed(model, modules):
        claimed = registry.claim_layer(module, name, model_config, tp_size)
        if claimed is None:
            continue
        owner, claim = claimed
        claim.layer.module_name = name
        _check_compiled(claim.layer)
        layers.append(claim.layer)
        modules[name] = module
        owners[name] = owner
        warning = None if claim.exact else registry.not_dedicated(type(module).__name__, owner)
        if warning:
            warnings[warning] = None
    _checkdecoder_layers(model, registry, model_config, modules)
    _check_recurrent_modules(model, registry, modules)
    return ClaimedLayers(tuple(layers), modules, owners, tuple(warnings))


def _check_compiled(layer: AttentionLayer) -> None:
    for method in layer.compiled:
        if not callable(getattr(type(layer), method, None)):
            raise LayerError(
                f"{layer.module_name}: {type(layer).__name__} names {method!r} in `compiled`, but has no such method"
            )


def bind_layers(model: nn.Module, claimed: ClaimedLayers, step: Step) -> None:
    """Put the claimed layers into the model: as replacements, or behind the attention interface.

    Args:
        model: the model that was claimed.
        claimed: what `claim_layers` returned for it.
        step: the runner's step.
    """
    for layer in claimed.layers:
        layer.step = step
        module = claimed.modules[layer.module_name]
        if isinstance(layer, nn.Module):
            parent_name, _, attribute = layer.module_name.rpartition(".")
            parent = model.get_submodule(parent_name)
            parent._modules[attribute] = layer
        else:
            module.__dict__["_atom_layer"] = layer


class LayerProbe:
    """Counts, during one step, how often each layer runs.

    Use as a context manager around the first step; on a clean exit it checks that each ran exactly once.

    Raises:
        EngineError: at exit, a layer did not run exactly once.
    """

    def __init__(self, claimed: ClaimedLayers) -> None:
        self._claimed = claimed
        self._counts: dict[str, int] = dict.fromkeys(claimed.owners, 0)
        self._handles: list[Any] = []

    def __enter__(self) -> LayerProbe:
        for layer in self._claimed.layers:
            counted = layer if isinstance(layer, nn.Module) else self._claimed.modules[layer.module_name]
            self._handles.append(counted.register_forward_hook(self._counter(layer.module_name)))
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        wrong = {name: count for name, count in self._counts.items() if count != 1}
        if exception_type is None and wrong:
            shown = ", ".join(f"{name} ({self._claimed.owners[name]}): {count}" for name, count in wrong.items())
            raise EngineError(f"in a first step every claimed layer must run exactly once; runs found: {shown}")

    def _counter(self, name: str) -> Any:
        def count(*_: object) -> None:
            self._counts[name] += 1

        return count


def _outside_claimed(model: nn.Module, claimed: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Walk parents first, not descending into modules that are claimed on the way."""
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        if name:
            yield name, module
            if name in claimed:
                continue
        children = [
            (f"{name}.{child_name}" if name else child_name, child) for child_name, child in module.named_children()
        ]
        stack.extend(reversed(children))


def decoder_layers(
    model: nn.Module, model_config: PreTrainedConfig, claimed: dict[str, nn.Module]
) -> list[tuple[str, nn.Module]]:
    """Return the decoder layers: children of the outermost module lists that hold claimed modules.

    Where nothing is claimed, the first list that is as long as the config says.

    Raises:
        ClaimError: there is no such list.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    holding = [name for name in lists if any(owned.startswith(name + ".") for owned in claimed)]
    outermost = [name for name in holding if not any(name.startswith(other + ".") for other in holding)]
    expected = model_config.num_hidden_layers
    found = outermost or [name for name, module in lists.items() if len(module) == expected][:1]
    if not found:
        raise ClaimError(
            f"{type(model).__name__} has no list of {expected} decoder layers (config.num_hidden_layers), so it cannot "
            "be proved that every layer has an owner"
        )
    return [(f"{name}.{index}", child) for name in found for index, child in enumerate(lists[name])]


def _checkdecoder_layers(
    model: nn.Module, registry: PluginRegistry, model_config: PreTrainedConfig, claimed: dict[str, nn.Module]
) -> None:
    for layer_name, layer in decoder_layers(model, model_config, claimed):
        if not any(name == layer_name or name.startswith(layer_name + ".") for name in claimed):
            name, suspect = _suspect(layer_name, layer)
            raise ClaimError(_unclaimed_message(name, suspect, registry, "no plugin claims it"))


def _suspect(layer_name: str, layer: nn.Module) -> tuple[str, nn.Module]:
    """The module of a decoder layer that most likely needed an owner: a child that takes a cache, else the first."""
    children = [(f"{layer_name}.{name}", child) for name, child in layer.named_children()]
    taking_cache = [child for child in children if _cache_parameter(child[1])]
    attention_like = [child for child in children if "attn" in child[0] or "attention" in child[0].lower()]
    return (taking_cache or attention_like or children or [(layer_name, layer)])[0]


def _check_recurrent_modules(model: nn.Module, registry: PluginRegistry, claimed: dict[str, nn.Module]) -> None:
    """Refuse unclaimed modules that take a cache: they would mix the requests of a flat batch."""
    containers: set[str] = set()
    for name in claimed:
        parts = name.split(".")
        containers.update(".".join(parts[:depth]) for depth in range(len(parts)))
    for name, module in _outside_claimed(model, claimed):
        if name in claimed or name in containers:
            continue
        parameter = _cache_parameter(module)
        if parameter:
            reason = f"it takes {parameter!r}, so it keeps state between tokens, and no plugin claims it"
            raise ClaimError(_unclaimed_message(name, module, registry, reason))


def _cache_parameter(module: nn.Module) -> str | None:
    found = _CACHE_PARAMETERS.intersection(inspect.signature(module.forward).parameters)
    return min(found) if found else None


def _unclaimed_message(name: str, module: nn.Module, registry: PluginRegistry, reason: str) -> str:
    class_name = type(module).__name__
    message = f"module {name!r} of class {class_name} has no owner: {reason}. Plugins asked: {registry.asked()}."
    distribution = distribution_for(class_name, [child_name for child_name, _ in module.named_children()])
    if distribution is None:
        return f"{message} No known distribution claims this class."
    return f"{message} {registry.advice(distribution)}"
