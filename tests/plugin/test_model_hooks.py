"""ModelHooks: who takes part, how answers merge, and what is refused."""

import time

import pytest
import torch

from atom_core import hookimpl
from atom_core.errors import LayoutError, PluginError
from atom_core.plugin import (
    AttentionLayer,
    CacheRequirements,
    Claim,
    GraphSupport,
    KernelTable,
    KVCacheTensor,
    LayoutPlugin,
    PluginInfo,
    Rewind,
    TensorSpec,
)
from atom_core.plugin.registry import PluginRegistry

CPU = torch.device("cpu")


class Named:
    def __init__(self, name="toy"):
        self.name = name

    @hookimpl
    def atom_plugin_info(self):
        return PluginInfo(name=self.name, summary="A plugin for a test.", contract_version=1)


class PagedLayer(AttentionLayer):
    pass


class StateLayer(AttentionLayer):
    pass


def layer(kind, name):
    made = kind()
    made.module_name = name
    return made


class Paged(Named, LayoutPlugin):
    """Owns PagedLayer: keys and values of two heads of three."""

    def layer_classes(self):
        return (PagedLayer,)

    @hookimpl
    def atom_claim_layer(self, module):
        return Claim(PagedLayer(), exact=True) if isinstance(module, torch.nn.ReLU) else None

    def paged_layout(self, layers, *, model_config, block_size, cache_dtype):
        names = tuple(one.module_name for one in layers)
        return [TensorSpec(field, (block_size, 2, 3), cache_dtype, names) for field in ("k_cache", "v_cache")]


class Stateful(Named, LayoutPlugin):
    """Owns StateLayer: five numbers per slot, which start at minus one."""

    rewind = Rewind.SLOTS

    def layer_classes(self):
        return (StateLayer,)

    @hookimpl
    def atom_claim_layer(self, module):
        return None

    def state_layout(self, layers, *, model_config, cache_dtype, num_spec_tokens):
        return [TensorSpec("h", (5,), torch.float32, tuple(one.module_name for one in layers), initial=-1.0)]


LAYERS = (layer(PagedLayer, "layers.0"), layer(StateLayer, "layers.1"), layer(PagedLayer, "layers.2"))
COMMON = {"layers": LAYERS, "model_config": None}


def hooks_of(*plugins, owners=None):
    registry = PluginRegistry.of({plugin.name: plugin for plugin in plugins})
    return registry.model_hooks([plugins[0].name] if owners is None else owners)


def both(*others):
    return hooks_of(Paged("paged"), Stateful("stateful"), *others, owners=["paged", "stateful"])


def answering(hook, answer, name="toy"):
    """A plugin that returns `answer` from `hook`, and claims layers so that it takes part as an owner only."""
    return type("Answering", (Named,), {hook: hookimpl(lambda self: answer)})(name)


REQUIREMENTS = {**COMMON, "cache_dtype": torch.float32, "num_spec_tokens": 2}
REQUIREMENTS |= {"max_num_batched_tokens": 64, "max_model_len": 128}
BLOCK = {**COMMON, "block_size": 4, "cache_dtype": torch.float32}
PAGES = {**BLOCK, "num_blocks": 7, "device": CPU}
SLOT = {**COMMON, "cache_dtype": torch.float32, "num_spec_tokens": 2}
SLOTS = {**SLOT, "num_slots": {"stateful": 6}, "device": CPU}
BIND = {**BLOCK, "kernels": KernelTable.build([], []), "num_spec_tokens": 2}


# Who takes part.


def test_owners_and_plugins_that_claim_nothing_take_part():
    class Wrapping(Named):
        @hookimpl(wrapper=True)
        def atom_claim_layer(self):
            return (yield)

    plugins = [Paged("owner"), Paged("idle"), Named("observer"), Wrapping("wrapping")]
    hooks = hooks_of(*plugins, owners=["owner"])
    assert hooks.plugins == ("owner", "observer", "wrapping")
    assert hooks.owners == {"owner"}


# How answers merge.


