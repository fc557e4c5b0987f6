"""ModelHooks: the hooks of one model, called through pluggy, their answers merged and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from atom_core.errors import LayoutError, PluginError
from atom_core.plugin.manager import HOOKS
from atom_core.plugin.types import CacheRequirements, KVCacheTensor, Rewind

if TYPE_CHECKING:
    import pluggy
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig

    from atom_core.plugin.batch import AttentionBatch, StepBuffers
    from atom_core.plugin.layer import AttentionLayer
    from atom_core.plugin.ops import KernelTable

__all__ = ["ModelHooks"]


class ModelHooks:
    """Calls the plugins of one model: those that own its layers, and those that claim no layers at all.

    Args:
        manager: holds these plugins.
        descriptions: by plugin, how messages name it.
        owners: names of the plugins that own layers.
    """

    def __init__(self, manager: pluggy.PluginManager, descriptions: Mapping[str, str], owners: frozenset[str]) -> None:
        callers = {hook: getattr(manager.hook, hook) for hook in HOOKS}
        self._callers: dict[str, pluggy.HookCaller] = {
            hook: caller for hook, caller in callers.items() if caller.get_hookimpls()
        }
        self._descriptions = {name: descriptions[name] for name, _ in manager.list_name_plugin()}
        self.owners = owners

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of the plugins that take part."""
        return tuple(self._descriptions)

    def cache_requirements(
        self,
        *,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> dict[str, CacheRequirements]:
        """Requirements by plugin, one for each owner at least.

        Raises:
            PluginError: an owner gave none, or an answer is something else.
        """
        hook = "atom_cache_requirements"
        found = self._merged(
            hook,
            layers=layers,
            model_config=model_config,
            cache_dtype=cache_dtype,
            num_spec_tokens=num_spec_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        for name, requirements in found.items():
            if not isinstance(requirements, CacheRequirements):
                raise self._wrong(PluginError, hook, name, requirements, "CacheRequirements")
        for name in sorted(self.owners - found.keys()):
            raise PluginError(
                f"{self._descriptions[name]} owns layers, but gave no cache requirements; implement {hook}, or derive "
                f"the plugin from LayoutPlugin"
            )
        return found

    def block_bytes(
        self,
        *,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> dict[str, int]:
        """Bytes of one block by plugin.

        Raises:
            PluginError: an answer is no mapping from plugins to non-negative integers.
        """
        return self._counts(
            "atom_compute_block_bytes",
            0,
            layers=layers,
            model_config=model_config,
            block_size=block_size,
            cache_dtype=cache_dtype,
        )

    def allocate_kv_cache_tensors(
        self,
        *,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        num_blocks: int,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Paged tensors by full name, each `[layers, num_blocks, ...]`.

        Raises:
            LayoutError: an answer is no such tensor.
        """
        hook = "atom_allocate_kv_cache_tensors"
        tensors = self._tensors(
            hook,
            layers=layers,
            model_config=model_config,
            num_blocks=num_blocks,
            block_size=block_size,
            cache_dtype=cache_dtype,
            device=device,
        )
        for name, tensor in tensors.items():
            self._check_shape(hook, name, tensor, num_blocks, "num_blocks")
        return tensors

    def per_req_cache_bytes(
        self,
        *,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
    ) -> dict[str, int]:
        """Bytes of one state slot by plugin.

        Raises:
            PluginError: an answer is no mapping from plugins to non-negative integers.
        """
        return self._counts(
            "atom_compute_per_req_cache_bytes",
            0,
            layers=layers,
            model_config=model_config,
            cache_dtype=cache_dtype,
            num_spec_tokens=num_spec_tokens,
        )

    def slots_per_req(
        self, *, layers: Sequence[AttentionLayer], model_config: PreTrainedConfig, num_spec_tokens: int
    ) -> dict[str, int]:
        """Slots of one request by plugin; an owner that does not say gets enough for every way to rewind.

        Raises:
            PluginError: an answer is no mapping from plugins to positive integers.
        """
        found = self._counts(
            "atom_slots_per_req", 1, layers=layers, model_config=model_config, num_spec_tokens=num_spec_tokens
        )
        return {**dict.fromkeys(sorted(self.owners), 1 + num_spec_tokens), **found}

    def check_slots(
        self,
        slot_bytes: Mapping[str, int],
        slots_per_req: Mapping[str, int],
        requirements: Mapping[str, CacheRequirements],
        num_spec_tokens: int,
    ) -> None:
        """Check that draft tokens stay inside their request's slots.

        Raises:
            LayoutError: a plugin with state rewinds by slots and has fewer than 1 + num_spec_tokens.
        """
        for name, num_bytes in slot_bytes.items():
            rewind, slots = requirements[name].rewind, slots_per_req[name]
            if num_bytes and rewind is Rewind.SLOTS and slots < 1 + num_spec_tokens:
                raise LayoutError(
                    f"{self._descriptions[name]} rewinds by slots, and atom_slots_per_req gives it {slots} for "
                    f"{num_spec_tokens} drafts; expected {1 + num_spec_tokens}, or drafts would overwrite the next "
                    f"request's state"
                )

    def allocate_per_req_cache(
        self,
        *,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        num_slots: Mapping[str, int],
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """State tensors by full name, each `[layers, num_slots, ...]`.

        Raises:
            LayoutError: an answer is no such tensor.
        """
        hook = "atom_allocate_per_req_cache"
        tensors = self._tensors(
            hook,
            layers=layers,
            model_config=model_config,
            num_slots=num_slots,
            cache_dtype=cache_dtype,
            num_spec_tokens=num_spec_tokens,
            device=device,
        )
        for name, tensor in tensors.items():
            self._check_shape(hook, name, tensor, num_slots.get(_owner(name), 0), "num_slots")
        return tensors

    def check_allocated_bytes(
        self, tensors: Mapping[str, Tensor], unit_bytes: Mapping[str, int], counts: Mapping[str, int]
    ) -> None:
        """Compare what was allocated with what was declared.

        Args:
            tensors: paged or state tensors, by full name.
            unit_bytes: by plugin, the declared bytes of one block or one slot.
            counts: by plugin, blocks or slots.

        Raises:
            LayoutError: a plugin's bytes differ.
        """
        allocated = dict.fromkeys(unit_bytes, 0)
        for name, tensor in tensors.items():
            allocated[_owner(name)] = allocated.get(_owner(name), 0) + tensor.numel() * tensor.element_size()
        for plugin, num_bytes in allocated.items():
            unit, count = unit_bytes.get(plugin, 0), counts.get(plugin, 0)
            if num_bytes != unit * count:
                own = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items() if _owner(name) == plugin]
                raise LayoutError(
                    f"{self._descriptions[plugin]} allocated {num_bytes} bytes ({', '.join(own) or 'no tensor'}), but "
                    f"declared {unit} bytes x {count} = {unit * count}; LayoutPlugin derives both from one declaration"
                )

    def build_kv_cache_tensor(
        self,
        *,
        layer: AttentionLayer,
        layers: Sequence[AttentionLayer],
        model_config: PreTrainedConfig,
        tensors: Mapping[str, Tensor],
        kernels: KernelTable,
        block_size: int,
        cache_dtype: torch.dtype,
        num_spec_tokens: int,
    ) -> KVCacheTensor:
        """Have its owner bind one layer.

        Raises:
            LayoutError: not exactly one plugin answered for the layer.
            PluginError: the answer is no `KVCacheTensor`.
        """
        hook = "atom_build_kv_cache_tensor"
        found = self._call(
            hook,
            layer=layer,
            layers=layers,
            model_config=model_config,
            tensors=tensors,
            kernels=kernels,
            block_size=block_size,
            cache_dtype=cache_dtype,
            num_spec_tokens=num_spec_tokens,
        )
        what = f"layer {layer.module_name!r} of class {type(layer).__name__}"
        if len(found) != 1:
            raise LayoutError(
                f"{len(found)} plugins answered {hook} for {what}, expected its owner alone; asked: {self._asked(hook)}"
            )
        if not isinstance(found[0], KVCacheTensor):
            raise PluginError(
                f"{hook} returned {found[0]!r} for {what}, expected a KVCacheTensor; asked: {self._asked(hook)}"
            )
        return found[0]

    def build_metadata(
        self, layers: Sequence[AttentionLayer], batch: AttentionBatch, buffers: StepBuffers
    ) -> dict[str, Any]:
        """Metadata of one step by plugin; called once per step.

        Raises:
            PluginError: an answer is no mapping from plugins.
        """
        if "atom_build_metadata" not in self._callers:
            return {}
        return self._merged("atom_build_metadata", layers=layers, batch=batch, buffers=buffers)

    def step_finished(self, stats: Mapping[str, Any]) -> None:
        """Tell the observers that a step is over."""
        if "atom_step_finished" in self._callers:
            self._callers["atom_step_finished"](stats=stats)

    def _call(self, hook: str, **arguments: object) -> list[Any]:
        caller = self._callers.get(hook)
        if caller is None:
            return []
        answers = caller(**arguments)
        if not isinstance(answers, list):
            raise PluginError(
                f"a wrapper of {hook} returned {answers!r}, expected the list of answers that its yield gave; "
                f"asked: {self._asked(hook)}"
            )
        return answers

    def _merged(self, hook: str, **arguments: object) -> dict[str, Any]:
        """Merge the answers of a hook whose keys are plugins' names."""
        merged = self._by_key(hook, **arguments)
        for key in merged:
            if key not in self._descriptions:
                raise self._foreign(PluginError, hook, key)
        return merged

    def _by_key(self, hook: str, **arguments: object) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for answer in self._call(hook, **arguments):
            if not isinstance(answer, Mapping):
                raise PluginError(f"{hook} returned {answer!r}, expected a mapping; asked: {self._asked(hook)}")
            for key, value in answer.items():
                if key in merged:
                    raise PluginError(f"{hook} was answered twice for {key!r}; asked: {self._asked(hook)}")
                merged[key] = value
        return merged

    def _counts(self, hook: str, least: int, **arguments: object) -> dict[str, int]:
        counts = self._merged(hook, **arguments)
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < least:
                raise self._wrong(PluginError, hook, name, count, f"an integer of at least {least}")
        return {name: int(count) for name, count in counts.items()}

    def _tensors(self, hook: str, **arguments: object) -> dict[str, Tensor]:
        from torch import Tensor

        tensors = self._by_key(hook, **arguments)
        for name, tensor in tensors.items():
            if not isinstance(name, str) or _owner(name) not in self._descriptions or not name.partition(".")[2]:
                raise self._foreign(LayoutError, hook, name)
            if not isinstance(tensor, Tensor):
                raise self._wrong(LayoutError, hook, name, tensor, "a tensor")
        return tensors

    def _check_shape(self, hook: str, name: str, tensor: Tensor, count: int, what: str) -> None:
        if tensor.ndim < 2 or tensor.shape[1] != count:
            found = f"a tensor of shape {list(tensor.shape)}"
            raise self._wrong(LayoutError, hook, name, found, f"[layers, {what} = {count}, ...]")

    def _wrong(self, error: type[PluginError], hook: str, key: str, found: object, expected: str) -> PluginError:
        return error(f"{self._descriptions[_owner(key)]}: {hook} returned {found} for {key!r}, expected {expected}")

    def _foreign(self, error: type[PluginError], hook: str, key: object) -> PluginError:
        form = "'plugin.tensor'" if error is LayoutError else "a plugin's name"
        return error(
            f"{hook} returned an entry for {key!r}, expected {form} of a plugin of this model: "
            f"{', '.join(sorted(self._descriptions))}; asked: {self._asked(hook)}"
        )

    def _asked(self, hook: str) -> str:
        caller = self._callers.get(hook)
        names = {implementation.plugin_name for implementation in caller.get_hookimpls()} if caller else set()
        return ", ".join(self._descriptions[name] for name in sorted(names)) or "nobody"


def _owner(name: str) -> str:
    return name.partition(".")[0]
