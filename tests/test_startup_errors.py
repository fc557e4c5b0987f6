"""Startups that fail before weights load, and their texts in docs/plugins/stateful.md.

Each runs the whole startup on a model folder that has a config and no weights: whatever is said, is said before they
would be read.
"""

import re
from pathlib import Path

import pytest

from atom_core import LLM
from atom_core.errors import AtomError
from tests.plugin.sites import Site
from tests.tiny_models import tiny_config

PAGE = Path(__file__).parents[1] / "docs" / "plugins" / "stateful.md"

FORGETFUL = """
from atom_core import hookimpl
from {module} import {plugin_class}

class Forgetful({plugin_class}):
    @hookimpl
    def atom_model_types(self):
        return {{{model_types}}}

plugin = Forgetful()
"""


@pytest.fixture
def site(tmp_path):
    """The distribution atom-mha as it is, and nothing else."""
    site = Site(tmp_path / "site")
    site.install("atom-mha", {"mha": "atom_mha.plugin:plugin"}, {})
    return site


def install_forgetful(site, name, module, plugin_class, model_types=""):
    """Install the plugin as its distribution would be, had its author forgotten to register model types."""
    source = FORGETFUL.format(module=module, plugin_class=plugin_class, model_types=model_types)
    site.install(f"atom-{name}", {name: f"forgetful_{name}:plugin"}, {f"forgetful_{name}.py": source})


def refusal(registry, model_type, folder):
    """What the startup says about a tiny model of the type."""
    tiny_config(model_type).save_pretrained(folder)
    with pytest.raises(AtomError) as caught:
        LLM(str(folder), registry=registry, skip_tokenizer=True, device="cpu", dtype="float32", memory="1GB")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return str(caught.value)


def test_a_stateful_plugin_that_did_not_register_the_model_type(site, tmp_path):
    install_forgetful(site, "gdn", "atom_gdn.plugin", "GdnPlugin")
    install_forgetful(site, "mimo", "atom_mimo.plugin", "MimoPlugin")
    registry = site.discover()
    check("gdn", refusal(registry, "qwen3_next", tmp_path / "next"))
    check("mimo", refusal(registry, "mimo_v2_flash", tmp_path / "mimo"))


def test_a_third_party_that_registered_another_model_type(site, tmp_path):
    types = "'averaging': ['gpt2']"
    install_forgetful(site, "averaging", "tests.averaging_plugin", "AveragingPlugin", types)
    check("averaging", refusal(site.discover(), "llama", tmp_path / "llama"))


def test_the_plugin_is_not_installed(site, tmp_path):
    registry = site.discover()
    check("missing-mla", refusal(registry, "deepseek_v3", tmp_path / "v3"))
    check("missing-gdn", refusal(registry, "qwen3_next", tmp_path / "next"))


def test_the_plugin_is_broken(site, tmp_path):
    site.install("atom-mla", {"mla": "broken_mla:plugin"}, {"broken_mla.py": "import flash_mla_kernels\n"})
    check("broken", refusal(site.discover(), "deepseek_v3", tmp_path / "v3"))


def test_the_plugin_is_blocked(site, tmp_path):
    site.install("atom-mla", {"mla": "atom_mla.plugin:plugin"}, {})
    check("blocked", refusal(site.discover(without=("mla",)), "deepseek_v3", tmp_path / "v3"))


def check(name, message):
    """The page shows the message word for word, below `<!-- NAME -->`."""
    found = re.search(rf"^<!-- {name} -->\n```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert (found.group(1) if found else None) == message, name


def test_every_text_of_the_page_is_checked():
    shown = re.findall(r"^<!-- ([\w-]+) -->\n```text", PAGE.read_text(encoding="utf-8"), re.M)
    checked = re.findall(r'\bcheck\("([\w-]+)"', Path(__file__).read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(checked)
    assert PAGE.read_text(encoding="utf-8").count("```text") == len(shown)
