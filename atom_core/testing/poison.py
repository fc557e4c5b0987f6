"""Poisoner: a plugin that fills new caches, so that whoever reads what nobody wrote is found out."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from torch import Tensor

from atom_core.plugin.markers import hookimpl
from atom_core.plugin.types import PluginInfo

__all__ = ["Poisoner", "fill"]

Answers = list[Mapping[str, Tensor]]


class Poisoner:
    """Wraps the allocation hooks of every plugin and fills what they return; owns no layers.

    Put it beside the plugins: `PluginRegistry.of({"sum": plugin, "poisoner": Poisoner()})`.

    Args:
        value: what new caches hold.
    """

    def __init__(self, value: float = float("nan")) -> None:
        self.value = value

    @hookimpl
    def atom_plugin_info(self) -> PluginInfo:
        """Say who the plugin is."""
        return PluginInfo("poisoner", f"Fills new caches with {self.value}.", contract_version=1)

    @hookimpl(wrapper=True)
    def atom_allocate_kv_cache_tensors(self) -> Generator[None, Answers, Answers]:
        """Fill the paged tensors."""
        return self._filled((yield))

    @hookimpl(wrapper=True)
    def atom_allocate_per_req_cache(self) -> Generator[None, Answers, Answers]:
        """Fill the state tensors."""
        return self._filled((yield))

    def _filled(self, answers: Answers) -> Answers:
        for tensors in answers:
            fill(tensors, self.value)
        return answers


def fill(tensors: Mapping[str, Any], value: float) -> None:
    """Fill tensors in place; integer tensors, which have no NaN, with their largest value."""
    import torch

    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(value)
        else:
            tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
