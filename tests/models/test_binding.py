"""Every layer has exactly one owner, on real models of transformers and real installed distributions."""

import pytest
import torch

from atom_core import LLM, EngineConfig, SamplingParams
from atom_core.engine.startup import inspect_model
from atom_core.errors import ClaimError, DiscoveryError, LayerError, StatefulModelTypeError
from atom_core.models.binding import claim_layers, register_attention_interface
from atom_core.plugin.registry import PluginRegistry
from tests.averaging_plugin import AveragingLayer, AveragingPlugin, averaging_model
from tests.plugin.sites import Site
from tests.tiny_models import tiny_config

FORGETFUL = """
from atom_core import hookimpl
from tests.averaging_plugin import AveragingPlugin


class Forgetful(AveragingPlugin):
    @hookimpl
    def atom_model_types(self):
        return {"averaging": ["gpt2"]}


plugin = Forgetful()
"""


def inspect(config, registry, **options):
    return inspect_model(EngineConfig(model=config, random_weights=0, cache_memory="64MB", **options), registry)


def test_a_layer_that_nobody_claims_is_named_with_the_package_to_install(tmp_path):
    site = Site(tmp_path)
    site.install_plugin("other")
    registry = site.discover()
    with pytest.raises(ClaimError) as error:
        inspect(tiny_config("deepseek_v3"), registry)
    message = str(error.value)
    assert "'model.layers.0.self_attn' of class DeepseekV3Attention has no owner" in message
    assert "pip install atom-mla" in message


def test_a_recurrent_mixer_beside_a_claimed_attention_is_refused():
    registry = PluginRegistry.discover(only=["mha"])
    with pytest.raises(ClaimError, match=r"mamba' of class FalconH1Mixer has no owner: it takes .*keeps state"):
        inspect(tiny_config("falcon_h1"), registry)


def test_a_blocked_plugin_is_named_where_it_is_needed():
    registry = PluginRegistry.discover(without=["mha"])
    with pytest.raises(ClaimError, match=r"LlamaAttention has no owner.*'mha'.*--no-plugin mha"):
        inspect(tiny_config("llama"), registry)


def test_a_broken_plugin_is_named_where_it_is_needed(tmp_path):
    site = Site(tmp_path)
    site.install_plugin("mha", "import a_module_that_is_not_there\n")
    with pytest.raises(ClaimError, match=r"LlamaAttention has no owner.*'mha'.*a_module_that_is_not_there"):
        inspect(tiny_config("llama"), site.discover())


