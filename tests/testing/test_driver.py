"""StepDriver and its batches: what the engine would build, and what a step may touch."""

import numpy as np
import pytest
import torch

from atom_core.engine.batch_builder import BatchBuilder, StateLayout
from atom_core.engine.running_rows import RunningRows
from atom_core.engine.sampling import SamplingParams
from atom_core.engine.scheduled_batch import ScheduledBatch
from atom_core.engine.sequence import Sequence
from atom_core.errors import EngineError
from atom_core.plugin import Rewind, StepBuffers, StepLimits
from atom_core.testing import Poisoner, Row, StepDriver, Trace, build_batch, difference
from atom_core.testing.batch import Request, StateShape
from tests.averaging_plugin import AveragingPlugin, averaging_model, dense_generate

STATES = {"slots": (4, Rewind.SLOTS), "ring": (1, Rewind.OVERWRITE)}
TOKENS = [(index * 7 + 3) % 90 for index in range(40)]


@pytest.fixture
def driver():
    return StepDriver(averaging_model(), {"averaging": AveragingPlugin()}, num_spec_tokens=2, num_blocks=32)


def test_a_batch_is_what_the_engine_builds():
    rows = [  # computed, new tokens, accepted, blocks, group
        (9, 1, 1, [3, 5, 0], 2),
        (5, 4, 3, [7, 6, 9], 0),
        (0, 6, 0, [1, 2], 3),
        (4, 3, 1, [8, 4], 1),
    ]
    seqs, requests, running = [], [], RunningRows(8, 40, 4)
    for number, (computed, count, accepted, blocks, group) in enumerate(rows):
        seq = Sequence(number, TOKENS[: computed + count], SamplingParams(), max_num_tokens=40)
        seq.num_computed_tokens, seq.num_accepted, seq.block_table = computed, accepted, blocks
        seq.per_req_cache_group = group
        running.add(seq)
        seqs.append(seq)
        request = Request(TOKENS, blocks, group, computed, accepted)
        requests.append(Row(request, count, decode=number < 2))
    limits = StepLimits(8, 32, 10, 4)
    layouts = {name: StateLayout(*state) for name, state in STATES.items()}
    builder = BatchBuilder(layouts, StepBuffers(limits, torch.device("cpu")), running)
    expected = builder.build(ScheduledBatch(seqs, [row[1] for row in rows], 2)).batch
    found = build_batch(requests, {name: StateShape(*state) for name, state in STATES.items()}, 4)
    for name, value in vars(expected).items():
        other = getattr(found, name)
        if isinstance(value, dict):
            assert all(np.array_equal(np.asarray(value[key]), np.asarray(other[key])) for key in STATES), name
        elif isinstance(value, int):
            assert value == other, name
        else:
            assert np.array_equal(np.asarray(value), np.asarray(other)), name


def test_steps_by_hand_equal_the_dense_model(driver):
    tokens, trace = driver.generate(TOKENS[:11], 8)
    assert tokens == dense_generate(averaging_model(), TOKENS[:11], 8)
    assert len(trace) == 11 + 8 - 1
    request, other = driver.request([*TOKENS[:11], *tokens]), driver.request(TOKENS)
    driver.run(Row(request, 4), Row(other, 2))
    parts = [driver.run(Row(other, 3), Row(request, 7), padding_rows=1).rows[1]]
    parts.append(driver.run(Row(request, 2, drafts=[1], decode=True), Row(other, 5)).rows[0].between(0, 2))
    parts.append(driver.run(Row(request, decode=True)).rows[0])
    assert difference(trace.between(4, 14), Trace.join(parts), 1e-4) is None


def test_unused_caches_hold_nan_and_a_lease_the_initial_values(driver):
    request = driver.request(TOKENS[:5], group=3)
    state = driver.caches.state["averaging.average"]
    assert (state[:, 9] == 0.5).all()
    assert state[:, [slot for slot in range(state.shape[1]) if slot != 9]].isnan().all()
    driver.run(Row(request, 5))
    keys = driver.caches.paged["averaging.keys"]
    others = [block for block in range(32) if block not in request.blocks[:2]]
    assert keys[:, others].isnan().all()
    assert not keys[:, request.blocks[0]].isnan().any()


def test_blocks_and_groups_run_out_and_come_back(driver):
    requests = [driver.request(TOKENS[:4]) for _ in range(driver.num_groups)]
    with pytest.raises(EngineError, match="groups of the driver are leased"):
        driver.request(TOKENS[:4])
    driver.release(requests[0])
    driver.request(TOKENS[:4])
    with pytest.raises(EngineError, match="free blocks, expected"):
        driver.request(TOKENS * 9, group=0)


def test_a_poisoner_fills_the_caches_of_an_engine():
    from atom_core import LLM
    from atom_core.plugin import PluginRegistry

    registry = PluginRegistry.of({"averaging": AveragingPlugin(), "poisoner": Poisoner(7.0)})
    llm = LLM(averaging_model(), registry=registry, skip_tokenizer=True, cache_memory="1MB", max_model_len=64)
    caches = llm.engine.runner.states.caches
    assert all((tensor[:, 5:] == 7.0).all() for tensor in (*caches.paged.values(), *caches.state.values()))


def test_a_difference_names_token_error_and_layer():
    logits = torch.zeros(4, 3)
    expected = Trace(logits, {"model.layers.2.attn": logits, "model.layers.7.attn": logits})
    wrong = logits.clone()
    wrong[2, 1], wrong[3] = 0.25, 0.1
    found = Trace(wrong, {"model.layers.2.attn": logits, "model.layers.7.attn": wrong})
    assert difference(expected, expected, 1e-4) is None
    assert difference(expected, found, 1e-4, 10) == "differs at token 12, max error 0.25, layers 7.."
    nan = Trace(torch.full((4, 3), torch.nan), found.layers)
    assert difference(expected, nan, 1e-4) == "differs at token 0, max error inf, layers 7.."
