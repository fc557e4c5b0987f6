"""Groups and checkpoints: leases, what a restore finds, what is pinned, and where chunks are cut."""

import pytest

from atom_core.cache import BlockManager, CacheConfig, StatePool
from atom_core.errors import EngineError
from tests.cache.sequences import PlainSequence


def manager(num_blocks=16, num_checkpoints=4, checkpoint_interval=None):
    return BlockManager(
        CacheConfig(
            block_size=4,
            num_blocks=num_blocks,
            max_model_len=64,
            num_per_req_cache_groups=4,
            num_checkpoints=num_checkpoints,
            checkpoint_interval=checkpoint_interval,
        )
    )


def prefill(blocks, tokens, publish=True):
    """Allocate a stateful sequence and compute its tokens in chunks that end where the manager wants them to.

    Returns:
        The sequence, and the checkpoints by token count.
    """
    seq = PlainSequence(list(tokens), has_per_req_cache=True)
    blocks.allocate(seq)
    if seq.restore_checkpoint is not None:
        blocks.restored(seq)
    taken = {}
    while seq.num_computed_tokens < seq.num_tokens:
        seq.num_computed_tokens = blocks.next_boundary(seq, seq.num_computed_tokens, seq.num_tokens)
        checkpoint_id = blocks.take_checkpoint(seq, seq.num_computed_tokens)
        blocks.publish(seq, seq.num_computed_tokens)
        if checkpoint_id is not None:
            taken[seq.num_computed_tokens] = checkpoint_id
            if publish:
                blocks.states.publish_checkpoint(checkpoint_id)
    blocks.check()
    return seq, taken


