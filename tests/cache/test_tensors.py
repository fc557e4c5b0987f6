"""The allocated tensors: checked against the declaration, initialised, copied."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedConfig

from atom_core.cache import CacheFigures, plan_cache
from atom_core.cache.tensors import CacheTensors, allocate_caches
from atom_core.errors import LayoutError
from atom_core.plugin import AttentionLayer, CacheRequirements, KernelTable, LayoutPlugin, Rewind, TensorSpec
from atom_core.plugin.manager import make_manager
from atom_core.plugin.model_hooks import ModelHooks

CPU = torch.device("cpu")


class RingLayer(AttentionLayer):
    def __init__(self, name):
        self.module_name = name


class RingPlugin(LayoutPlugin):
    """Two layers with keys in blocks, and a state of two tensors of which one starts at -1."""

    name = "ring"
    rewind = Rewind.SLOTS

    def layer_classes(self):
        return (RingLayer,)

    def paged_layout(self, layers, *, model_config, block_size, cache_dtype):
        return [TensorSpec("k_cache", (block_size, 3), cache_dtype, tuple(layer.module_name for layer in layers))]

    def state_layout(self, layers, *, model_config, cache_dtype, num_spec_tokens):
        names = tuple(layer.module_name for layer in layers)
        return [
            TensorSpec("positions", (2,), torch.int32, names, initial=-1.0),
            TensorSpec("rows", (5,), torch.float8_e4m3fn, names, initial=0.5),
        ]


class WiderThanDeclared(RingPlugin):
    def _allocate(self, specs, count, device):
        return {name: tensor.to(torch.float64) for name, tensor in super()._allocate(specs, count, device).items()}


class FewerSlots(RingPlugin):
    def _allocate(self, specs, count, device):
        return super()._allocate(specs, count - 1, device)


class Elsewhere(RingPlugin):
    def _allocate(self, specs, count, device):
        return super()._allocate(specs, count, torch.device("meta"))


def allocated(plugin, num_spec_tokens=1, **changed_figures):
    """Plan and allocate the caches of two layers, with the declaration changed where asked for."""
    layers = [RingLayer("first"), RingLayer("second")]
    hooks = ModelHooks(make_manager({plugin.name: plugin}), {plugin.name: "plugin 'ring'"}, frozenset({plugin.name}))
    model = {"layers": layers, "model_config": PreTrainedConfig()}
    state = {"cache_dtype": torch.bfloat16, "num_spec_tokens": num_spec_tokens}
    figures = CacheFigures(
        requirements=hooks.cache_requirements(**model, **state, max_num_batched_tokens=8, max_model_len=16),
        block_bytes=hooks.block_bytes(**model, block_size=4, cache_dtype=torch.bfloat16),
        slot_bytes=hooks.per_req_cache_bytes(**model, **state),
        slots_per_req=hooks.slots_per_req(**model, num_spec_tokens=num_spec_tokens),
    )
    figures = replace(figures, **changed_figures)
    limits = {"block_size": 4, "max_model_len": 16, "max_num_seqs": 3, "checkpoint_share": 0.5}
    plan = plan_cache(figures, budget_bytes=2000, **limits)
    kernels = KernelTable.build([], [])
    return (
        allocate_caches(hooks, **model, **state, figures=figures, plan=plan, kernels=kernels, device=CPU),
        plan,
        layers,
    )


def test_allocation_is_what_was_planned_and_every_layer_is_bound():
    caches, plan, layers = allocated(RingPlugin())
    assert plan.num_groups == 3
    assert plan.num_checkpoints > 0
    num_bytes = sum(
        tensor.numel() * tensor.element_size() for tensor in (*caches.paged.values(), *caches.state.values())
    )
    assert num_bytes == plan.total_bytes
    assert caches.paged["ring.k_cache"].shape == (2, plan.num_blocks, 4, 3)
    assert caches.state["ring.rows"].shape == (2, 6 + plan.num_checkpoints, 5)
    caches.paged["ring.k_cache"].zero_()
    caches.paged["ring.k_cache"][1, 2] = 7
    assert (layers[1].kv_cache.k_cache[2] == 7).all()
    assert (layers[0].kv_cache.k_cache[2] == 0).all()


def test_more_bytes_than_declared_are_an_error_with_both_figures():
    with pytest.raises(LayoutError, match=r"'ring' allocated \d+ bytes \(ring.k_cache .*declared 48 bytes x \d+"):
        allocated(WiderThanDeclared())


def test_fewer_rows_than_planned_are_an_error():
    with pytest.raises(LayoutError, match=r"'ring'.*k_cache"):
        allocated(FewerSlots())


def test_state_bytes_are_checked_too():
    with pytest.raises(LayoutError, match=r"ring.positions.*declared 27 bytes"):
        allocated(RingPlugin(), slot_bytes={"ring": 27})


def test_tensor_on_another_device_is_an_error():
    with pytest.raises(LayoutError, match=r"'ring\.k_cache' on meta, expected cpu"):
        allocated(Elsewhere())


def test_initial_value_of_an_unknown_tensor_is_an_error():
    requirements = {"ring": CacheRequirements(initial_values={"rings": 1.0})}
    with pytest.raises(LayoutError, match=r"initial value for 'rings'.*it allocated ring.positions, ring.rows"):
        allocated(RingPlugin(), requirements=requirements)


def test_leased_slots_get_initial_values_and_others_keep_theirs():
    caches, _, _ = allocated(RingPlugin())
    positions, rows = caches.state["ring.positions"], caches.state["ring.rows"]
    positions.fill_(9)
    rows.view(torch.uint8).fill_(3)
    caches.initialize_slots({"ring": [4, 1]})
    assert (positions[:, [1, 4]] == -1).all()
    assert (rows[:, [1, 4]].float() == 0.5).all()
    assert (positions[:, [0, 2, 3]] == 9).all()
    assert (rows.view(torch.uint8)[:, [0, 2, 3]] == 3).all()
    caches.initialize_slots({"ring": []})


def test_unnamed_state_tensors_start_at_zero():
    caches = CacheTensors({}, {"a.x": torch.full((1, 3, 2), torch.nan), "b.x": torch.full((1, 3, 2), torch.nan)}, {})
    caches.initialize_slots({"a": [1]})
    assert (caches.state["a.x"][0, 1] == 0).all()
    assert caches.state["b.x"].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int32, torch.bool])
def test_rows_are_copied_in_all_layers_and_sources_are_read_first(dtype):
    values = torch.arange(24).reshape(2, 6, 2).to(dtype)
    caches = CacheTensors({"a.k": values.clone()}, {"a.s": values.clone(), "b.s": values.clone()}, {})
    caches.copy_slots({"a": ([0, 1], [1, 5])})
    caches.copy_blocks([0, 1], [1, 5])
    expected = values.clone()
    for layer in range(2):
        expected[layer, 1], expected[layer, 5] = values[layer, 0], values[layer, 1]
    for name, tensor in {**caches.paged, **caches.state}.items():
        unchanged = name == "b.s"
        assert torch.equal(tensor.float(), (values if unchanged else expected).float()), name
    caches.copy_blocks([], [])
