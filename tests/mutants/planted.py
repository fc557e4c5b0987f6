"""The mutants: each is a twin with one planted bug, and the invariant that must catch it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_core import hookimpl
from tests.mutants import planted_core
from tests.mutants.paged import PagedLayer, PagedPlugin, TestPaged, sinks
from tests.mutants.recurrent import TAIL, WIDTH, RecurrentLayer, RecurrentPlugin, TestRecurrent
from tests.mutants.sparse import SparseLayer, SparsePlugin, TestSparse
from tests.mutants.twin import TwinConformance
from tests.mutants.window import TestWindow, WindowLayer, WindowPlugin

__all__ = ["MUTANTS", "PAIR", "TWINS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Attributes:
        bug: what is wrong, in a few words.
        invariant: which must catch it.
        conformance: the kit on the mutant.
        twin: the kit on the same plugin without the bug.
        named: whether the issue that asked for the kit names it.
    """

    bug: str
    invariant: str
    conformance: type[TwinConformance]
    twin: type[TwinConformance]
    named: bool = True


def mutant(bug, invariant, twin, plugin=None, named=True, **members) -> Mutant:
    """Make a mutant of a twin: with another plugin, or with other members of the kit's class."""
    if plugin is not None:
        members["plugin"] = plugin
    name = "".join(word.capitalize() for word in bug.replace("-", " ").replace(",", "").split())
    return Mutant(bug, invariant, type(f"Mutant{name}", (twin,), members), twin, named)


def of_layer(plugin_class, layer_class, **methods):
    """A plugin whose layers have other methods."""
    layer = type(f"Mutated{layer_class.__name__}", (layer_class,), methods)
    return type(f"Mutated{plugin_class.__name__}", (plugin_class,), {"layer": layer})()


# The recurrence.


def fresh_read(self, row):
    tail, running = RecurrentLayer.read(self, row)
    if self.step.batch.num_decodes > row:
        return tail, running
    return torch.zeros(TAIL, WIDTH), torch.full((WIDTH,), 0.25)


def short_tail(self, rows, index):
    own = rows[TAIL : index + 1 + TAIL][-TAIL:]
    return torch.cat([torch.zeros(TAIL - len(own), WIDTH), own])


def write_through_read(self, row, slot, rows, index, running):
    RecurrentLayer.write(self, row, self.metadata["reads"][row], rows, index, running)


class SortedRows(RecurrentPlugin):
    def reads(self, slots, batch):
        return sorted(slots)


class DraftsAlone(RecurrentPlugin):
    def reads(self, slots, batch):
        """Only the rows that verify are listed where any does; the others' slots follow where they are left."""
        counts = (batch.query_start_loc_host[1:] - batch.query_start_loc_host[:-1])[: batch.num_decodes].tolist()
        verifying = [slot for slot, count in zip(slots, counts, strict=False) if count > 1]
        return (verifying + slots[len(verifying) :]) if verifying else slots


# Pages.


def everything_visible(self, positions, length):
    return torch.ones(len(positions), length, dtype=torch.bool)


def padding_to_block_0(self, key, value, slots):
    self.put(key, value, slots.clamp(min=0))


