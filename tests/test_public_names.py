"""Names that are kept from the system that this one mirrors, and what they mean."""

import numpy as np
import pytest

from atom_core import EngineConfig, SamplingParams
from atom_core.cache.block_manager import BlockManager
from atom_core.cache.config import CacheConfig
from atom_core.engine.scheduled_batch import ScheduledBatch
from atom_core.engine.scheduler import Scheduler, SchedulerLimits
from atom_core.engine.sequence import Sequence


def make_seq(number, length=4, stateful=True, **params):
    params = SamplingParams(max_tokens=8, **params)
    return Sequence(number, [1] * length, params, max_num_tokens=length + 8, has_per_req_cache=stateful)


def make_manager(groups=2, blocks=16, equivalent=0):
    return BlockManager(
        CacheConfig(
            block_size=4,
            num_blocks=blocks,
            max_model_len=32,
            num_per_req_cache_groups=groups,
            per_req_cache_equiv_blocks=equivalent,
        )
    )


def test_a_sequence_has_no_group_until_it_is_admitted():
    seq = make_seq(0)
    assert seq.per_req_cache_group == -1
    assert seq.has_per_req_cache
    assert not make_seq(1, stateful=False).has_per_req_cache


def test_groups_are_claimed_released_and_reused():
    manager = make_manager(groups=2)
    first, second, third = make_seq(0), make_seq(1), make_seq(2)
    manager.allocate(first)
    manager.allocate(second)
    assert {first.per_req_cache_group, second.per_req_cache_group} == {0, 1}
    assert len(manager.free_per_req_cache_groups) == 0
    assert not manager.can_allocate(third)
    freed = first.per_req_cache_group
    manager.deallocate(first)
    assert first.per_req_cache_group == -1
    assert list(manager.free_per_req_cache_groups) == [freed]
    manager.allocate(third)
    assert third.per_req_cache_group == freed


def test_plain_sequences_take_no_group():
    manager = make_manager(groups=1, equivalent=3)
    seq = make_seq(0, stateful=False)
    manager.allocate(seq)
    assert seq.per_req_cache_group == -1
    assert len(manager.free_per_req_cache_groups) == 1
    assert manager.per_req_cache_accounting == {}
    assert manager.num_free_blocks == 15


def test_equivalent_blocks_are_charged_where_configured():
    manager = make_manager(groups=4, blocks=16, equivalent=5)
    assert manager.per_req_cache_equiv_blocks == 5
    seq = make_seq(7)
    manager.allocate(seq)
    assert len(manager.per_req_cache_accounting[7]) == 5
    assert manager.num_free_blocks == 16 - 1 - 5
    manager.deallocate(seq)
    assert manager.per_req_cache_accounting == {}
    assert manager.num_free_blocks == 16


def test_config_names():
    assert EngineConfig(model="x").per_req_cache_equiv_blocks == 0
    assert make_manager(groups=3).free_per_req_cache_groups == [0, 1, 2]


def test_preemption_frees_the_group():
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32)
    scheduler = Scheduler(limits, make_manager(groups=2, blocks=5))
    first, second = make_seq(0, length=8), make_seq(1, length=8)
    scheduler.add(first)
    scheduler.add(second)
    batch = scheduler.schedule()
    assert batch.per_req_cache_groups == [first.per_req_cache_group, second.per_req_cache_group]
    while not batch.preempted:
        scheduler.postprocess(batch, [[2]] * len(batch.seqs))
        batch = scheduler.schedule()
    assert batch.preempted == [second]
    assert second.per_req_cache_group == -1
    assert len(scheduler.block_manager.free_per_req_cache_groups) == 1
    assert scheduler.waiting[0] is second


def test_rows_without_state_have_group_minus_one():
    assert ScheduledBatch([make_seq(0, stateful=False)], [4]).per_req_cache_groups == [-1]


@pytest.mark.parametrize("groups", [1, 3])
def test_slots_per_plugin_are_groups_times_slots_per_request(groups):
    from atom_core.cache.plan import CacheFigures, plan_cache
    from atom_core.plugin import CacheRequirements

    figures = CacheFigures(
        requirements={"x": CacheRequirements()},
        block_bytes={"x": 64},
        slot_bytes={"x": 100},
        slots_per_req={"x": 4},
    )
    plan = plan_cache(figures, budget_bytes=10**6, block_size=16, max_model_len=64, max_num_seqs=groups)
    assert plan.max_per_req_cache_slots("x") == groups * 4


def test_token_views_grow_with_the_sequence():
    seq = make_seq(0, length=3)
    for token in range(200):
        seq.append_token(token)
    assert np.array_equal(seq.token_ids, [1, 1, 1, *range(200)])
