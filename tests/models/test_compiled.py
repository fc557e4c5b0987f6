"""What lies between the kernels is compiled: once for all layers of a kind, and no trace of it stays outside."""

from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional

from atom_core import LLM, SamplingParams
from atom_core.engine.batch_builder import StepShape
from atom_core.models.binding import ClaimedLayers
from atom_core.models.compiled import CompiledBlocks
from atom_core.models.fusion import prepare_linears
from atom_core.plugin import Kernel, KernelTable
from atom_core.plugin.core_ops import CORE_OPS
from tests.tiny_models import reference_generate, tiny_model

PROMPTS = [[3, 5, 8, 13, 21], [7], [index * index % 120 for index in range(19)]]


@pytest.fixture
def graphs(monkeypatch):
    """Graphs by the name of the function that was compiled; torch's own code runs in place of compiled code."""
    compile_function = torch.compile
    found = {}

    def compile_and_count(function, *, dynamic, backend):
        mine = found.setdefault(function.__qualname__, [])

        def count(graph, inputs):
            mine.append(graph)
            return backend(graph, inputs)

        return compile_function(function, dynamic=dynamic, backend=count)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, config_patches: graph.forward)
    monkeypatch.setattr(torch, "compile", compile_and_count)
    torch._dynamo.reset()
    return found


def test_compiled_parts_of_replaced_layers_change_no_token(graphs):
    expected = reference_generate(tiny_model("deepseek_v2"), PROMPTS, 5)
    options = {"cache_memory": "128MB", "max_model_len": 64, "max_num_batched_tokens": 64}
    llm = LLM(tiny_model("deepseek_v2"), skip_tokenizer=True, **options)
    runner = llm.engine.runner
    runner.use_graphs([StepShape(1, 1), StepShape(4, 1)], capture=False)
    layers = [layer for layer in runner._layers if isinstance(layer, torch.nn.Module)]
    kind = type(layers[0])
    before = [getattr(kind, name) for name in ("forward", *kind.compiled)]
    with CompiledBlocks(ClaimedLayers(runner._layers, {}, {}), runner._model.model.layers):
        found = llm.generate(PROMPTS, SamplingParams(max_tokens=5, temperature=0))
        assert isinstance(layers[0].project, MethodType)
    assert [list(output.outputs[0].token_ids) for output in found] == expected
    assert [getattr(kind, name) for name in ("forward", *kind.compiled)] == before
    assert len(layers) > 3
    for name in kind.compiled:
        compiled = graphs[getattr(kind, name).__qualname__]
        assert 1 <= len(compiled) <= 3, f"{name}: once for one token and for several, whatever the number of layers"


def double_linears(graph):
    for node in [node for node in graph.nodes if node.target is functional.linear]:
        with graph.inserting_after(node):
            double = graph.call_function(torch.mul, (node, 2))
        node.replace_all_uses_with(double, delete_user_cb=lambda user, double=double: user is not double)


@torch.no_grad()
def test_a_kernel_may_change_the_graphs_that_call_it(graphs):
    brought = Kernel("core.linear_row", "by_hand", "torch.nn.functional:linear", joins=f"{__name__}:double_linears")
    kernels = KernelTable.build([(op, "core") for op in CORE_OPS], [(brought, "us")])
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    states = torch.randn(1, 4)
    expected = 2 * blocks[1](2 * blocks[0](states))
    for block in blocks:
        prepare_linears(block, kernels)
    with CompiledBlocks(ClaimedLayers((), {}, {}), blocks):
        torch.testing.assert_close(blocks[1](blocks[0](states)), expected)
