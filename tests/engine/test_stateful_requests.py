"""Per-request state through the whole engine: the averaging plugin against its cache-free twin."""

import math

import pytest
import torch

from atom_core.errors import CapacityError, StatefulModelTypeError
from atom_core.plugin.registry import PluginRegistry
from tests.averaging_plugin import AveragingLayer, AveragingPlugin, averaging_model, dense_generate

PROMPTS = [[1, 2, 3], [5] * 17, [7, 8] * 20, [9], list(range(16)), list(range(33))]


@pytest.fixture(scope="module")
def expected():
    model = averaging_model()
    return [dense_generate(model, prompt, 12) for prompt in PROMPTS]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_tokens": 1},
        {"prefill_chunk_tokens": 7},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "prefill_chunk_tokens": 16},
        {"scheduling_policy": "prefill_first"},
        {"scheduling_policy": "prefill_first", "max_num_batched_tokens": 20},
        {"block_size": 32},
        {"block_size": 1},
    ],
    ids=str,
)
def test_any_schedule_gives_the_tokens_of_the_whole_sequence(make_llm, greedy, expected, options):
    assert tokens(make_llm(**options).generate(PROMPTS, greedy())) == expected


def test_groups_are_reused_with_initial_values(make_llm, greedy, expected):
    llm = make_llm(max_num_seqs=2)
    assert llm.engine.plan.num_groups == 2
    for _ in range(3):
        assert tokens(llm.generate(PROMPTS, greedy())) == expected
    assert llm.stats()["cache"]["free_groups"] == 2


def test_poisoned_caches_change_nothing(make_llm, greedy, expected):
    llm = make_llm()
    caches = llm.engine.runner.states.caches
    for tensor in (*caches.paged.values(), *caches.state.values()):
        tensor.fill_(math.nan)
    assert tokens(llm.generate(PROMPTS, greedy())) == expected


def test_preempted_requests_resume_as_if_nothing_happened(make_llm, greedy):
    prompts = [[index + 1] * 100 for index in range(6)]
    model = averaging_model()
    llm = make_llm(max_model_len=160, max_blocks=24)
    outputs = llm.generate(prompts, greedy(40))
    assert llm.stats()["num_preemptions"] > 0
    assert tokens(outputs) == [dense_generate(model, prompt, 40) for prompt in prompts]


def test_state_of_an_unregistered_model_type_stops_the_startup(make_llm):
    registry = PluginRegistry.of({"averaging": AveragingPlugin(model_types=("gpt2",))})
    from atom_core import LLM

    with pytest.raises(StatefulModelTypeError, match=r"averaging.*'llama'"):
        LLM(averaging_model(), registry=registry, skip_tokenizer=True, cache_memory="2MB")


def test_too_little_memory_says_what_would_fit(make_llm):
    with pytest.raises(CapacityError, match="max_model_len"):
        make_llm(cache_memory="8KB")


def test_the_first_step_finds_a_layer_that_does_not_run(make_llm, monkeypatch):
    from atom_core.errors import EngineError

    class Skipped(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states, None

    original = averaging_model

    def with_a_skipping_layer():
        model = original()
        layer = model.model.layers[1]
        attention = layer.self_attn
        layer.forward = lambda hidden_states, **_: hidden_states
        assert attention is layer.self_attn
        return model

    from atom_core import LLM

    registry = PluginRegistry.of({"averaging": AveragingPlugin()})
    with pytest.raises(EngineError, match=r"layers\.1\.self_attn .*: 0"):
        LLM(with_a_skipping_layer(), registry=registry, skip_tokenizer=True, cache_memory="2MB")


def test_layers_are_the_plugins(make_llm):
    llm = make_llm()
    assert [type(layer) for layer in llm.engine.inspection.claimed.layers] == [AveragingLayer] * 2
