"""What the plugin answers at discovery, and which modules it takes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from gdn_models import tiny_config
from torch import nn

from atom_core.errors import LayerError
from atom_core.plugin import KernelTable
from atom_gdn.plugin import plugin

CLAIMED = {
    "lara_mini": "SplitProjectionLayer",
    "olmo_hybrid": "SeparateProjectionLayer",
    "qwen3_5_moe_text": "SplitProjectionLayer",
    "qwen3_5_text": "SplitProjectionLayer",
    "qwen3_next": "FusedProjectionLayer",
}


def meta_model(config):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def claims(model, tp_size=1):
    found = {name: plugin.atom_claim_layer(module, name, tp_size) for name, module in model.named_modules()}
    return {name: claim for name, claim in found.items() if claim is not None}


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, atom_gdn.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_model_types_are_those_of_the_claimed_classes():
    registered = plugin.atom_model_types()["gdn"]
    assert set(CLAIMED) | {"qwen3_5", "qwen3_5_moe"} == set(registered)
    assert plugin.atom_plugin_info().name == plugin.name == "gdn"


def test_ops_and_kernels_fit_together():
    owned = [[(item, "gdn") for item in items] for items in (plugin.atom_ops(), plugin.atom_kernels())]
    KernelTable.build(*owned).check_signatures()


@pytest.mark.parametrize("model_type", CLAIMED)
def test_claims_the_linear_layers_and_nothing_else(model_type):
    model = meta_model(tiny_config(model_type, layer_types=["linear_attention"] * 3 + ["full_attention"]))
    found = claims(model)
    assert list(found) == [f"model.layers.{index}.linear_attn" for index in range(3)]
    for name, claim in found.items():
        original = model.get_submodule(name)
        assert claim.exact
        assert type(claim.layer).__name__ == CLAIMED[model_type]
        assert claim.layer.state_dict().keys() == original.state_dict().keys()
        assert all(claim.layer.get_parameter(key) is value for key, value in original.named_parameters())
        assert claim.layer.training == original.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, "activation 'gelu'"),
        ({"num_v_heads": 3}, "3 value heads, expected a multiple of its 2 key heads"),
        ({"conv_kernel_size": 1}, "over 1 tokens"),
        ({"conv1d": nn.Conv1d(96, 96, 4, groups=96)}, "with a bias"),
    ],
)
def test_what_the_ops_cannot_express_is_refused(change, message):
    module = meta_model(tiny_config("qwen3_5_text")).get_submodule("model.layers.0.linear_attn")
    for name, value in change.items():
        setattr(module, name, value)
    with pytest.raises(
        LayerError, match=rf"model\.x \(Qwen3_5GatedDeltaNet\), claimed by .*atom-gdn.* has .*{message}"
    ):
        plugin.atom_claim_layer(module, "model.x", 1)


def test_a_class_of_the_same_name_from_elsewhere_is_foreign():
    foreign = type("Qwen3NextGatedDeltaNet", (nn.Module,), {})()
    assert plugin.atom_claim_layer(foreign, "model.layers.0.linear_attn", 1) is None
