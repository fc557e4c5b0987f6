"""Nothing leaks: many short requests through the scheduler, and random requests through a real model."""

import itertools
import random

import pytest

from atom_core import LLM, SamplingParams
from atom_core.cache.block_manager import BlockManager
from atom_core.cache.config import CacheConfig
from atom_core.engine.scheduler import Scheduler, SchedulerLimits
from atom_core.engine.sequence import Sequence
from atom_core.plugin.registry import PluginRegistry
from tests.averaging_plugin import AveragingPlugin, averaging_model, dense_generate
from tests.engine.proposers import Replay


def test_twenty_thousand_short_requests_leak_nothing():
    blocks = BlockManager(
        CacheConfig(
            block_size=4,
            num_blocks=200,
            max_model_len=32,
            num_per_req_cache_groups=24,
            num_checkpoints=16,
            checkpoint_interval=8,
        )
    )
    scheduler = Scheduler(SchedulerLimits(24, 128, 32), blocks)
    source = random.Random(0)
    params = SamplingParams(temperature=0)
    living: dict[int, Sequence] = {}
    num_added = num_cancelled = 0
    for step in itertools.count():
        while num_added < 20_000 and len(living) < 48:
            prompt = [source.randrange(3)] * source.randint(1, 12) + [source.randrange(50)]
            length = len(prompt) + source.randint(1, 6)
            seq = Sequence(num_added, prompt, params, max_num_tokens=length, has_per_req_cache=source.random() < 0.8)
            scheduler.add(seq)
            living[seq.id] = seq
            num_added += 1
        batch = scheduler.schedule()
        if not batch.seqs:
            break
        tokens = [[source.randrange(50)] if batch.completes(row) else [] for row in range(len(batch.seqs))]
        for seq in scheduler.postprocess(batch, tokens):
            del living[seq.id]
        scheduler.states_saved(batch)
        if living and source.random() < 0.5:
            scheduler.cancel(living.pop(source.choice(list(living))))
            num_cancelled += 1
        if step % 200 == 0:
            blocks.check()
    blocks.check()
    assert (num_added, living, scheduler.has_work) == (20_000, {}, False)
    assert num_cancelled > 500
    assert blocks.num_used_blocks == 0
    assert blocks.num_free_blocks == 200
    assert sorted(blocks.free_per_req_cache_groups) == list(range(24))
    assert scheduler.rows.num_free == 24
    assert not blocks._waiting
    assert not blocks._running


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_on_a_real_model_equal_the_dense_one(seed):
    source = random.Random(seed)
    model = averaging_model()
    requests = []
    for _ in range(14):
        shared = [7, 8, 9, 3] * source.randint(0, 8)
        requests.append(
            ([*shared, *(source.randrange(96) for _ in range(source.randint(1, 6)))], source.randint(1, 14))
        )
    answers = [dense_generate(model, prompt, count) for prompt, count in requests]
    known = [[*prompt, *answer] for (prompt, _), answer in zip(requests, answers, strict=True)]
    llm = LLM(
        averaging_model(),
        registry=PluginRegistry.of({"averaging": AveragingPlugin()}),
        skip_tokenizer=True,
        cache_memory="2MB",
        block_size=4,
        max_model_len=56,
        max_blocks=source.choice([16, 20, 40]),
        max_num_seqs=source.randint(1, 5),
        max_num_batched_tokens=source.choice([6, 16, 64]),
        state_checkpoint_interval=source.choice([None, 8]),
        speculation=Replay(known, wrong=0.2, vary=True),
        num_spec_tokens=3,
    )
    engine = llm.engine
    waiting = list(enumerate(requests)) * 2
    source.shuffle(waiting)
    running: dict[str, int] = {}
    while waiting or engine.has_work:
        if waiting and source.random() < 0.4:
            index, (prompt, count) = waiting.pop()
            running[engine.add_request(prompt, SamplingParams(max_tokens=count, temperature=0))] = index
        for output in engine.step():
            assert list(output.outputs[0].token_ids) == answers[running.pop(output.request_id)]
        if running and source.random() < 0.03:
            request_id = source.choice(list(running))
            index = running.pop(request_id)
            found = list(engine.abort(request_id).outputs[0].token_ids)
            assert found == answers[index][: len(found)]
    engine.scheduler.block_manager.check()
    assert engine.scheduler.block_manager.num_used_blocks == 0
