"""Sharing of blocks by content: what is found, what is not, and what is forgotten first."""

import pytest

from atom_core.cache import BlockManager, CacheConfig
from tests.cache.sequences import PlainSequence


def manager(num_blocks=16, hash_function=None, **options):
    config = CacheConfig(block_size=4, num_blocks=num_blocks, max_model_len=64, **options)
    return BlockManager(config, hash_function=hash_function)


def run(blocks, tokens, **fields):
    """Allocate a sequence and compute all its tokens."""
    seq = PlainSequence(list(tokens), **fields)
    blocks.allocate(seq)
    blocks.publish(seq, seq.num_tokens)
    blocks.check()
    return seq


def num_hit(blocks, tokens, **fields):
    """Tokens that a sequence would find, without leaving a trace but in the order of eviction."""
    seq = PlainSequence(list(tokens), **fields)
    blocks.allocate(seq)
    blocks.deallocate(seq)
    return seq.num_cached_tokens


def test_equal_prefix_shares_blocks_and_skips_their_tokens():
    blocks = manager()
    first = run(blocks, range(10))
    second = run(blocks, [*range(8), 50, 51, 52])
    assert second.num_cached_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert blocks.num_used_blocks == 4
    assert (blocks.stats()["query_tokens"], blocks.stats()["hit_tokens"]) == (21, 8)


def test_shared_blocks_are_held_until_the_last_holder_leaves():
    blocks = manager()
    first, second = run(blocks, range(9)), run(blocks, range(9))
    shared = second.block_table[:2]
    blocks.deallocate(first)
    assert blocks.num_used_blocks == 3
    blocks.check()
    assert second.block_table[:2] == shared
    blocks.deallocate(second)
    assert (blocks.num_used_blocks, blocks.num_cached_blocks) == (0, 2)


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_one_token_is_always_left_and_no_part_of_a_block_is_found(num_tokens, hit):
    blocks = manager()
    run(blocks, range(11))
    assert num_hit(blocks, range(num_tokens)) == hit


def test_blocks_are_found_only_once_their_last_token_is_computed():
    blocks = manager()
    seq = PlainSequence(list(range(8)))
    blocks.allocate(seq)
    blocks.publish(seq, 3)
    assert num_hit(blocks, range(8)) == 0
    blocks.publish(seq, 7)
    assert num_hit(blocks, range(12)) == 4
    blocks.publish(seq, 8)
    assert num_hit(blocks, range(12)) == 8


def test_generated_tokens_are_published_and_drafts_are_not():
    blocks = manager()
    seq = run(blocks, range(3))
    blocks.append(seq, 8)
    blocks.publish(seq, 4)
    assert num_hit(blocks, range(5)) == 0
    seq.append_tokens(3)
    blocks.publish(seq, 4)
    assert num_hit(blocks, range(5)) == 4


def test_same_tokens_behind_another_prefix_are_other_blocks():
    blocks = manager()
    run(blocks, [1, 1, 1, 1, 7, 7, 7, 7, 0])
    assert num_hit(blocks, [2, 2, 2, 2, 7, 7, 7, 7, 0]) == 0
    assert num_hit(blocks, [7, 7, 7, 7, 0]) == 0


def test_only_equal_salts_share():
    blocks = manager()
    run(blocks, range(9), cache_salt="a")
    assert num_hit(blocks, range(9), cache_salt="a") == 8
    assert num_hit(blocks, range(9), cache_salt="b") == 0
    assert num_hit(blocks, range(9)) == 0


def test_sequence_that_wants_no_hit_gets_none_but_is_found_by_others():
    blocks = manager()
    run(blocks, range(9), use_prefix_cache=False)
    assert num_hit(blocks, range(9), use_prefix_cache=False) == 0
    assert num_hit(blocks, range(9)) == 8


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"prefix_cacheable": False}])
def test_nothing_is_shared_when_switched_off(options):
    blocks = manager(**options)
    run(blocks, range(9))
    assert num_hit(blocks, range(9)) == 0
    assert blocks.num_cached_blocks == 0


def test_hash_collisions_never_give_a_wrong_hit():
    """With one hash for everything, at most one block is published, and only its own content finds it."""
    blocks = manager(hash_function=lambda data: b"collision")
    run(blocks, range(9), cache_salt="a")
    assert num_hit(blocks, range(9), cache_salt="a") == 4
    assert num_hit(blocks, range(9), cache_salt="b") == 0
    assert num_hit(blocks, range(9)) == 0
    run(blocks, [9] * 9)
    assert num_hit(blocks, [9] * 9) == 0
    assert num_hit(blocks, [*range(4), *range(4), 0], cache_salt="a") == 4


