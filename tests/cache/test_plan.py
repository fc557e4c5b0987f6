"""Planning: what fits, how groups and blocks share a budget, and what an error proposes."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom_core.cache import CacheFigures, choose_block_size, least_over_ranks, plan_cache
from atom_core.errors import CapacityError, ConfigError, EngineError
from atom_core.plugin import CacheRequirements


def figures(block=0, slot=0, slots=1, workspace=0, cacheable=True):
    """Two plugins: one with paged bytes, one with state; slots_per_req is 1 for both, as LayoutPlugin answers."""
    return CacheFigures(
        requirements={
            "paged": CacheRequirements(workspace_bytes=workspace),
            "stateful": CacheRequirements(prefix_cacheable=cacheable),
        },
        block_bytes={"paged": block, "stateful": 0},
        slot_bytes={"stateful": slot},
        slots_per_req={"paged": 1, "stateful": slots},
    )


def test_block_size_is_the_least_multiple_of_all_not_below_the_default():
    needs = {"a": CacheRequirements(block_size_multiple=12), "b": CacheRequirements(block_size_multiple=8)}
    assert choose_block_size(needs, None, 16) == 24
    assert choose_block_size(needs, None, 25) == 48
    assert choose_block_size(needs, 72, 16) == 72
    assert choose_block_size({}, None, 16) == 16


def test_unfitting_block_size_names_the_plugin_and_the_next_sizes():
    needs = {"a": CacheRequirements(block_size_multiple=12), "b": CacheRequirements(block_size_multiple=8)}
    with pytest.raises(ConfigError, match=r"block size 32 .*a needs a multiple of 12; .*: 24 and 48$") as caught:
        choose_block_size(needs, 32, 16)
    assert "b needs" not in str(caught.value)
    with pytest.raises(ConfigError, match=r": 24$"):
        choose_block_size(needs, 4, 16)


def test_stateless_model_has_no_groups_and_fills_the_budget_with_blocks():
    plan = plan_cache(
        figures(block=10, workspace=7), budget_bytes=507, block_size=16, max_model_len=64, max_num_seqs=99
    )
    assert (plan.num_groups, plan.num_blocks, plan.num_checkpoints) == (0, 50, 0)
    assert plan.total_bytes == 507
    assert plan.tokens == 800
    assert plan.slots_per_req == {}
    assert plan.num_slots("paged") == 0
    assert plan.warnings == ()


def test_blocks_stop_at_what_max_num_seqs_full_requests_need():
    plan = plan_cache(figures(block=1), budget_bytes=10**9, block_size=16, max_model_len=65, max_num_seqs=4)
    assert plan.num_blocks == 4 * 5


def test_model_without_paged_bytes_has_blocks_for_all_requests():
    plan = plan_cache(figures(slot=10), budget_bytes=35, block_size=16, max_model_len=65, max_num_seqs=4)
    assert (plan.num_groups, plan.num_blocks) == (3, 20)


def test_groups_are_not_bought_with_the_blocks_they_need():
    """4096 tokens of blocks per full request; each group after the first brings 2048 tokens of them."""
    plan = plan_cache(
        figures(block=100, slot=1000), budget_bytes=30_000 + 5_000, block_size=64, max_model_len=4096, max_num_seqs=256
    )
    # The first: 1000 + 64 x 100 = 7400; each further one: 1000 + 32 x 100 = 4200; (35000 - 7400) // 4200 = 6.
    assert plan.num_groups == 7
    assert plan.num_blocks >= 64 + 6 * 32
    assert len(plan.warnings) == 1
    assert "7 requests at once instead of max_num_seqs 256" in plan.warnings[0]
    assert "256,000" in plan.warnings[0]


def test_slots_count_groups_times_slots_per_request_and_checkpoints():
    plan = plan_cache(
        figures(block=10, slot=100, slots=5),
        budget_bytes=10_000,
        block_size=16,
        max_model_len=64,
        max_num_seqs=4,
        checkpoint_share=0.5,
    )
    assert plan.num_groups == 4
    assert plan.group_bytes == 500
    assert plan.checkpoint_bytes == 100
    assert plan.num_checkpoints == plan.num_blocks == 16
    assert plan.max_per_req_cache_slots("stateful") == 20
    assert plan.num_slots("stateful") == 36
    assert plan.to_dict()["num_slots"] == {"stateful": 36}
    assert plan.to_dict()["total_bytes"] == plan.total_bytes


def test_blocks_get_what_checkpoints_cannot_use():
    """One group of 20, then as many blocks of 10 as checkpoints of 20: 20 + 32 x 30 = 980 of 1000."""
    plan = plan_cache(
        figures(block=10, slot=20),
        budget_bytes=1000,
        block_size=16,
        max_model_len=16,
        max_num_seqs=1,
        checkpoint_share=0.75,
        max_blocks=1000,
    )
    assert (plan.num_groups, plan.num_blocks, plan.num_checkpoints, plan.total_bytes) == (1, 32, 32, 980)


def test_no_checkpoints_where_prefixes_cannot_be_cached():
    plan = plan_cache(
        figures(block=10, slot=100, cacheable=False),
        budget_bytes=10_000,
        block_size=16,
        max_model_len=64,
        max_num_seqs=4,
        checkpoint_share=0.5,
    )
    assert plan.num_checkpoints == 0


def test_too_small_a_budget_says_what_would_fit():
    given_figures = figures(block=10, slot=100, workspace=50)
    limits = {"block_size": 16, "max_num_seqs": 4}
    with pytest.raises(CapacityError) as caught:
        plan_cache(given_figures, budget_bytes=200, max_model_len=160, **limits)
    message = str(caught.value)
    assert "needs 250 bytes" in message
    assert "lower max_model_len to 80" in message
    assert "raise the memory by 50 bytes" in message
    assert plan_cache(given_figures, budget_bytes=250, max_model_len=160, **limits).num_blocks == 10
    assert plan_cache(given_figures, budget_bytes=200, max_model_len=80, **limits).num_blocks == 5
    with pytest.raises(CapacityError):
        plan_cache(given_figures, budget_bytes=200, max_model_len=81, **limits)


def test_budget_below_one_group_proposes_no_length():
    with pytest.raises(CapacityError, match="; raise the memory by"):
        plan_cache(figures(block=10, slot=100), budget_bytes=99, block_size=16, max_model_len=16, max_num_seqs=4)


def test_max_blocks_below_one_request_is_a_config_error():
    with pytest.raises(ConfigError, match="needs 4 blocks"):
        plan_cache(figures(block=1), budget_bytes=99, block_size=16, max_model_len=64, max_num_seqs=4, max_blocks=3)


def test_ranks_take_the_least_counts_and_keep_their_own_bytes():
    limits = {"block_size": 16, "max_model_len": 64, "max_num_seqs": 8}
    narrow = plan_cache(figures(block=10, slot=100), budget_bytes=500, **limits)
    wide = plan_cache(figures(block=5, slot=100), budget_bytes=5000, **limits)
    here, there = least_over_ranks([narrow, wide]), least_over_ranks([wide, narrow])
    assert (here.num_blocks, here.num_groups) == (there.num_blocks, there.num_groups)
    assert here.num_groups == min(narrow.num_groups, wide.num_groups)
    assert (here.block_bytes, there.block_bytes) == (10, 5)
    assert here.warnings == there.warnings == narrow.warnings
    with pytest.raises(EngineError, match="block size 16"):
        least_over_ranks([narrow, replace(narrow, block_size=32)])


PLANS = st.fixed_dictionaries(
    {
        "block": st.integers(0, 50),
        "slot": st.integers(0, 500),
        "slots": st.integers(1, 5),
        "workspace": st.integers(0, 500),
    }
)
LIMITS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 16, 64]),
        "max_model_len": st.integers(1, 5000),
        "max_num_seqs": st.integers(1, 40),
        "checkpoint_share": st.floats(0, 1),
        "fixed_bytes": st.integers(0, 500),
    }
)


@given(
    declared=PLANS,
    limits=LIMITS,
    budget=st.integers(0, 60_000),
    more=st.integers(0, 5_000),
    spare=st.none() | st.integers(0, 50),
)
def test_plan_properties(declared, limits, budget, more, spare):
    given_figures = figures(**declared)
    request_blocks = math.ceil(limits["max_model_len"] / limits["block_size"])
    max_blocks = limits["max_num_seqs"] * request_blocks if spare is None else request_blocks + spare
    if spare is not None:
        limits = {**limits, "max_blocks": max_blocks}
    group_bytes = declared["slot"] * declared["slots"]
    least = declared["workspace"] + limits["fixed_bytes"] + group_bytes + request_blocks * declared["block"]
    if budget < least:
        with pytest.raises(CapacityError, match=f"needs {least:,} bytes"):
            plan_cache(given_figures, budget_bytes=budget, **limits)
        return
    plan = plan_cache(given_figures, budget_bytes=budget, **limits)
    assert plan.total_bytes <= budget
    assert plan.workspace_bytes == declared["workspace"] + limits["fixed_bytes"]
    assert request_blocks <= plan.num_blocks <= max_blocks
    assert (plan.num_groups == 0) == (group_bytes == 0)
    assert plan.num_groups <= min(limits["max_num_seqs"], plan.num_blocks)
    assert bool(plan.warnings) == (0 < plan.num_groups < limits["max_num_seqs"])
    assert 0 <= plan.num_checkpoints <= plan.num_blocks
    larger = plan_cache(given_figures, budget_bytes=budget + more, **limits)
    assert (larger.num_groups, larger.num_blocks) >= (plan.num_groups, plan.num_blocks)
    lowered = least_over_ranks([plan, larger])
    assert (lowered.num_groups, lowered.num_blocks) <= (plan.num_groups, plan.num_blocks)
    assert lowered.total_bytes <= budget
