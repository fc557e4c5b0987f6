"""Samples that part: full blocks are shared, the rest is a block of their own, and nothing is taken by a refusal."""

import pytest

from atom_core.cache import BlockManager, CacheConfig
from atom_core.errors import EngineError
from tests.cache.sequences import PlainSequence


def computed(num_tokens, num_blocks=8, groups=0, stateful=False, **options):
    blocks = BlockManager(
        CacheConfig(block_size=4, num_blocks=num_blocks, max_model_len=64, num_per_req_cache_groups=groups, **options)
    )
    seq = PlainSequence(list(range(num_tokens)), has_per_req_cache=stateful)
    blocks.allocate(seq)
    seq.num_computed_tokens = num_tokens
    blocks.publish(seq, num_tokens)
    return blocks, seq, PlainSequence(seq.tokens, has_per_req_cache=stateful)


@pytest.mark.parametrize(("num_tokens", "num_shared"), [(1, 0), (4, 1), (8, 2), (10, 2)])
def test_full_blocks_are_shared_and_the_rest_is_to_be_copied(num_tokens, num_shared):
    blocks, seq, other = computed(num_tokens)
    before = blocks.num_free_blocks
    copy = blocks.fork(seq, other)
    assert other.block_table[:num_shared] == seq.block_table[:num_shared]
    assert other.num_computed_tokens == num_tokens
    if num_tokens % 4:
        assert copy == (seq.block_table[-1], other.block_table[-1])
        assert copy[0] != copy[1]
        assert blocks.num_free_blocks == before - 1
    else:
        assert copy is None
        assert other.block_table == seq.block_table
        assert blocks.num_free_blocks == before
    blocks.check()
    blocks.deallocate(seq)
    blocks.check()
    blocks.deallocate(other)
    blocks.check()
    assert blocks.num_used_blocks == 0


def test_without_a_block_for_the_rest_nothing_is_taken():
    blocks, seq, other = computed(10, num_blocks=3)
    before = blocks.stats()
    assert not blocks.can_fork(seq)
    with pytest.raises(EngineError, match="does not fit"):
        blocks.fork(seq, other)
    assert (blocks.stats(), other.block_table, other.per_req_cache_group) == (before, [], -1)


def test_a_sample_gets_a_group_of_its_own_and_is_charged_like_any_other():
    blocks, seq, other = computed(10, groups=2, stateful=True, per_req_cache_equiv_blocks=2)
    blocks.fork(seq, other)
    assert {seq.per_req_cache_group, other.per_req_cache_group} == {0, 1}
    assert len(blocks.per_req_cache_accounting[other.id]) == 2
    assert not blocks.can_fork(seq)
    blocks.deallocate(other)
    assert blocks.can_fork(seq)
    blocks.check()


def test_what_parted_samples_go_on_with_is_found_by_others():
    blocks, seq, other = computed(10)
    blocks.fork(seq, other)
    for sample, token in ((seq, 50), (other, 60)):
        sample.append_tokens(token, token)
        sample.num_computed_tokens = 12
        blocks.publish(sample, 12)
    for token, sample in ((50, seq), (60, other)):
        third = PlainSequence([*range(10), token, token, 1])
        blocks.allocate(third)
        assert third.block_table[:3] == sample.block_table
        blocks.deallocate(third)
    blocks.check()