def test_child_of_a_colliding_block_is_not_found_behind_the_published_one():
    """Blocks X and Y collide; Y's child must not be found behind X, though all the hashes agree."""
    blocks = manager(hash_function=lambda data: data[-4:])
    run(blocks, [1, 1, 1, 0, 5, 5, 5, 5, 0])
    run(blocks, [2, 2, 2, 0, 6, 6, 6, 6, 0])
    assert num_hit(blocks, [1, 1, 1, 0, 6, 6, 6, 6, 0]) == 4
    assert num_hit(blocks, [1, 1, 1, 0, 5, 5, 5, 5, 0]) == 8
    assert num_hit(blocks, [2, 2, 2, 0, 6, 6, 6, 6, 0]) == 0


def test_free_blocks_are_used_before_cached_ones_and_the_oldest_cached_first():
    blocks = manager(num_blocks=6)
    for start in (0, 100):
        blocks.deallocate(run(blocks, range(start, start + 8)))
    assert blocks.num_cached_blocks == 4
    filler = PlainSequence([200] * 8)
    blocks.allocate(filler)
    assert blocks.stats()["evicted_blocks"] == 0
    assert blocks.append(filler, 12)
    assert blocks.stats()["evicted_blocks"] == 1
    blocks.deallocate(filler)
    assert num_hit(blocks, [*range(8), 0]) == 4
    assert num_hit(blocks, [*range(100, 108), 0]) == 8


def test_use_protects_from_eviction_and_asking_does_not():
    blocks = manager(num_blocks=4)
    blocks.deallocate(run(blocks, range(8)))
    blocks.deallocate(run(blocks, range(100, 108)))
    assert blocks.can_allocate(PlainSequence([*range(8), 0]))
    filler = PlainSequence([200] * 8)
    blocks.allocate(filler)
    blocks.deallocate(filler)
    assert num_hit(blocks, [*range(8), 0]) == 0

    blocks = manager(num_blocks=4)
    blocks.deallocate(run(blocks, range(8)))
    blocks.deallocate(run(blocks, range(100, 104)))
    assert num_hit(blocks, [*range(8), 0]) == 8
    filler = PlainSequence([200] * 8)
    blocks.allocate(filler)
    blocks.deallocate(filler)
    assert num_hit(blocks, [*range(8), 0]) == 8
    assert num_hit(blocks, [*range(100, 104), 0]) == 0


def test_unreferenced_hits_are_not_counted_as_free_too():
    blocks = manager(num_blocks=4)
    blocks.deallocate(run(blocks, range(12)))
    assert blocks.num_free_blocks == 4
    assert blocks.can_allocate(PlainSequence(list(range(16))))
    assert not blocks.can_allocate(PlainSequence(list(range(17))))
    seq = PlainSequence(list(range(16)))
    blocks.allocate(seq)
    assert seq.num_cached_tokens == 12
    blocks.check()


def test_index_never_holds_more_than_there_are_blocks():
    blocks = manager(num_blocks=4)
    for start in range(0, 400, 20):
        blocks.deallocate(run(blocks, range(start, start + 16)))
        assert blocks.num_cached_blocks <= 4
    assert blocks.stats()["evicted_blocks"] == 19 * 4


def test_duplicate_of_a_held_block_stays_private():
    blocks = manager()
    first, second = PlainSequence(list(range(8))), PlainSequence(list(range(8)))
    blocks.allocate(first)
    blocks.allocate(second)
    blocks.publish(first, 8)
    blocks.publish(second, 8)
    blocks.check()
    third = run(blocks, range(9))
    assert third.block_table[:2] == first.block_table
    blocks.deallocate(second)
    assert blocks.num_cached_blocks == 0
    blocks.check()


def test_duplicate_of_an_unreferenced_block_takes_its_place():
    blocks = manager()
    first, second = PlainSequence(list(range(8))), PlainSequence(list(range(8)))
    blocks.allocate(first)
    blocks.allocate(second)
    blocks.publish(first, 8)
    blocks.deallocate(first)
    blocks.publish(second, 8)
    blocks.check()
    assert blocks.num_cached_blocks == 0
    assert run(blocks, range(9)).block_table[:2] == second.block_table


def test_preempted_sequence_finds_its_own_blocks_again():
    blocks = manager()
    seq = run(blocks, range(6))
    seq.append_tokens(6, 7, 8)
    blocks.append(seq, 9)
    blocks.publish(seq, 8)
    blocks.deallocate(seq)
    assert seq.num_computed_tokens == 0
    blocks.allocate(seq)
    assert seq.num_computed_tokens == seq.num_cached_tokens == 8
    assert len(seq.block_table) == 3


