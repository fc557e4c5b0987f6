"""Padding a decode step to a captured shape changes nothing; a replay equals the step run eagerly."""

import logging

import numpy as np
import pytest
import torch

from atom_core import LLM, SamplingParams
from atom_core.engine.batch_builder import StepShape
from atom_core.engine.graphs import StepGraphs, ladder, least_support, step_shapes
from atom_core.engine.sampling import SamplingParams as Params
from atom_core.engine.scheduled_batch import ScheduledBatch
from atom_core.engine.sequence import Sequence
from atom_core.plugin import CacheRequirements, GraphSupport
from tests.engine.proposers import Replay
from tests.tiny_models import reference_generate, tiny_model

MODEL_TYPES = ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "mimo_v2_flash"]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def prompt_of(length, seed=0):
    return [(index * index * 7 + index * 3 + seed) % 120 for index in range(length)]


PROMPTS = [prompt_of(3), prompt_of(17, 1), prompt_of(40, 2), [5, 6, 7] * 9, prompt_of(1)]


def make_llm(model_type, **options):
    defaults = {"cache_memory": "128MB", "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return LLM(tiny_model(model_type), skip_tokenizer=True, **{**defaults, **options})


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("max_num_seqs", "rungs"),
    [
        (1, (1,)),
        (5, (1, 2, 4, 5)),
        (16, (1, 2, 4, 8, 16)),
        (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
        (200, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200)),
    ],
)
def test_the_ladder(max_num_seqs, rungs):
    assert ladder(max_num_seqs) == rungs


def test_the_least_support_wins():
    def needs(support):
        return CacheRequirements(graph_support=support)

    assert least_support({"a": needs("uniform"), "b": needs("decode")}) is GraphSupport.DECODE
    assert least_support({"a": needs("uniform"), "b": needs("never")}) is GraphSupport.NEVER
    assert least_support({"a": needs("uniform")}) is GraphSupport.UNIFORM


def test_shapes_by_support():
    assert step_shapes(GraphSupport.NEVER, 4, 64, 3) == []
    assert step_shapes(GraphSupport.DECODE, 4, 64, 3) == [StepShape(1, 1), StepShape(2, 1), StepShape(4, 1)]
    assert step_shapes(GraphSupport.UNIFORM, 2, 64, 3) == [
        StepShape(1, 1),
        StepShape(2, 1),
        StepShape(1, 4),
        StepShape(2, 4),
    ]
    assert StepShape(4, 4) not in step_shapes(GraphSupport.UNIFORM, 4, 15, 3)


def batch_of(new_tokens, num_decodes):
    seqs = [Sequence(index, [1], Params(), max_num_tokens=9) for index in range(len(new_tokens))]
    return ScheduledBatch(seqs, new_tokens, num_decodes)


def test_a_step_takes_the_least_shape_that_holds_it():
    graphs = StepGraphs([StepShape(rows, length) for rows in (2, 4) for length in (1, 3)], forward=None)
    assert graphs.shape_of(batch_of([1], 1)) == StepShape(2, 1)
    assert graphs.shape_of(batch_of([1, 1, 1], 3)) == StepShape(4, 1)
    assert graphs.shape_of(batch_of([3, 3], 2)) == StepShape(2, 3)
    assert graphs.shape_of(batch_of([3, 1], 2)) is None, "rows of different lengths"
    assert graphs.shape_of(batch_of([2, 2], 2)) is None, "a length that was not captured"
    assert graphs.shape_of(batch_of([1, 1], 1)) is None, "a chunk among them"
    assert graphs.shape_of(batch_of([1] * 5, 5)) is None, "more rows than the largest shape"
    assert graphs.shape_of(ScheduledBatch()) is None


