"""LayoutPlugin: what is declared is what is allocated, for every layout."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from atom_core import hookimpl
from atom_core.errors import DiscoveryError
from atom_core.plugin import (
    AttentionLayer,
    CacheRequirements,
    KernelTable,
    LayoutPlugin,
    PluginInfo,
    Rewind,
    TensorSpec,
)
from atom_core.plugin.registry import PluginRegistry


class DrawnLayer(AttentionLayer):
    def __init__(self, name):
        self.module_name = name


class ForeignLayer(AttentionLayer):
    module_name = "foreign"


class Drawn(LayoutPlugin):
    """Declares whatever layout a test drew."""

    name = "drawn"

    def __init__(self, paged=(), state=(), rewind=Rewind.SLOTS):
        self.paged, self.state, self.rewind = paged, state, rewind

    @hookimpl
    def atom_plugin_info(self):
        return PluginInfo(name="drawn", summary="A drawn layout.", contract_version=1)

    def layer_classes(self):
        return (DrawnLayer,)

    def paged_layout(self, layers, *, model_config, block_size, cache_dtype):
        return self.paged

    def state_layout(self, layers, *, model_config, cache_dtype, num_spec_tokens):
        return self.state

    def requirements(self, layers, **_):
        return CacheRequirements(block_size_multiple=8)


NAMES = tuple(f"layers.{index}" for index in range(4))
LAYERS = (*(DrawnLayer(name) for name in NAMES), ForeignLayer())
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64)
COMMON = {"layers": LAYERS, "model_config": None}

specs = st.lists(
    st.builds(
        TensorSpec,
        field=st.sampled_from(["k_cache", "v_cache", "h", "h_deep"]),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
        dtype=st.sampled_from(DTYPES),
        layers=st.lists(st.sampled_from(NAMES), unique=True).map(tuple),
        initial=st.sampled_from([0.0, 1.0]),
    ),
    max_size=5,
)


def hooks_of(plugin):
    return PluginRegistry.of({"drawn": plugin}).model_hooks(["drawn"])


@settings(deadline=None, max_examples=60)
@given(specs, specs, st.integers(0, 6), st.integers(0, 6), st.sampled_from(list(Rewind)), st.integers(0, 3))
def test_declared_bytes_are_the_allocated_bytes(paged, state, num_blocks, num_slots, rewind, num_spec_tokens):
    hooks = hooks_of(Drawn(paged, state, rewind))
    common = {**COMMON, "cache_dtype": torch.bfloat16}
    block_bytes = hooks.block_bytes(**common, block_size=8)
    slot_bytes = hooks.per_req_cache_bytes(**common, num_spec_tokens=num_spec_tokens)
    pages = hooks.allocate_kv_cache_tensors(**common, num_blocks=num_blocks, block_size=8, device=torch.device("cpu"))
    slots = hooks.allocate_per_req_cache(
        **common, num_slots={"drawn": num_slots}, num_spec_tokens=num_spec_tokens, device=torch.device("cpu")
    )
    for tensors, unit, count in ((pages, block_bytes, num_blocks), (slots, slot_bytes, num_slots)):
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors.values()) == unit["drawn"] * count
        hooks.check_allocated_bytes(tensors, unit, {"drawn": count})
    assert (len(pages), len(slots)) == (len(paged), len(state))
    expected = 1 + num_spec_tokens if rewind is Rewind.SLOTS else 1
    assert hooks.slots_per_req(**COMMON, num_spec_tokens=num_spec_tokens) == {"drawn": expected}


def bind(plugin):
    hooks = hooks_of(plugin)
    common = {**COMMON, "cache_dtype": torch.float32}
    cpu = torch.device("cpu")
    tensors = hooks.allocate_kv_cache_tensors(**common, num_blocks=3, block_size=8, device=cpu)
    tensors |= hooks.allocate_per_req_cache(**common, num_slots={"drawn": 3}, num_spec_tokens=0, device=cpu)
    for layer in LAYERS[:-1]:
        hooks.build_kv_cache_tensor(
            layer=layer,
            tensors=tensors,
            kernels=KernelTable.build([], []),
            block_size=8,
            num_spec_tokens=0,
            **common,
        )
    return tensors


def test_rows_of_different_layers_never_overlap():
    spec = TensorSpec("k_cache", (2,), torch.float32, NAMES)
    tensors = bind(Drawn(paged=[spec], state=[TensorSpec("h", (), torch.float32, NAMES[::-1])]))
    for value, layer in enumerate(LAYERS[:-1], start=1):
        layer.kv_cache.k_cache.fill_(value)
        layer.kv_cache.state["h"].fill_(value)
    assert tensors["drawn.k_cache"][:, 0, 0].tolist() == [1, 2, 3, 4]
    assert tensors["drawn.h"][:, 0].tolist() == [4, 3, 2, 1]


def test_layers_of_different_shapes_share_a_field_in_separate_tensors():
    wide = TensorSpec("k_cache", (8,), torch.float32, NAMES[:1])
    narrow = TensorSpec("k_cache", (2,), torch.float32, NAMES[1:])
    tensors = bind(Drawn(paged=[wide, narrow]))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "drawn.k_cache.0": (1, 3, 8),
        "drawn.k_cache.1": (3, 3, 2),
    }
    assert [tuple(layer.kv_cache.k_cache.shape) for layer in LAYERS[:-1]] == [(3, 8), (3, 2), (3, 2), (3, 2)]


def test_requirements_are_completed_from_class_and_layout():
    state = [TensorSpec("h", (2,), torch.float32, NAMES, initial=-1.0), TensorSpec("c", (), torch.float32, NAMES)]
    requirements = hooks_of(Drawn(state=state, rewind=Rewind.OVERWRITE)).cache_requirements(
        **COMMON, cache_dtype=torch.float32, num_spec_tokens=0, max_num_batched_tokens=8, max_model_len=8
    )
    assert requirements["drawn"] == CacheRequirements(
        block_size_multiple=8, rewind=Rewind.OVERWRITE, initial_values={"h": -1.0, "c": 0.0}
    )


def test_without_layers_nothing_is_declared_or_asked():
    class Careful(Drawn):
        def paged_layout(self, layers, **arguments):
            raise AssertionError(f"asked about {layers}")

    hooks = hooks_of(Careful())
    foreign = {"layers": [ForeignLayer()], "model_config": None, "cache_dtype": torch.float32}
    assert hooks.block_bytes(**foreign, block_size=8) == {"drawn": 0}


def test_overriding_a_hook_of_the_base_class_without_decorating_it_is_caught():
    class Overriding(Drawn):
        def atom_compute_block_bytes(self, layers):
            return {"drawn": 1}

    with pytest.raises(DiscoveryError, match="atom_compute_block_bytes is not decorated with @hookimpl"):
        PluginRegistry.of({"drawn": Overriding()})