def test_reused_id_of_another_sequence_does_not_reuse_its_hashes():
    blocks = manager()
    run(blocks, range(9))
    waiting = PlainSequence([50] * 9, id=-7)
    assert blocks.can_allocate(waiting)
    other = PlainSequence(list(range(9)), id=-7)
    blocks.allocate(other)
    assert other.num_cached_tokens == 8


def test_what_follows_an_evicted_block_is_not_found_and_can_be_published_anew():
    """`second` is linked behind a block of `first` that is evicted while `second` still runs."""
    blocks = manager(num_blocks=6)
    first, second = PlainSequence(list(range(4))), PlainSequence(list(range(8)))
    blocks.allocate(first)
    blocks.allocate(second)
    blocks.publish(first, 4)
    blocks.publish(second, 8)
    blocks.deallocate(first)
    filler = PlainSequence([200] * 16)
    blocks.allocate(filler)
    blocks.deallocate(filler)
    blocks.check()
    assert num_hit(blocks, [*range(8), 0]) == 0
    third = run(blocks, range(8))
    assert num_hit(blocks, [*range(8), 0]) == 8
    blocks.deallocate(second)
    blocks.deallocate(third)
    blocks.check()
    assert num_hit(blocks, [*range(8), 0]) == 8


def test_a_refusal_is_reconsidered_when_a_longer_prefix_is_published():
    blocks = manager(num_blocks=6)
    first, waiting = PlainSequence(list(range(16))), PlainSequence(list(range(20)))
    blocks.allocate(first)
    assert not blocks.can_allocate(waiting)
    blocks.publish(first, 8)
    assert not blocks.can_allocate(waiting)
    blocks.publish(first, 12)
    assert blocks.can_allocate(waiting)
    blocks.allocate(waiting)
    assert waiting.num_cached_tokens == 12
    blocks.check()


def test_a_refusal_is_reconsidered_when_a_running_sequence_takes_over_a_cached_block():
    """The waiting one's hit was evictable memory; once somebody else holds that content, its memory is free."""
    blocks = manager(num_blocks=5)
    first, twin = PlainSequence(list(range(4))), PlainSequence(list(range(4)))
    blocks.allocate(first)
    blocks.allocate(twin)
    blocks.publish(first, 4)
    blocks.deallocate(first)
    holder = PlainSequence([200] * 8)
    blocks.allocate(holder)
    waiting = PlainSequence(list(range(12)))
    assert blocks.num_free_blocks == 2
    assert not blocks.can_allocate(waiting)
    blocks.publish(twin, 4)
    assert blocks.can_allocate(waiting)
    blocks.allocate(waiting)
    blocks.check()


def test_a_refusal_is_reconsidered_when_cached_blocks_are_published_anew():
    """A cached chain loses its head; a running sequence publishes the same content, and the old tail becomes free."""
    blocks = manager(num_blocks=6)
    first, second, twin = (PlainSequence(list(range(num_tokens))) for num_tokens in (4, 8, 8))
    for seq in (first, second, twin):
        blocks.allocate(seq)
    blocks.publish(first, 4)
    blocks.publish(second, 8)
    blocks.deallocate(first)
    blocks.deallocate(second)
    holder = PlainSequence([200] * 8)
    blocks.allocate(holder)
    waiting = PlainSequence([*range(8), 0])
    assert blocks.num_free_blocks == blocks.num_cached_blocks == 2
    assert not blocks.can_allocate(waiting)
    assert blocks.append(holder, 12)
    blocks.publish(twin, 8)
    assert blocks.can_allocate(waiting)
    blocks.allocate(waiting)
    assert waiting.num_cached_tokens == 8
    blocks.check()


def test_nothing_is_published_behind_a_block_that_was_evicted():
    """`second` follows a copy of its own first block; once that copy is gone, its second block could not be found."""
    blocks = manager(num_blocks=6)
    first, second = PlainSequence(list(range(4))), PlainSequence(list(range(8)))
    blocks.allocate(first)
    blocks.allocate(second)
    blocks.publish(first, 4)
    blocks.publish(second, 4)
    blocks.deallocate(first)
    filler = PlainSequence([200] * 16)
    blocks.allocate(filler)
    blocks.deallocate(filler)
    blocks.publish(second, 8)
    blocks.deallocate(second)
    assert blocks.num_cached_blocks == 0
    blocks.check()