def poison_padding(llm):
    """Make what the core leaves in padding as bad as it may be: any token, any position, garbage in stale tables."""
    builder = llm.engine.runner._builder
    original = builder._pad

    def pad(host, shape, num_seqs, num_tokens):
        host["block_tables"][num_seqs : shape.num_seqs] = 3
        original(host, shape, num_seqs, num_tokens)
        host["input_ids"][num_tokens : shape.num_tokens] = 119
        host["positions"][num_tokens : shape.num_tokens] = 77
        poisoned.append(shape.num_seqs - num_seqs)

    poisoned: list[int] = []
    builder._pad = pad
    return poisoned


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_padding_changes_no_token(model_type):
    expected = reference_generate(tiny_model(model_type), PROMPTS, 12)
    llm = make_llm(model_type)
    llm.engine.runner.use_graphs([StepShape(3, 1), StepShape(8, 1)], capture=False)
    poisoned = poison_padding(llm)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert sum(poisoned) > 0


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_padded_verify_steps_change_no_token(model_type):
    expected = reference_generate(tiny_model(model_type), PROMPTS, 12)
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    llm = make_llm(model_type, speculation=Replay(known, wrong=0.3, vocab_size=120), num_spec_tokens=3)
    llm.engine.runner.use_graphs([StepShape(rows, length) for rows in (3, 8) for length in (1, 4)], capture=False)
    shapes = []
    graphs = llm.engine.runner._graphs
    original = graphs.run
    graphs.run = lambda shape, *arguments: shapes.append(shape) or original(shape, *arguments)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert {shape.tokens_per_seq for shape in shapes} >= {4}


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_padding_writes_nowhere(model_type):
    llm = make_llm(model_type)
    runner = llm.engine.runner
    runner.use_graphs([StepShape(8, 1)], capture=False)
    llm.generate(PROMPTS[:2], GREEDY)
    caches = {
        (layer.module_name, field): tensor
        for layer in runner._layers
        for field, tensor in {**layer.kv_cache.paged, **layer.kv_cache.state}.items()
    }
    before = {name: tensor.clone() for name, tensor in caches.items()}
    inputs, metadata = runner._prepare(ScheduledBatch(), StepShape(8, 1))
    with torch.inference_mode():
        runner._graphs.run(StepShape(8, 1), inputs, metadata)
    for name, tensor in caches.items():
        np.testing.assert_array_equal(tensor.numpy(), before[name].numpy(), err_msg=str(name))


def test_maxima_are_the_bounds_of_the_shape():
    llm = make_llm("llama", block_size=16)
    runner = llm.engine.runner
    runner.use_graphs([StepShape(4, 1)], capture=False)
    batch = runner._prepare(ScheduledBatch(), StepShape(4, 1))[0].batch
    assert (batch.num_seqs, batch.num_tokens, batch.num_decodes, batch.num_decode_tokens) == (4, 4, 4, 4)
    assert (batch.max_query_len, batch.max_decode_query_len, batch.max_seq_len) == (1, 1, 128)
    assert batch.block_tables.shape == (4, 8)
    assert batch.query_start_loc.tolist() == [0, 0, 0, 0, 0]
    assert batch.seq_lens.tolist() == [0, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [-1, -1, -1, -1]


def test_arrays_of_padded_steps_stay_where_they_are():
    llm = make_llm("qwen3_next")
    runner = llm.engine.runner
    runner.use_graphs([StepShape(4, 1), StepShape(2, 1)], capture=False)

    def addresses(shape):
        inputs = runner._prepare(ScheduledBatch(), shape)[0]
        batch = inputs.batch
        found = [inputs.input_ids, inputs.position_ids, batch.seq_lens, batch.block_tables, batch.slot_mapping]
        found += [*batch.state_read.values(), *batch.state_write.values()]
        return [tensor.data_ptr() for tensor in found]

    first = addresses(StepShape(4, 1))
    assert addresses(StepShape(2, 1)) == first
    llm.generate(PROMPTS, GREEDY)
    assert addresses(StepShape(4, 1)) == first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3", "mimo_v2_flash"])
@pytest.mark.parametrize("compiled", [False, True], ids=["graphs", "compiled"])
def test_replay_equals_eager(model_type, compiled, caplog):
    """Tokens of graphs, of eager steps and of transformers are the same in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = reference_generate(tiny_model(model_type), PROMPTS, 12)
    options = {"device": "cuda", "dtype": "float32", "max_num_seqs": 5}
    assert tokens(make_llm(model_type, eager=True, **options).generate(PROMPTS, GREEDY)) == expected
    with caplog.at_level(logging.INFO, logger="atom_core"):
        llm = make_llm(model_type, compile=compiled, **options)
    graphs = llm.engine.runner._graphs
    assert graphs, f"not captured: {[record.getMessage() for record in caplog.records]}"
    assert graphs._captured, f"not captured: {[record.getMessage() for record in caplog.records]}"
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert tokens(llm.generate([prompt], GREEDY)) == [answer]
