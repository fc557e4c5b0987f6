"""Who is claimed, who is refused and why, and what stops a call."""

import importlib
import inspect
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from atom_core.errors import LayerError
from atom_mla.families import FAMILIES, REFUSED
from atom_mla.plugin import plugin


def attention(model):
    return model.model.layers[0].self_attn


def test_the_table_of_contents_does_not_import_torch():
    code = "import sys, atom_mla.plugin; raise SystemExit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_latent_attention_class_of_transformers_is_known():
    """A new one must be tried and entered as claimed or refused."""
    models = Path(transformers.__file__).parent / "models"
    found = set()
    for path in models.glob("*/modeling_*.py"):
        for name, body in re.findall(r"^class (\w+)\(nn\.Module\):\n(.*?)(?=^\S|\Z)", path.read_text(), re.M | re.S):
            if "self.kv_a_proj_with_mqa =" in body:
                found.add((path.parent.name, name))
    assert found <= FAMILIES.keys() | REFUSED.keys()
    assert {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"} <= {name for name, _ in found}


def test_known_classes_are_claimed_exactly(tools):
    claim = plugin.atom_claim_layer(attention(tools.build_model("v3")), "layers.0", 1)
    assert claim.exact
    assert plugin.atom_claim_layer(nn.Linear(2, 2), "linear", 1) is None


def test_a_subclass_with_the_same_forward_is_claimed_and_one_with_its_own_is_not(tools):
    class Same(modeling_deepseek_v3.DeepseekV3Attention):
        pass

    class Other(modeling_deepseek_v3.DeepseekV3Attention):
        def forward(self, *arguments, **keywords):
            return super().forward(*arguments, **keywords)

    config = tools.build_config("v3")
    assert plugin.atom_claim_layer(Same(config, 0), "same", 1).exact
    assert plugin.atom_claim_layer(Other(config, 0), "other", 1) is None


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """Makes an attention class that transformers does not have: DeepSeek-V3's under another name, with a change."""

    def make(old="", new=""):
        source = inspect.getsource(modeling_deepseek_v3).replace("DeepseekV3", "Newcomer")
        source = source.replace("from ... import", "from transformers import").replace("from ...", "from transformers.")
        source = source.replace("NewcomerConfig", "DeepseekV3Config")
        source = source.replace("from .configuration", "from transformers.models.deepseek_v3.configuration")
        assert old in source
        name = f"modeling_newcomer_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(source.replace(old, new) if old else source)
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name).NewcomerAttention

    return make


def test_an_unknown_class_with_a_known_ones_code_is_claimed_generically(tools, newcomer):
    module = newcomer()(tools.build_config("v3"), 0)
    claim = plugin.atom_claim_layer(module, "newcomer", 1)
    assert claim is not None
    assert not claim.exact


@pytest.mark.parametrize(
    "change",
    [
        ("query_states = torch.cat((q_pass, q_rot), dim=-1)", "query_states = 2 * torch.cat((q_pass, q_rot), dim=-1)"),
        ("q2 * cos + q1 * sin", "q2 * cos - q1 * sin"),
        ("k_rot.expand(-1, k_nope.shape[1], -1, -1)", "k_rot.expand(-1, k_nope.shape[1], -1, -1) + 1"),
    ],
    ids=["forward", "rotary", "expand_kv"],
)
def test_an_unknown_class_with_other_code_is_foreign(tools, newcomer, change):
    module = newcomer(*change)(tools.build_config("v3"), 0)
    assert plugin.atom_claim_layer(module, "newcomer", 1) is None


def test_known_classes_that_cannot_run_are_refused_with_the_reason():
    config = transformers.HYV4Config(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
    with torch.device("meta"):
        module = transformers.models.hy_v4.modeling_hy_v4.HYV4Attention(config, 0)
    with pytest.raises(LayerError, match=r"HYV4Attention.*attention sinks"):
        plugin.atom_claim_layer(module, "layers.0", 1)


def test_a_part_that_the_class_did_not_have_is_refused(tools):
    module = attention(tools.build_model("v3"))
    module.gate_proj = nn.Linear(2, 2)
    with pytest.raises(LayerError, match="gate_proj"):
        plugin.atom_claim_layer(module, "layers.0", 1)
    module = attention(tools.build_model("v3"))
    module.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(LayerError, match="sinks"):
        plugin.atom_claim_layer(module, "layers.0", 1)


def test_hybrids_whose_mixers_share_names_are_refused_on_several_ranks(tools):
    module = attention(tools.build_model("kimi-linear-full"))
    with pytest.raises(LayerError, match="cannot be sharded over 2 ranks"):
        plugin.atom_claim_layer(module, "layers.0", 2)


@pytest.mark.parametrize("name", ["v3", "v32"])
@pytest.mark.parametrize(
    ("keyword", "value"), [("cache", object()), ("past_key_values", object()), ("attention_mask", 1), ("novelty", 0)]
)
def test_keywords_that_would_change_the_result_stop_the_call(tools, name, keyword, value):
    driver = tools.Driver(tools.build_model(name))
    layer = attention(driver.model)
    driver.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, arguments, keywords: (arguments, {**keywords, keyword: value}), with_kwargs=True
    )
    with pytest.raises(LayerError, match=keyword):
        driver.run([], [(driver.request(8), [1, 2, 3])])
    assert type(layer).__name__ in ("LatentLayer", "SparseLatentLayer")


def test_hidden_states_that_are_not_the_steps_tokens_stop_the_call(tools):
    driver = tools.Driver(tools.build_model("v3"))
    layer = attention(driver.model)
    driver.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, arguments, keywords: (arguments, {**keywords, "hidden_states": torch.zeros(1, 2, 32)}),
        with_kwargs=True,
    )
    with pytest.raises(LayerError, match=re.escape(f"{layer.module_name} (DeepseekV3Attention) got hidden states")):
        driver.run([], [(driver.request(8), [1, 2, 3])])


def test_the_sharding_plan_covers_every_projection_that_has_heads(tools):
    assert plugin.atom_tensor_parallel_plan(tools.build_config("v3"), 1) == {}
    plan = plugin.atom_tensor_parallel_plan(tools.build_config("v3"), 2)
    assert plan == {
        "model.layers.*.self_attn.q_b_proj": "colwise",
        "model.layers.*.self_attn.kv_b_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }
    assert "model.layers.*.self_attn.q_proj" in plugin.atom_tensor_parallel_plan(tools.build_config("v2-lite"), 2)
    assert "model.layers.*.self_attn.q_gate_proj" in plugin.atom_tensor_parallel_plan(tools.build_config("axk2"), 2)
    assert "model.layers.*.self_attn.*.o_proj" in plugin.atom_tensor_parallel_plan(tools.build_config("longcat"), 2)
    assert plugin.atom_tensor_parallel_plan(tools.build_config("kimi-linear-full"), 2) == {}