def test_groups_are_each_leased_once():
    pool = StatePool(3, 0)
    assert sorted(pool.lease() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(EngineError, match="all 3 groups are leased"):
        pool.lease()
    pool.release(1)
    assert pool.free_groups == [1]
    with pytest.raises(EngineError, match="not leased"):
        pool.release(1)
    pool.check()


def test_longest_published_checkpoint_is_found():
    pool = StatePool(1, 3)
    written = {key: pool.reserve_checkpoint(key) for key in ("ab", "abcd")}
    assert pool.find_checkpoint(["a", "ab", "abc", "abcd"]) is None
    pool.publish_checkpoint(written["ab"])
    assert pool.find_checkpoint(["a", "ab", "abc", "abcd"]) == (2, written["ab"])
    pool.publish_checkpoint(written["abcd"])
    assert pool.find_checkpoint(["a", "ab", "abc", "abcd"]) == (4, written["abcd"])
    assert pool.find_checkpoint(["a", "ab", "abc"]) == (2, written["ab"])
    assert pool.find_checkpoint(["b"]) is None
    assert pool.reserve_checkpoint("ab") is None
    pool.check()


def test_least_recently_used_unpinned_checkpoint_is_overwritten():
    pool = StatePool(1, 2)
    for key in "ab":
        pool.publish_checkpoint(pool.reserve_checkpoint(key))
    (_, a), (_, b) = pool.find_checkpoint(["a"]), pool.find_checkpoint(["b"])
    pool.pin(a)
    pool.unpin(a, restored=True)
    assert pool.reserve_checkpoint("c") == b
    assert pool.find_checkpoint(["b"]) is None
    pool.pin(a)
    assert pool.reserve_checkpoint("d") is None
    pool.unpin(a, restored=False)
    assert pool.reserve_checkpoint("d") == a
    assert pool.stats() == {"checkpoints_kept": 0, "checkpoints_evicted": 2, "checkpoints_restored": 1}
    pool.check()


def test_forgotten_checkpoint_is_free_once_nobody_reads_or_writes_it():
    pool = StatePool(1, 2)
    a, b = pool.reserve_checkpoint("a"), pool.reserve_checkpoint("b")
    pool.publish_checkpoint(a)
    pool.pin(a)
    pool.forget("a")
    pool.forget("b")
    pool.check()
    assert pool.find_checkpoint(["a"]) is None
    assert pool.reserve_checkpoint("c") is None
    pool.publish_checkpoint(b)
    assert pool.find_checkpoint(["b"]) is None
    pool.unpin(a, restored=True)
    pool.check()
    assert {pool.reserve_checkpoint("c"), pool.reserve_checkpoint("d")} == {a, b}


def test_checkpoint_misuse_is_an_error():
    pool = StatePool(1, 1)
    with pytest.raises(EngineError, match="not reserved"):
        pool.publish_checkpoint(0)
    with pytest.raises(EngineError, match="not published"):
        pool.pin(0)
    with pytest.raises(EngineError, match="not pinned"):
        pool.unpin(0, restored=True)


def test_without_checkpoints_a_stateful_sequence_finds_nothing():
    blocks = manager(num_checkpoints=0)
    prefill(blocks, range(9))
    seq, _ = prefill(blocks, range(9))
    assert (seq.num_cached_tokens, seq.restore_checkpoint) == (0, None)
    plain = PlainSequence(list(range(9)))
    blocks.allocate(plain)
    assert plain.num_cached_tokens == 8


def test_prompt_is_checkpointed_at_its_last_full_block_and_restored_from_there():
    blocks = manager()
    _, taken = prefill(blocks, range(11))
    assert list(taken) == [8]
    seq = PlainSequence(list(range(11)), has_per_req_cache=True)
    blocks.allocate(seq)
    assert seq.num_computed_tokens == seq.num_cached_tokens == 8
    assert seq.restore_checkpoint == taken[8]
    blocks.restored(seq)
    assert seq.restore_checkpoint is None
    assert blocks.stats()["checkpoints_restored"] == 1
    blocks.check()


def test_prompt_of_whole_blocks_is_checkpointed_where_the_same_prompt_can_use_it():
    blocks = manager()
    _, taken = prefill(blocks, range(12))
    assert list(taken) == [8]
    assert prefill(blocks, range(12))[0].num_cached_tokens == 8


def test_interval_adds_checkpoints():
    blocks = manager(checkpoint_interval=8)
    _, taken = prefill(blocks, range(22))
    assert list(taken) == [8, 16, 20]
    assert prefill(blocks, [*range(17), 99])[0].num_cached_tokens == 16


def test_hit_is_cut_to_the_checkpoint_and_the_rest_computed_into_fresh_blocks():
    blocks = manager()
    first, _ = prefill(blocks, range(10))
    first.append_tokens(*range(10, 17))
    assert blocks.append(first, 17)
    blocks.publish(first, 17)
    second = PlainSequence(list(range(18)), has_per_req_cache=True)
    blocks.allocate(second)
    assert second.num_cached_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert not set(second.block_table[2:]) & set(first.block_table)
    blocks.check()


def test_refused_boundary_gets_a_checkpoint():
    """Keys and values of 12 tokens are shared, but no state: the third request finds what the second left."""
    blocks = manager()
    prefill(blocks, [*range(12), *range(50, 60)])
    second, taken = prefill(blocks, [*range(12), *range(70, 80)])
    assert second.num_cached_tokens == 0
    assert list(taken) == [12, 20]
    third, _ = prefill(blocks, [*range(12), *range(90, 100)])
    assert third.num_cached_tokens == 12


def test_checkpoint_is_not_found_before_its_copy_is_enqueued():
    blocks = manager()
    _, taken = prefill(blocks, range(9), publish=False)
    assert prefill(blocks, range(9))[0].num_cached_tokens == 0
    blocks.states.publish_checkpoint(taken[8])
    assert prefill(blocks, range(9))[0].num_cached_tokens == 8


def test_checkpoint_is_pinned_until_restored_or_given_up():
    blocks = manager(num_checkpoints=1)
    prefill(blocks, range(9))
    seq = PlainSequence(list(range(9)), has_per_req_cache=True)
    blocks.allocate(seq)
    assert prefill(blocks, range(30, 39))[1] == {}
    blocks.deallocate(seq)
    assert seq.restore_checkpoint is None
    assert blocks.stats()["checkpoints_restored"] == 0
    assert list(prefill(blocks, range(40, 49))[1]) == [8]
    blocks.check()


def test_checkpoint_goes_with_its_evicted_block():
    blocks = manager(num_blocks=4)
    blocks.deallocate(prefill(blocks, range(9))[0])
    assert blocks.stats()["checkpoints_kept"] == 1
    filler = PlainSequence([99] * 16)
    blocks.allocate(filler)
    assert blocks.stats()["checkpoints_kept"] == 0
    blocks.check()


def test_no_checkpoint_is_taken_between_boundaries_or_for_plain_sequences():
    blocks = manager(checkpoint_interval=8)
    seq = PlainSequence(list(range(22)), has_per_req_cache=True)
    blocks.allocate(seq)
    assert blocks.take_checkpoint(seq, 4) is None
    assert blocks.take_checkpoint(seq, 7) is None
    assert blocks.take_checkpoint(seq, 8) is not None
    plain = PlainSequence(list(range(40, 62)))
    blocks.allocate(plain)
    assert blocks.take_checkpoint(plain, 8) is None
    assert blocks.next_boundary(plain, 0, 22) == 22


def test_a_refusal_is_reconsidered_when_a_checkpoint_is_published():
    blocks = manager(num_blocks=5)
    _, taken = prefill(blocks, range(10), publish=False)
    waiting = PlainSequence(list(range(14)), has_per_req_cache=True)
    assert not blocks.can_allocate(waiting)
    blocks.states.publish_checkpoint(taken[8])
    assert blocks.can_allocate(waiting)
    blocks.allocate(waiting)
    assert waiting.num_cached_tokens == 8
    blocks.check()
