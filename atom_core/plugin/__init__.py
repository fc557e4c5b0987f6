"""The contract: everything that a plugin may import beside `atom_core`, `atom_core.errors` and the kit."""

from atom_core.plugin.batch import AttentionBatch, HostDeviceBuffer, Step, StepBuffers, StepLimits
from atom_core.plugin.hookspecs import AtomSpecs
from atom_core.plugin.layer import KEYWORDS_WITHOUT_MEANING, AttentionLayer, InterfaceLayer
from atom_core.plugin.layout import LayoutPlugin, TensorSpec
from atom_core.plugin.markers import CONTRACT_VERSION, hookimpl, hookspec
from atom_core.plugin.ops import Kernel, KernelTable, Op, SelectedKernel, always_supported
from atom_core.plugin.proposer import DraftRequest, Proposer
from atom_core.plugin.registry import PluginRegistry
from atom_core.plugin.types import CacheRequirements, Claim, GraphSupport, KVCacheTensor, PluginInfo, Rewind

__all__ = [
    "CONTRACT_VERSION",
    "KEYWORDS_WITHOUT_MEANING",
    "AtomSpecs",
    "AttentionBatch",
    "AttentionLayer",
    "CacheRequirements",
    "Claim",
    "DraftRequest",
    "GraphSupport",
    "HostDeviceBuffer",
    "InterfaceLayer",
    "KVCacheTensor",
    "Kernel",
    "KernelTable",
    "LayoutPlugin",
    "Op",
    "PluginInfo",
    "PluginRegistry",
    "Proposer",
    "Rewind",
    "SelectedKernel",
    "Step",
    "StepBuffers",
    "StepLimits",
    "TensorSpec",
    "always_supported",
    "hookimpl",
    "hookspec",
]
