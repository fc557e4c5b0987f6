"""LayoutPlugin: the cache hooks from two declarations, so that bytes and allocation cannot drift."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from atom_core.plugin.markers import hookimpl
from atom_core.plugin.types import CacheRequirements, KVCacheTensor, Rewind

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig

    from atom_core.plugin.layer import AttentionLayer
    from atom_core.plugin.ops import KernelTable

__all__ = ["LayoutPlugin", "TensorSpec"]


@dataclass(frozen=True)
class TensorSpec:
    """One named cache tensor, shared by layers of equal shape.

    Attributes:
        field: the key in the layer's `KVCacheTensor`, for example `k_cache`; no dots. Layers of different shapes
            get one spec each with the same field.
        shape: per block or per slot, one layer.
        dtype: element type.
        layers: module names of the layers that own a row, in row order.
        initial: what a state slot holds when a request leases it; ignored for paged tensors.
    """

    field: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layers: tuple[str, ...]
    initial: float = 0.0

    def __post_init__(self) -> None:
        if not self.field.isidentifier():
            raise ValueError(f"the field of a cache tensor must be an identifier, found {self.field!r}")

    @property
    def unit_bytes(self) -> int:
        """Bytes of one block or one slot over all rows."""
        return math.prod(self.shape) * self.dtype.itemsize * len(self.layers)


class LayoutPlugin(ABC):
    """Base of plugins whose caches are named tensors; implements every cache hook.

    A subclass sets `name`, names its layer classes and overrides `paged_layout`, `state_layout` or both.

    Attributes:
        name: the plugin's name.
        rewind: how state forgets rejected drafts; with `slots` a request has 1 + num_spec_tokens slots.
    """

    name: ClassVar[str]
    rewind: ClassVar[Rewind] = Rewind.SLOTS

    @abstractmethod
    def layer_classes(self) -> tuple[type[AttentionLayer], ...]:
        """The classes of this plugin's layers."""

    def paged_layout(
        self,
        layers: Sequence[AttentionLayer],
        *,
        model_config: PreTrainedConfig,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> Sequence[TensorSpec]:
        """Declare the paged tensors: shape per block.

        Args:
            layers: this plugin's layers.
            model_config: the model's config.
            block_size: tokens per block.
            cache_dtype: dtype that the user chose for paged tensors.
        """
        return ()

    def state_layout(
        self,
        layers: Sequence[AttentionLayer],
        *,
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
    ) -> Sequence[TensorSpec]:
        """Declare the state tensors: shape per slot.

        Args:
            layers: this plugin's layers.
            model_config: the model's config.
            cache_dtype: dtype of activations, also where paged tensors have another.
            num_spec_tokens: most draft tokens of a request and step.
        """
        return ()

    def requirements(
        self,
        layers: Sequence[AttentionLayer],
        *,
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> CacheRequirements:
        """Declare requirements; `rewind` and `initial_values` come from the class and the layout: leave them out."""
        return CacheRequirements()

    @hookimpl
    def atom_cache_requirements(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> Mapping[str, CacheRequirements]:
        """Requirements of `requirements`, completed from class and layout."""
        own = self._own(layers)
        if not own:
            return {}
        found = self.requirements(
            own,
            model_config=model_config,
            cache_dtype=cache_dtype,
            num_spec_tokens=num_spec_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        state = self._state(own, model_config, cache_dtype, num_spec_tokens)
        initial_values = {name: spec.initial for name, spec in state.items()}
        return {self.name: replace(found, rewind=self.rewind, initial_values=initial_values)}

    @hookimpl
    def atom_compute_block_bytes(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> Mapping[str, int]:
        """Bytes of the paged layout."""
        specs = self._paged(self._own(layers), model_config, block_size, cache_dtype)
        return {self.name: sum(spec.unit_bytes for spec in specs.values())}

    @hookimpl
    def atom_allocate_kv_cache_tensors(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        num_blocks: int,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
    ) -> Mapping[str, Tensor]:
        """Tensors of the paged layout, with no particular content."""
        specs = self._paged(self._own(layers), model_config, block_size, cache_dtype)
        return self._allocate(specs, num_blocks, device)

    @hookimpl
    def atom_compute_per_req_cache_bytes(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
    ) -> Mapping[str, int]:
        """Bytes of the state layout."""
        specs = self._state(self._own(layers), model_config, cache_dtype, num_spec_tokens)
        return {self.name: sum(spec.unit_bytes for spec in specs.values())}

    @hookimpl
    def atom_slots_per_req(self, layers: Sequence[AttentionLayer], num_spec_tokens: int) -> Mapping[str, int]:
        """Slots by the declared way to rewind."""
        return {self.name: 1 + num_spec_tokens if self.rewind is Rewind.SLOTS else 1}

    @hookimpl
    def atom_allocate_per_req_cache(
        self,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        num_slots: Mapping[str, int],
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
        device: torch.device,
    ) -> Mapping[str, Tensor]:
        """Tensors of the state layout, with no particular content; the core writes initial values at lease."""
        specs = self._state(self._own(layers), model_config, cache_dtype, num_spec_tokens)
        return self._allocate(specs, num_slots.get(self.name, 0), device)

    @hookimpl
    def atom_build_kv_cache_tensor(
        self,
        layer: AttentionLayer,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        tensors: Mapping[str, Tensor],
        kernels: KernelTable,
        block_size: int,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
    ) -> KVCacheTensor | None:
        """The layer's rows of every tensor that names it, bound with `layer.bind`."""
        if not isinstance(layer, self.layer_classes()):
            return None
        own = self._own(layers)
        paged = self._paged(own, model_config, block_size, cache_dtype)
        state = self._state(own, model_config, cache_dtype, num_spec_tokens)
        bound = KVCacheTensor(paged=self._rows(layer, paged, tensors), state=self._rows(layer, state, tensors))
        layer.bind(bound, kernels)
        return bound

    def _own(self, layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
        return [layer for layer in layers if isinstance(layer, self.layer_classes())]

    def _paged(
        self,
        own: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> dict[str, TensorSpec]:
        if not own:
            return {}
        return _named(self.paged_layout(own, model_config=model_config, block_size=block_size, cache_dtype=cache_dtype))

    def _state(
        self,
        own: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
    ) -> dict[str, TensorSpec]:
        if not own:
            return {}
        return _named(
            self.state_layout(own, model_config=model_config, cache_dtype=cache_dtype, num_spec_tokens=num_spec_tokens)
        )

    def _allocate(self, specs: Mapping[str, TensorSpec], count: int, device: torch.device) -> dict[str, Tensor]:
        import torch

        return {
            f"{self.name}.{name}": torch.empty((len(spec.layers), count, *spec.shape), dtype=spec.dtype, device=device)
            for name, spec in specs.items()
        }

    def _rows(
        self, layer: AttentionLayer, specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return {
            spec.field: tensors[f"{self.name}.{name}"][spec.layers.index(layer.module_name)]
            for name, spec in specs.items()
            if layer.module_name in spec.layers
        }


def _named(specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """Give each spec a unique name: its field, numbered where several specs share the field."""
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.field] = counts.get(spec.field, 0) + 1
    named: dict[str, TensorSpec] = {}
    seen: dict[str, int] = {}
    for spec in specs:
        index = seen.setdefault(spec.field, 0)
        seen[spec.field] += 1
        named[spec.field if counts[spec.field] == 1 else f"{spec.field}.{index}"] = spec
    return named