def test_an_installed_plugin_that_forgot_its_model_type_stops_before_weights(tmp_path, monkeypatch):
    site = Site(tmp_path)
    site.install_plugin("averaging", FORGETFUL)
    registry = site.discover()
    monkeypatch.setattr("atom_core.engine.llm_engine.load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(StatefulModelTypeError) as error:
        LLM(averaging_model().config, registry=registry, random_weights=0, skip_tokenizer=True, cache_memory="2MB")
    for part in ("'averaging'", "atom-averaging 0.1.0", "'llama'", "registered: gpt2"):
        assert part in str(error.value)


def test_two_exact_claims_name_both():
    class Rival(AveragingPlugin):
        name = "rival"

        from atom_core import hookimpl

        @hookimpl
        def atom_plugin_info(self):
            from atom_core.plugin import PluginInfo

            return PluginInfo("rival", "a rival", contract_version=1)

        @hookimpl
        def atom_model_types(self):
            return {"rival": ["llama"]}

    registry = PluginRegistry.of({"averaging": AveragingPlugin(), "rival": Rival()})
    with pytest.raises(ClaimError, match=r"'averaging'.*'rival'"):
        inspect(averaging_model().config, registry)


def test_an_exact_claim_beats_the_generic_one():
    from atom_mha.plugin import plugin

    registry = PluginRegistry.of({"averaging": AveragingPlugin(), "mha": plugin})
    inspection = inspect(averaging_model().config, registry)
    assert set(inspection.claimed.owners.values()) == {"averaging"}


def test_modules_are_claimed_by_identity_not_by_number():
    model = averaging_model()
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
    claimed = claim_layers(model, PluginRegistry.of({"averaging": AveragingPlugin()}), model.config, 1)
    assert [layer.module_name for layer in claimed.layers] == [f"model.layers.{index}.self_attn" for index in range(2)]


def test_a_name_to_compile_that_is_no_method_stops(monkeypatch):
    monkeypatch.setattr(AveragingLayer, "compiled", ("forward", "projekt"))
    with pytest.raises(LayerError, match=r"layers.0.self_attn: AveragingLayer names 'projekt' in `compiled`"):
        claim_layers(
            averaging_model(), PluginRegistry.of({"averaging": AveragingPlugin()}), averaging_model().config, 1
        )


def test_a_call_from_an_unclaimed_module_stops():
    from transformers import AttentionInterface

    register_attention_interface()
    attend = AttentionInterface()["atom"]
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(LayerError, match="was not claimed"):
        attend(torch.nn.Linear(1, 1), states, states, states, None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attention_mask": torch.zeros(1)}, "passed an attention mask"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"indices": torch.zeros(1)}, "'indices'.*does not know"),
        ({"key_tokens": 9}, "the step's tokens"),
    ],
)
def test_a_call_with_something_unknown_stops(call, message):
    """The second layer's module is changed to pass something new to the attention interface."""
    from transformers import AttentionInterface

    from atom_mha.plugin import plugin

    model = averaging_model()
    attention = model.model.layers[1].self_attn

    def forward(hidden_states, **_):
        tokens = hidden_states.shape[1]
        query = torch.zeros(1, 4, tokens, 8)
        key = torch.zeros(1, 2, call.get("key_tokens", tokens), 8)
        keywords = {name: value for name, value in call.items() if name not in ("attention_mask", "key_tokens")}
        mask = call.get("attention_mask")
        output, _ = AttentionInterface()["atom"](attention, query, key, key, mask, scaling=1.0, **keywords)
        return output.reshape(1, tokens, -1), None

    attention.forward = forward
    with pytest.raises(LayerError, match=message):
        LLM(model, registry=PluginRegistry.of({"mha": plugin}), skip_tokenizer=True, cache_memory="2MB")


def test_a_plugin_that_is_needed_by_name_says_why_it_is_not_there(tmp_path):
    site = Site(tmp_path)
    site.install_plugin("bad", "raise RuntimeError('no luck')\n")
    with pytest.raises(DiscoveryError, match="no luck"):
        site.discover().require("bad")


def test_a_forced_kernel_that_refuses_says_why():
    from atom_core.errors import KernelError

    with pytest.raises(KernelError, match=r"mha\.decode"):
        LLM(
            averaging_model(),
            registry=PluginRegistry.discover(only=["mha"]),
            skip_tokenizer=True,
            cache_memory="2MB",
            kernels={"mha.decode": "no_such_kernel"},
        )


def test_an_unused_plugin_does_not_disturb():
    registry = PluginRegistry.discover(only=["mha"])
    llm = LLM(averaging_model(), registry=registry, skip_tokenizer=True, cache_memory="2MB")
    params = SamplingParams(max_tokens=3, temperature=0)
    assert len(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids) == 3


def test_a_generic_claim_where_a_dedicated_plugin_is_not_at_hand_is_a_warning():
    config = tiny_config("mimo_v2_flash")
    (warning,) = inspect(config, PluginRegistry.discover(without=["mimo"])).warnings
    assert "MiMoV2FlashAttention is served by the generic attention of plugin 'mha'" in warning
    assert "atom-mimo is made for it" in warning
    assert "is blocked: left out by --no-plugin mimo" in warning
    assert inspect(config, PluginRegistry.discover()).warnings == ()