def test_the_cache_of_two_plugins_from_requirements_to_bound_layers():
    hooks = both()
    assert hooks.cache_requirements(**REQUIREMENTS) == {
        "paged": CacheRequirements(),
        "stateful": CacheRequirements(initial_values={"h": -1.0}),
    }
    block_bytes, slot_bytes = hooks.block_bytes(**BLOCK), hooks.per_req_cache_bytes(**SLOT)
    assert block_bytes == {"paged": 2 * 2 * 4 * 2 * 3 * 4, "stateful": 0}
    assert slot_bytes == {"paged": 0, "stateful": 5 * 4}
    assert hooks.slots_per_req(**COMMON, num_spec_tokens=2) == {"paged": 3, "stateful": 3}
    paged, state = hooks.allocate_kv_cache_tensors(**PAGES), hooks.allocate_per_req_cache(**SLOTS)
    assert {name: tuple(tensor.shape) for name, tensor in {**paged, **state}.items()} == {
        "paged.k_cache": (2, 7, 4, 2, 3),
        "paged.v_cache": (2, 7, 4, 2, 3),
        "stateful.h": (1, 6, 5),
    }
    hooks.check_allocated_bytes(paged, block_bytes, {"paged": 7, "stateful": 7})
    hooks.check_allocated_bytes(state, slot_bytes, {"stateful": 6})
    tensors = {**paged, **state}
    bound = [hooks.build_kv_cache_tensor(layer=one, tensors=tensors, **BIND) for one in LAYERS]
    assert all(one.kv_cache is cache for one, cache in zip(LAYERS, bound, strict=True))
    for tensor in tensors.values():
        tensor.zero_()
    bound[2].k_cache.fill_(1)
    bound[1].state["h"].fill_(2)
    assert paged["paged.k_cache"].sum(dim=(1, 2, 3, 4)).tolist() == [0, 7 * 4 * 2 * 3]
    assert state["stateful.h"].eq(2).all()


def test_a_plugin_may_fill_caches_with_nan_and_another_add_up_bytes_by_wrapping():
    class Poison(Named):
        @hookimpl(wrapper=True)
        def atom_allocate_kv_cache_tensors(self):
            answers = yield
            for tensors in answers:
                for tensor in tensors.values():
                    tensor.fill_(float("nan"))
            return answers

    class Adding(Named):
        total = 0

        @hookimpl(wrapper=True)
        def atom_compute_block_bytes(self):
            answers = yield
            self.total += sum(sum(answer.values()) for answer in answers)
            return answers

    adding = Adding("adding")
    hooks = both(Poison("poison"), adding)
    assert hooks.block_bytes(**BLOCK) == {"paged": 384, "stateful": 0}
    assert adding.total == 384
    assert all(tensor.isnan().all() for tensor in hooks.allocate_kv_cache_tensors(**PAGES).values())


def test_numpy_counts_are_plain_integers_afterwards():
    import numpy

    hooks = hooks_of(answering("atom_compute_block_bytes", {"toy": numpy.int64(3)}))
    assert type(hooks.block_bytes(**BLOCK)["toy"]) is int


def test_an_owner_that_names_no_slots_gets_enough_for_every_way_to_rewind():
    assert hooks_of(Named()).slots_per_req(**COMMON, num_spec_tokens=3) == {"toy": 4}


# What is refused.


