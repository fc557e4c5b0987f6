"""CacheTensors: the allocated cache of one model, checked against what was declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atom_core.errors import LayoutError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from atom_core.cache.plan import CacheFigures, CachePlan
    from atom_core.plugin.layer import AttentionLayer
    from atom_core.plugin.model_hooks import ModelHooks
    from atom_core.plugin.ops import KernelTable

__all__ = ["CacheTensors", "allocate_caches"]


@dataclass(frozen=True)
class CacheTensors:
    """All cache tensors by full name, `plugin.tensor`, and the operations of the core on them.

    Attributes:
        paged: each `[layers, num_blocks, ...]`.
        state: each `[layers, num_slots, ...]`.
        initial_values: by full name, what a slot of a state tensor holds at lease; 0 if not named.
    """

    paged: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    initial_values: Mapping[str, float]

    def initialize_slots(self, slots_by_plugin: Mapping[str, Sequence[int]]) -> None:
        """Write initial values into slots.

        Args:
            slots_by_plugin: by plugin, slots without repetition.
        """
        for plugin, slots in slots_by_plugin.items():
            for name, tensor in self._state_of(plugin).items() if slots else ():
                value = torch.tensor(self.initial_values.get(name, 0.0)).to(tensor.dtype)
                _as_indexable(tensor).index_fill_(1, _index(slots, tensor.device), _as_indexable(value).item())

    def copy_slots(self, copies_by_plugin: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> None:
        """Copy whole slots, in all layers at once; every source is read before any destination is written.

        Args:
            copies_by_plugin: by plugin, source slots and as many destination slots, these without repetition.
        """
        for plugin, (sources, destinations) in copies_by_plugin.items():
            for tensor in self._state_of(plugin).values():
                _copy_rows(tensor, sources, destinations)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks, in all layers of all plugins; every source is read before any destination is written.

        Args:
            sources: blocks.
            destinations: as many blocks, without repetition.
        """
        for tensor in self.paged.values():
            _copy_rows(tensor, sources, destinations)

    def _state_of(self, plugin: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state.items() if _plugin_of(name) == plugin}


def allocate_caches(
    hooks: ModelHooks,
    layers: Sequence[AttentionLayer],
    *,
    model_config: PreTrainedConfig,
    figures: CacheFigures,
    plan: CachePlan,
    cache_dtype: torch.dtype,
    state_dtype: torch.dtype | None = None,
    num_spec_tokens: int,
    kernels: KernelTable,
    device: torch.device,
) -> CacheTensors:
    """Have the plugins allocate what was planned, check it against what they declared, and bind every layer to it.

    Args:
        hooks: the manager of this model's plugins.
        layers: all claimed layers.
        model_config: the model's config.
        figures: what the plugins declared.
        plan: how many blocks, groups and checkpoints there are.
        cache_dtype: dtype of paged tensors.
        state_dtype: what the state hooks get in its place, the dtype of activations; `None` for the same.
        num_spec_tokens: most draft tokens of a request and step.
        kernels: where the layers select their kernels.
        device: where.

    Raises:
        LayoutError: a tensor's shape, bytes or device is not what was declared and asked for, an initial value names
            no tensor, or a layer has no owner to bind it.
    """
    num_slots = {plugin: plan.num_slots(plugin) for plugin in plan.slots_per_req}
    paged = hooks.allocate_kv_cache_tensors(
        layers=layers,
        model_config=model_config,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        cache_dtype=cache_dtype,
        device=device,
    )
    state = hooks.allocate_per_req_cache(
        layers=layers,
        model_config=model_config,
        num_slots=num_slots,
        cache_dtype=state_dtype or cache_dtype,
        num_spec_tokens=num_spec_tokens,
        device=device,
    )
    hooks.check_allocated_bytes(paged, figures.block_bytes, dict.fromkeys(figures.block_bytes, plan.num_blocks))
    hooks.check_allocated_bytes(state, figures.slot_bytes, num_slots)
    tensors = {**paged, **state}
    _check_names(paged, state)
    _check_device(tensors, device)
    caches = CacheTensors(paged, state, _initial_values(figures, state))
    for layer in layers:
        hooks.build_kv_cache_tensor(
            layer=layer,
            layers=layers,
            model_config=model_config,
            tensors=tensors,
            kernels=kernels,
            block_size=plan.block_size,
            cache_dtype=cache_dtype,
            num_spec_tokens=num_spec_tokens,
        )
    return caches


def _check_names(paged: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for name in sorted(paged.keys() & state.keys()):
        raise LayoutError(
            f"plugin {_plugin_of(name)!r} allocated {name!r} both as a paged and as a state tensor; a name is used once"
        )


def _check_device(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    for name, tensor in tensors.items():
        found = tensor.device
        if found.type != device.type or (device.index is not None and found.index != device.index):
            raise LayoutError(
                f"plugin {_plugin_of(name)!r} allocated {name!r} on {found}, expected {device}; "
                "allocate on the device that the hook is given"
            )


def _initial_values(figures: CacheFigures, state: Mapping[str, Tensor]) -> dict[str, float]:
    values: dict[str, float] = {}
    for plugin, needs in figures.requirements.items():
        for tensor, value in needs.initial_values.items():
            name = f"{plugin}.{tensor}"
            if name not in state:
                own = [known for known in state if _plugin_of(known) == plugin]
                raise LayoutError(
                    f"plugin {plugin!r} requires an initial value for {tensor!r}, but allocated no state tensor "
                    f"{name!r}; it allocated {', '.join(own) or 'none'}"
                )
            values[name] = value
    return values


def _copy_rows(tensor: Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    assert len(sources) == len(destinations), f"{len(sources)} rows copied to {len(destinations)}"
    if not sources:
        return
    rows = _as_indexable(tensor)
    read = rows.index_select(1, _index(sources, tensor.device))
    rows.index_copy_(1, _index(destinations, tensor.device), read)


def _as_indexable(tensor: Tensor) -> Tensor:
    """The tensor itself, or its bytes where elements have one: indexing is not implemented for every 8-bit float."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def _plugin_of(name: str) -> str:
    return name.partition(".")[0]
