"""Claims, registration, and what users read when something is missing."""

import copy

import pytest
import torch
from v4_models import build_model, make_llm

from atom_core import LLM, hookimpl
from atom_core.errors import ClaimError, ConfigError, LayerError, StatefulModelTypeError
from atom_core.plugin.registry import PluginRegistry
from atom_deepseek_v4.layer import HeavilyCompressedLayer, SparseLayer, WindowLayer
from atom_deepseek_v4.plugin import DeepseekV4Plugin, plugin


@pytest.fixture(scope="module")
def model():
    return build_model("all-kinds")


def attention(model, number=1):
    return copy.deepcopy(model.model.layers[number].self_attn)


@pytest.mark.parametrize(("number", "expected"), [(0, WindowLayer), (1, SparseLayer), (2, HeavilyCompressedLayer)])
def test_claims_each_kind_exactly(model, number, expected):
    module = attention(model, number)
    claim = plugin.atom_claim_layer(module, "model.layers.0.self_attn")
    assert claim.exact
    assert type(claim.layer) is expected
    parameters = {name: id(parameter) for name, parameter in module.named_parameters()}
    assert {name: id(parameter) for name, parameter in claim.layer.named_parameters()} == parameters


def test_leaves_other_modules_alone(model):
    class DeepseekV4Attention(torch.nn.Module):
        pass

    for module in (DeepseekV4Attention(), torch.nn.Linear(1, 1), model, model.model.layers[0].mlp):
        assert plugin.atom_claim_layer(module, "module") is None


def test_refuses_an_unknown_kind(model):
    module = attention(model)
    module.layer_type = "full_attention"
    with pytest.raises(LayerError, match=r"module \(DeepseekV4Attention\).*'full_attention'; known are sliding"):
        plugin.atom_claim_layer(module, "module")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module.add_module("gate", torch.nn.Linear(1, 1)), "in: gate;"),
        (lambda module: module.compressor.add_module("extra", torch.nn.Linear(1, 1)), r"in: compressor\.extra;"),
        (lambda module: delattr(module.compressor.indexer, "scorer"), r"in: compressor\.indexer\.scorer;"),
        (lambda module: setattr(module, "sliding_window", 0), "sliding_window 0"),
    ],
    ids=["part", "compressor-part", "missing-part", "window"],
)
def test_refuses_what_its_class_is_not_known_to_have(model, change, message):
    module = attention(model)
    change(module)
    with pytest.raises(LayerError, match=message):
        plugin.atom_claim_layer(module, "module")


class Forgetful(DeepseekV4Plugin):
    """Without the line that registers the model type."""

    @hookimpl
    def atom_model_types(self):
        return {}


def test_without_registration_the_startup_fails_before_weights_load(model):
    with pytest.raises(StatefulModelTypeError) as error:
        LLM(model, registry=PluginRegistry.of({"deepseek_v4": Forgetful()}), skip_tokenizer=True, cache_memory="16MB")
    assert str(error.value) == (
        "plugin 'deepseek_v4' (not installed) has 12544 bytes of per-request state for model type 'deepseek_v4', which "
        "it did not register; registered: none. Requests are marked stateful from the registered model types alone: "
        "these would get no slot and read another request's state. Add 'deepseek_v4' to what its atom_model_types "
        'returns: {"deepseek_v4": ["deepseek_v4"]}'
    )


def test_without_the_plugin_the_error_names_what_to_install(model):
    with pytest.raises(ClaimError, match=r"DeepseekV4Attention has no owner.*run `pip install atom-deepseek-v4`"):
        LLM(copy.deepcopy(model), registry=PluginRegistry.of({}), skip_tokenizer=True, cache_memory="16MB")


def test_a_block_size_that_cuts_windows_is_refused(model):
    with pytest.raises(ConfigError, match="deepseek_v4 needs a multiple of 16"):
        make_llm(model, block_size=24)