@pytest.mark.parametrize(
    ("hook", "call", "answer", "message"),
    [
        ("atom_compute_block_bytes", "block", {"toy": -1}, r"returned -1 for 'toy', expected an integer of at least 0"),
        ("atom_compute_block_bytes", "block", {"toy": 1.5}, r"returned 1.5 for 'toy', expected an integer"),
        ("atom_compute_block_bytes", "block", {"toy": True}, r"returned True for 'toy', expected an integer"),
        (
            "atom_compute_block_bytes",
            "block",
            5,
            r"atom_compute_block_bytes returned 5, expected a mapping; asked: plu",
        ),
        ("atom_compute_block_bytes", "block", {"toi": 1}, r"an entry for 'toi', expected a plugin's name .*: toy; ask"),
        ("atom_compute_per_req_cache_bytes", "slot", {"toy": "1"}, r"plugin 'toy' \(not installed\): .*an integer"),
        ("atom_slots_per_req", "slots", {"toy": 0}, r"returned 0 for 'toy', expected an integer of at least 1"),
        ("atom_cache_requirements", "requirements", {"toy": {}}, r"returned {} for 'toy', expected CacheRequirements"),
        ("atom_cache_requirements", "requirements", {}, r"owns layers, but gave no cache requirements; implement atom"),
        ("atom_build_metadata", "metadata", [1], r"atom_build_metadata returned \[1\], expected a mapping"),
        ("atom_build_metadata", "metadata", {"other": 1}, r"an entry for 'other', expected a plugin's name"),
    ],
)
def test_answers_of_a_wrong_kind_say_what_who_and_expected(hook, call, answer, message):
    hooks = hooks_of(answering(hook, answer))
    calls = {
        "block": lambda: hooks.block_bytes(**BLOCK),
        "slot": lambda: hooks.per_req_cache_bytes(**SLOT),
        "slots": lambda: hooks.slots_per_req(**COMMON, num_spec_tokens=2),
        "requirements": lambda: hooks.cache_requirements(**REQUIREMENTS),
        "metadata": lambda: hooks.build_metadata(LAYERS, None, None),
    }
    with pytest.raises(PluginError, match=message) as caught:
        calls[call]()
    assert "plugin 'toy' (not installed)" in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"toy": torch.zeros(1, 7)}, "an entry for 'toy', expected 'plugin.tensor' of a plugin of this model: toy"),
        ({"other.k": torch.zeros(1, 7)}, "an entry for 'other.k', expected 'plugin.tensor'"),
        ({"toy.k": [0.0]}, r"returned \[0.0\] for 'toy.k', expected a tensor"),
        ({"toy.k": torch.zeros(7)}, r"a tensor of shape \[7\] for 'toy.k', expected \[layers, num_blocks = 7, ...\]"),
        ({"toy.k": torch.zeros(7, 1)}, r"of shape \[7, 1\] for 'toy.k', expected \[layers, num_blocks = 7, ...\]"),
    ],
)
def test_tensors_of_a_wrong_name_or_shape_are_refused(answer, message):
    hooks = hooks_of(answering("atom_allocate_kv_cache_tensors", answer))
    with pytest.raises(LayoutError, match=message):
        hooks.allocate_kv_cache_tensors(**PAGES)


def test_state_tensors_must_have_as_many_slots_as_planned():
    hooks = hooks_of(answering("atom_allocate_per_req_cache", {"toy.h": torch.zeros(1, 5)}))
    with pytest.raises(LayoutError, match=r"of shape \[1, 5\] for 'toy.h', expected \[layers, num_slots = 6, ...\]"):
        hooks.allocate_per_req_cache(**{**SLOTS, "num_slots": {"toy": 6}})


def test_two_plugins_may_not_answer_for_one_name():
    hooks = hooks_of(
        answering("atom_compute_block_bytes", {"toy": 1}),
        answering("atom_compute_block_bytes", {"toy": 2}, name="other"),
    )
    with pytest.raises(PluginError, match=r"was answered twice for 'toy'; asked: plugin 'other' .*, plugin 'toy' "):
        hooks.block_bytes(**BLOCK)


def test_a_wrapper_must_hand_on_a_list():
    class Forgetful(Named):
        @hookimpl(wrapper=True)
        def atom_compute_block_bytes(self):
            yield

    with pytest.raises(PluginError, match="a wrapper of atom_compute_block_bytes returned None, expected the list"):
        hooks_of(Forgetful()).block_bytes(**BLOCK)


def test_allocated_bytes_must_equal_the_declared():
    hooks = both()
    tensors = {"paged.k_cache": torch.zeros(1, 7, 3)}
    hooks.check_allocated_bytes(tensors, {"paged": 12}, {"paged": 7})
    with pytest.raises(LayoutError) as caught:
        hooks.check_allocated_bytes(tensors, {"paged": 16}, {"paged": 7})
    assert str(caught.value) == (
        "plugin 'paged' (not installed) allocated 84 bytes (paged.k_cache [1, 7, 3]), but declared 16 bytes x 7 = 112; "
        "LayoutPlugin derives both from one declaration"
    )
    with pytest.raises(LayoutError, match=r"allocated 0 bytes \(no tensor\), but declared 16 bytes x 7 = 112"):
        hooks.check_allocated_bytes({}, {"paged": 16}, {"paged": 7})
    with pytest.raises(LayoutError, match=r"allocated 84 bytes .*, but declared 0 bytes"):
        hooks.check_allocated_bytes(tensors, {}, {"paged": 7})


