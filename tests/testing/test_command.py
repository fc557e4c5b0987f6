"""`atom conformance`: how it finds a plugin's models, and what it prints."""

import importlib
import json

import pytest
from typer.testing import CliRunner

from atom_core.cli.main import app
from atom_core.errors import ConfigError, DiscoveryError
from atom_core.plugin import PluginRegistry
from atom_core.testing import runner
from tests.plugin.sites import Site, importable, plugin_source

KERNELS = """
@hookimpl
def atom_ops(self):
    from atom_core.plugin import Op
    return [Op("tiny.double", "atom_tiny.kernels:double", {"float32": (0.0, 1e-6)}, "atom_tiny.kernels:samples")]

@hookimpl
def atom_kernels(self):
    from atom_core.plugin import Kernel
    needs_cuda = lambda device, dtypes, facts: device.type == "cuda" or "runs on CUDA devices only"
    return [
        Kernel("tiny.double", "added", "atom_tiny.kernels:added"),
        Kernel("tiny.double", "quick", "atom_tiny.kernels:added", needs_cuda),
    ]
"""
FUNCTIONS = """
import torch

def double(x):
    return x * 2

def added(x):
    return x + x + {error}

def samples(device, dtype, seed):
    return [{{"x": torch.ones(3, device=device, dtype=dtype)}}]
"""
CONFORMANCE = """
from atom_core.testing import AttentionConformance
from atom_tiny.plugin import plugin as tiny_plugin

class TestTiny(AttentionConformance):
    plugin = tiny_plugin

    @classmethod
    def configs(cls):
        return {}
"""


def install(path, error=0, conformance=CONFORMANCE):
    files = {
        "atom_tiny/__init__.py": "",
        "atom_tiny/plugin.py": plugin_source("tiny", KERNELS),
        "atom_tiny/kernels.py": FUNCTIONS.format(error=error),
        "atom_tiny/conformance.py": conformance,
    }
    if not conformance:
        del files["atom_tiny/conformance.py"]
    Site(path).install("atom-tiny", {"tiny": "atom_tiny.plugin:plugin"}, files)
    return importable(path)


def test_a_passing_plugin_gives_0_and_says_what_was_not_tried(tmp_path):
    with install(tmp_path):
        result = CliRunner().invoke(app, ["conformance", "tiny"], env={"COLUMNS": "200"}, standalone_mode=False)
    assert result.return_value == 0
    assert "tiny: conformance, quick profile" in result.output
    row = next(line for line in result.output.splitlines() if "I12" in line)
    assert "passed" in row
    assert "tiny.double quick: runs on CUDA devices only" in row


def test_a_failing_plugin_gives_1_and_the_report(tmp_path):
    with install(tmp_path, error=0.5):
        result = CliRunner().invoke(app, ["conformance", "tiny", "--json"], standalone_mode=False)
    assert result.return_value == 1
    (outcome,) = [outcome for outcome in json.loads(result.stdout) if outcome["result"] == "failed"]
    assert outcome["report"] == (
        "I12 kernels: added of tiny.double, float32, sample 0 of seed 0: the result differs from the reference at "
        "(0,), max error 0.5"
    )


def test_what_cannot_be_found_is_an_error(tmp_path):
    with pytest.raises(DiscoveryError, match="'nobody' is not installed"):
        runner.find_module("nobody")
    with (
        install(tmp_path / "bare", conformance=""),
        pytest.raises(ConfigError, match="has no module"),
    ):
        runner.find_module("tiny")
    empty = "from atom_core.testing import AttentionConformance\n"
    with install(tmp_path / "empty", conformance=empty), pytest.raises(ConfigError, match="no subclass"):
        runner.find_module("tiny")
    site = Site(tmp_path / "flat")
    site.install_plugin("flat")
    with importable(site.root), pytest.raises(ConfigError, match="which is in no package"):
        runner.find_module("flat")


def test_every_plugin_of_this_repository_ships_its_models():
    names = [record.name for record in PluginRegistry.discover().records]
    assert {"mha", "mla", "gdn", "mimo", "deepseek_v4"} <= set(names)
    for name in ("mha", "mla", "gdn", "mimo", "deepseek_v4"):
        module = runner.find_module(name)
        assert len(importlib.import_module(module.__name__).__all__) == 1
