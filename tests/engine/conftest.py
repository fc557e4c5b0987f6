import pytest

from atom_core import LLM, SamplingParams
from atom_core.plugin.registry import PluginRegistry
from tests.averaging_plugin import AveragingPlugin, averaging_model


@pytest.fixture(scope="session")
def registry():
    return PluginRegistry.of({"averaging": AveragingPlugin()})


@pytest.fixture
def make_llm(registry):
    """Make an engine on the averaging model; every call gets fresh weights of the same seed."""

    def make(**options):
        options = {"skip_tokenizer": True, "cache_memory": "2MB", **options}
        return LLM(averaging_model(), registry=registry, **options)

    return make


@pytest.fixture
def greedy():
    def params(max_tokens=12, **fields):
        return SamplingParams(max_tokens=max_tokens, temperature=0, **fields)

    return params
