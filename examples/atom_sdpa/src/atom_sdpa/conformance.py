"""What the conformance kit runs: without models, I12 alone, every kernel against its op's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from atom_core.testing import AttentionConformance
from atom_sdpa.plugin import SdpaPlugin
from atom_sdpa.plugin import plugin as sdpa_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["TestSdpa"]


class TestSdpa(AttentionConformance):
    """A kernel of an op that atom-mha defines."""

    plugin: ClassVar[SdpaPlugin] = sdpa_plugin
    needs = ("mha",)

    @classmethod
    def configs(cls) -> Mapping[str, PreTrainedConfig]:
        """No models: the plugin claims no layers."""
        return {}