def test_a_plugin_that_rewinds_by_slots_needs_one_for_each_draft():
    hooks = both()
    requirements = hooks.cache_requirements(**REQUIREMENTS)
    hooks.check_slots({"stateful": 20}, {"stateful": 3}, requirements, 2)
    hooks.check_slots({"paged": 0}, {"paged": 1}, requirements, 2)
    overwriting = {"stateful": CacheRequirements(rewind="overwrite")}
    hooks.check_slots({"stateful": 20}, {"stateful": 1}, overwriting, 2)
    with pytest.raises(LayoutError, match="atom_slots_per_req gives it 2 for 2 drafts; expected 3"):
        hooks.check_slots({"stateful": 20}, {"stateful": 2}, requirements, 2)


def test_a_layer_needs_exactly_one_plugin_to_bind_it():
    orphan = layer(AttentionLayer, "layers.9")
    with pytest.raises(LayoutError) as caught:
        both().build_kv_cache_tensor(layer=orphan, tensors={}, **BIND)
    assert str(caught.value) == (
        "0 plugins answered atom_build_kv_cache_tensor for layer 'layers.9' of class AttentionLayer, expected its "
        "owner alone; asked: plugin 'paged' (not installed), plugin 'stateful' (not installed)"
    )
    greedy = answering("atom_build_kv_cache_tensor", KVCacheTensor(), name="greedy")
    tensors = both().allocate_kv_cache_tensors(**PAGES)
    with pytest.raises(LayoutError, match=r"2 plugins answered .* for layer 'layers.0' of class PagedLayer"):
        both(greedy).build_kv_cache_tensor(layer=LAYERS[0], tensors=tensors, **BIND)
    with pytest.raises(PluginError, match=r"returned 3 for layer 'layers.9' .*, expected a KVCacheTensor"):
        hooks_of(answering("atom_build_kv_cache_tensor", 3)).build_kv_cache_tensor(layer=orphan, tensors={}, **BIND)


# Once per step.


def test_metadata_and_observers_get_their_arguments():
    seen = []

    class Building(Named):
        @hookimpl
        def atom_build_metadata(self, layers, batch, buffers):
            return {"toy": (layers, batch, buffers)}

        @hookimpl
        def atom_step_finished(self, stats):
            seen.append(stats)

    hooks = hooks_of(Building())
    assert hooks.build_metadata(LAYERS, "batch", "buffers") == {"toy": (LAYERS, "batch", "buffers")}
    hooks.step_finished({"num_tokens": 3})
    assert seen == [{"num_tokens": 3}]


def test_a_step_without_builders_or_observers_calls_nothing():
    hooks = hooks_of(Named())
    assert hooks.build_metadata(LAYERS, None, None) == {}
    hooks.step_finished({})


def test_the_hooks_of_a_step_cost_little():
    """Measured as the best of many batches, so that a busy machine does not count."""
    hooks = hooks_of(answering("atom_build_metadata", {"toy": None}))
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(20):
            hooks.build_metadata(LAYERS, None, None)
        best = min(best, (time.perf_counter() - start) / 20)
    assert best < 20e-6


# The values that cross the contract.


def test_requirements_take_plain_strings_and_refuse_nonsense():
    requirements = CacheRequirements(rewind="never", graph_support="uniform")
    assert (requirements.rewind, requirements.graph_support) == (Rewind.NEVER, GraphSupport.UNIFORM)
    with pytest.raises(ValueError, match="sometimes"):
        CacheRequirements(rewind="sometimes")
    with pytest.raises(ValueError, match="block_size_multiple must be >= 1"):
        CacheRequirements(block_size_multiple=0)