def int32_slots(self, table, length):
    """Offsets in elements, computed in 32 bits, as a kernel would; a negative one wraps."""
    slots = PagedLayer.slots(self, table, length)
    flat = self.flat("k_cache")
    width = flat[0].numel()
    return ((slots * width).int().long() // width) % len(flat)


def swapped_when_equal(self, table, length):
    key, value = PagedLayer.read(self, table, length)
    return (value, key) if key.shape == value.shape else (key, value)


def zero_times_masked(self, table, length):
    """All of the row's blocks are read, and what lies behind the last key is multiplied by 0."""
    size = self.kv_cache.paged["k_cache"].shape[1]
    whole = -(-length // size) * size
    key, value = PagedLayer.read(self, table, whole)
    weight = (torch.arange(whole) < length).to(key.dtype)[:, None, None]
    behind = (key * (1 - weight)).sum() * 0
    return key[:length] + behind, value[:length]


class AliasedLayers(PagedPlugin):
    @hookimpl
    def atom_allocate_kv_cache_tensors(self, layers, model_config, num_blocks, block_size, cache_dtype, device):
        tensors = super().atom_allocate_kv_cache_tensors(
            layers, model_config, num_blocks, block_size, cache_dtype, device
        )
        # Stride 0 where the layer's stride should be.
        return {name: tensor.as_strided(tensor.shape, (0, *tensor.stride()[1:])) for name, tensor in tensors.items()}


class WithoutScale(PagedPlugin):
    @hookimpl
    def atom_compute_block_bytes(self, layers, model_config, block_size, cache_dtype):
        own = self._own(layers)
        specs = self.paged_layout(own, model_config=model_config, block_size=block_size, cache_dtype=cache_dtype)
        return {self.name: sum(spec.unit_bytes for spec in specs if spec.field != "k_scale")}


class OneLayerMore(PagedPlugin):
    @hookimpl
    def atom_allocate_kv_cache_tensors(self, layers, model_config, num_blocks, block_size, cache_dtype, device):
        tensors = super().atom_allocate_kv_cache_tensors(
            layers, model_config, num_blocks, block_size, cache_dtype, device
        )
        return {name: torch.cat([tensor, tensor[:1]]) for name, tensor in tensors.items()}


class KeptMetadata(PagedPlugin):
    kept = None

    def build(self, batch):
        if self.kept is None or len(self.kept["spans"]) != batch.num_seqs or self.kept["tokens"] != batch.num_tokens:
            self.kept = {**super().build(batch), "tokens": batch.num_tokens}
        return self.kept


class Greedy(PagedPlugin):
    def owns(self, module):
        return True


# Windows.


class ExactRows(WindowPlugin):
    def rows(self, num_spec_tokens):
        return WindowLayer.window


# Selection.


def future_selected(self, query, index, positions):
    visible = torch.ones(len(query), len(index), dtype=torch.bool)
    from tests.mutants.sparse import chosen, index_scores

    return chosen(index_scores(query, index), visible)


class TestPair(TestPaged):
    """Two plugins that share a model: windows in the second layer."""

    needs = (WindowPlugin(),)
    layer_types = ("full_attention", "sliding_attention")


PAIR = TestPair
TWINS = {
    "paged": TestPaged,
    "recurrent": TestRecurrent,
    "window": TestWindow,
    "sparse": TestSparse,
    "paged and window": TestPair,
}


def _core(bug, invariant, wrap, twin=TestRecurrent, named=True) -> Mutant:
    return mutant(bug, invariant, twin, named=named, wrap_core=lambda self, part: wrap(part))


MUTANTS = [
    _core("state not reset on reuse", "I6", planted_core.no_reset_on_reuse),
    _core("resumes from a recycled slot", "I6", planted_core.resume_in_old_slot),
    mutant(
        "num_computed ignored (always starts fresh)",
        "I4",
        TestRecurrent,
        of_layer(RecurrentPlugin, RecurrentLayer, read=fresh_read),
    ),
    mutant(
        "conv tail of a short chunk taken from the wrong rows",
        "I4",
        TestRecurrent,
        of_layer(RecurrentPlugin, RecurrentLayer, tail_after=short_tail),
    ),
    mutant(
        "write through the read slot",
        "I9",
        TestRecurrent,
        of_layer(RecurrentPlugin, RecurrentLayer, write=write_through_read),
    ),
    mutant("window off by one", "I14", TestWindow, of_layer(WindowPlugin, WindowLayer, window=WindowLayer.window + 1)),
    mutant("window ring exactly the window with drafts in flight", "I9", TestWindow, ExactRows()),
    mutant(
        "sink added twice",
        "I14",
        TestPaged,
        of_layer(PagedPlugin, PagedLayer, sinks=lambda self: sinks() + 0.6931),
    ),
    mutant(
        "key and value dims swapped when equal",
        "I14",
        TestPaged,
        of_layer(PagedPlugin, PagedLayer, read=swapped_when_equal),
    ),
    mutant("per-layer as_strided aliasing", "I2", TestPaged, AliasedLayers()),
    mutant("int32 offset overflow", "I12", TestPaged, of_layer(PagedPlugin, PagedLayer, slots=int32_slots)),
    mutant("bytes declared without the scale tensor", "I1", TestPaged, WithoutScale()),
    mutant("allocates one layer too many", "I1", TestPaged, OneLayerMore()),
    mutant(
        "future chunk tokens visible in sparse selection",
        "I8",
        TestSparse,
        of_layer(SparsePlugin, SparseLayer, select=future_selected),
    ),
    mutant(
        "per-sequence instead of per-token causal bound",
        "I8",
        TestPaged,
        of_layer(PagedPlugin, PagedLayer, visible=everything_visible),
    ),
    mutant("batch order assumed sorted", "I5", TestRecurrent, SortedRows()),
    mutant(
        "padding rows written to block 0",
        "I10",
        TestPaged,
        of_layer(PagedPlugin, PagedLayer, write=padding_to_block_0),
    ),
    mutant("plain requests dropped from the slot list so that rows shift", "I9", TestRecurrent, DraftsAlone()),
    mutant(
        "sharded head count rounded down",
        "I13",
        TestPaged,
        of_layer(PagedPlugin, PagedLayer, share=lambda self, heads, tp_size: heads // tp_size),
    ),
    _core("prefix hit without restoring state", "I7", planted_core.no_restore),
    _core("checkpoint published before its bytes are copied", "I7", planted_core.late_copy),
    _core("fork sharing one mutable slot", "I2", planted_core.shared_fork),
    mutant("metadata kept from the last step", "I4", TestPaged, KeptMetadata()),
    mutant("claims a module that is not its own", "I14", TestPair, Greedy()),
    mutant(
        "masked values multiplied by 0 instead of left out",
        "I3",
        TestPaged,
        of_layer(PagedPlugin, PagedLayer, read=zero_times_masked),
        named=False,
    ),
    _core("a refused request keeps its group", "I11", planted_core.leaking_refusal, named=False),
    _core("decodes wait while prompts are there", "I15", planted_core.starved_decodes, TestPaged, named=False),
]
