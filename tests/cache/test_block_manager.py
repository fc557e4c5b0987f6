"""Blocks and groups: claim, release, reuse, exhaustion and charges."""

import pytest

from atom_core.cache import BlockManager, CacheConfig
from atom_core.errors import ConfigError, EngineError
from tests.cache.sequences import PlainSequence


def manager(num_blocks=8, block_size=4, max_model_len=64, **options):
    return BlockManager(
        CacheConfig(block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len, **options)
    )


def stateful(tokens):
    return PlainSequence(tokens, has_per_req_cache=True)


def test_sequence_gets_blocks_for_its_tokens_and_gives_them_back_once():
    blocks = manager()
    seq = PlainSequence([1] * 9)
    assert blocks.can_allocate(seq)
    blocks.allocate(seq)
    assert len(set(seq.block_table)) == 3
    assert (blocks.num_free_blocks, blocks.num_used_blocks) == (5, 3)
    blocks.check()
    blocks.deallocate(seq)
    blocks.deallocate(seq)
    assert seq.block_table == []
    assert (blocks.num_free_blocks, blocks.num_used_blocks) == (8, 0)
    blocks.check()


def test_refused_allocation_changes_nothing():
    blocks = manager(num_blocks=2)
    first, second = PlainSequence([1] * 5), PlainSequence([2])
    blocks.allocate(first)
    before = blocks.stats()
    assert not blocks.can_allocate(second)
    with pytest.raises(EngineError, match="ask can_allocate first"):
        blocks.allocate(second)
    with pytest.raises(EngineError, match="allocated already"):
        blocks.allocate(first)
    assert blocks.stats() == before
    assert second.block_table == []
    blocks.check()


def test_reserve_is_kept_free():
    blocks = manager(num_blocks=4)
    seq = PlainSequence([1] * 8)
    assert blocks.can_allocate(seq, reserve_blocks=2)
    assert not blocks.can_allocate(seq, reserve_blocks=3)


def test_append_takes_a_block_only_at_a_block_boundary():
    blocks = manager(num_blocks=3)
    seq = PlainSequence([1] * 3)
    blocks.allocate(seq)
    table = list(seq.block_table)
    assert blocks.append(seq, 4)
    assert seq.block_table == table
    assert blocks.can_append(seq, 9)
    assert blocks.append(seq, 9)
    assert seq.block_table[:1] == table
    assert len(seq.block_table) == 3
    assert blocks.can_append(seq, 12)
    assert not blocks.can_append(seq, 13)
    assert not blocks.append(seq, 13)
    assert len(seq.block_table) == 3
    blocks.check()


def test_append_that_fits_only_in_part_takes_nothing():
    blocks = manager(num_blocks=3)
    seq = PlainSequence([1] * 4)
    blocks.allocate(seq)
    assert not blocks.append(seq, 17)
    assert len(seq.block_table) == 1
    assert blocks.num_free_blocks == 2


def test_groups_are_leased_until_none_is_left_and_reused():
    blocks = manager(num_per_req_cache_groups=2)
    first, second, third = stateful([1]), stateful([2]), stateful([3])
    blocks.allocate(first)
    blocks.allocate(second)
    assert sorted([first.per_req_cache_group, second.per_req_cache_group]) == [0, 1]
    assert blocks.free_per_req_cache_groups == []
    assert not blocks.can_allocate(third)
    with pytest.raises(EngineError):
        blocks.allocate(third)
    assert third.per_req_cache_group == -1
    group = first.per_req_cache_group
    blocks.deallocate(first)
    blocks.deallocate(first)
    assert first.per_req_cache_group == -1
    assert blocks.free_per_req_cache_groups == [group]
    blocks.allocate(third)
    assert third.per_req_cache_group == group
    blocks.check()


def test_plain_sequences_take_no_group_and_run_when_none_is_free():
    blocks = manager(num_per_req_cache_groups=1, per_req_cache_equiv_blocks=2)
    blocks.allocate(stateful([1]))
    plain = PlainSequence([2])
    assert blocks.can_allocate(plain)
    blocks.allocate(plain)
    assert plain.per_req_cache_group == -1
    assert plain.id not in blocks.per_req_cache_accounting
    blocks.check()


def test_no_blocks_are_charged_for_state_by_default():
    blocks = manager(num_per_req_cache_groups=1)
    seq = stateful([1])
    blocks.allocate(seq)
    assert blocks.per_req_cache_equiv_blocks == 0
    assert blocks.per_req_cache_accounting == {seq.id: []}
    assert blocks.num_used_blocks == 1


def test_configured_charge_is_taken_and_given_back():
    blocks = manager(num_blocks=6, num_per_req_cache_groups=4, per_req_cache_equiv_blocks=2)
    first, second, third = stateful([1]), stateful([2]), stateful([3])
    blocks.allocate(first)
    charged = blocks.per_req_cache_accounting[first.id]
    assert len(charged) == 2
    assert not set(charged) & set(first.block_table)
    assert blocks.num_used_blocks == 3
    blocks.allocate(second)
    assert not blocks.can_allocate(third)
    assert len(blocks.free_per_req_cache_groups) == 2
    blocks.deallocate(second)
    assert not blocks.can_allocate(stateful([1] * 5))
    blocks.allocate(second)
    blocks.check()
    blocks.deallocate(first)
    assert first.id not in blocks.per_req_cache_accounting
    assert blocks.can_allocate(third)
    blocks.check()


def test_reason_why_a_request_can_never_run():
    blocks = manager(num_blocks=4, max_model_len=20, num_per_req_cache_groups=1, per_req_cache_equiv_blocks=1)
    assert blocks.can_never_allocate(16, stateful=False) is None
    assert blocks.can_never_allocate(12, stateful=True) is None
    assert "need 5 blocks, and the cache has 4" in str(blocks.can_never_allocate(17, stateful=False))
    assert "(1 of them for its state)" in str(blocks.can_never_allocate(16, stateful=True))
    assert "max_model_len 20" in str(blocks.can_never_allocate(21, stateful=False))
    assert "per-request state" in str(manager().can_never_allocate(1, stateful=True))


def test_config_refuses_counts_that_make_no_sense():
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, found 0"):
        CacheConfig(block_size=4, num_blocks=0, max_model_len=4)
    with pytest.raises(ConfigError, match="num_checkpoints must be 0 or more"):
        CacheConfig(block_size=4, num_blocks=1, max_model_len=4, num_checkpoints=-1)
    with pytest.raises(ConfigError, match="multiple of the block size 4, found 6"):
        CacheConfig(block_size=4, num_blocks=1, max_model_len=4, checkpoint_interval=6)
