"""Invariant 11 and the prefix cache, against a model that knows what every block and slot holds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from atom_core.cache import BlockManager, CacheConfig
from atom_core.errors import EngineError
from tests.cache.sequences import PlainSequence

BLOCK_SIZE = 4
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)  # a story is short, and shrinking one takes minutes

# Prompts begin alike and part at any token, so that most of them share something.
PROMPTS = st.builds(
    lambda family, shared, own: [family] * shared + own,
    st.integers(0, 1),
    st.integers(0, 14),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
CONFIGS = st.builds(
    CacheConfig,
    block_size=st.just(BLOCK_SIZE),
    num_blocks=st.integers(5, 20),
    max_model_len=st.just(64),
    num_per_req_cache_groups=st.integers(0, 4),
    per_req_cache_equiv_blocks=st.sampled_from([0, 0, 1]),
    num_checkpoints=st.integers(0, 3),
    checkpoint_interval=st.sampled_from([None, 4, 8]),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
)
HASH_FUNCTIONS = st.sampled_from([None, None, lambda data: data[-4:], lambda data: b"same"])


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, compute, are preempted and leave; the model checks contents, counts and answers."""

    @initialize(config=CONFIGS, hash_function=HASH_FUNCTIONS)
    def start(self, config, hash_function):
        self.config = config
        self.blocks = BlockManager(config, hash_function=hash_function)
        self.waiting: list[PlainSequence] = []
        self.running: list[PlainSequence] = []
        self.block_content: dict[int, tuple] = {}
        self.group_content: dict[int, tuple] = {}
        self.checkpoint_content: dict[int, tuple] = {}
        self.unpublished: list[int] = []

    def prefix(self, seq, num_tokens):
        return seq.cache_salt, *seq.tokens[:num_tokens]

    def observed(self, seq):
        return (
            self.blocks.stats(),
            list(self.blocks.free_per_req_cache_groups),
            seq.block_table,
            seq.per_req_cache_group,
        )

    @property
    def prefilling(self):
        return [seq for seq in self.running if seq.num_computed_tokens < seq.num_tokens]

    @property
    def decoding(self):
        return [seq for seq in self.running if seq.num_computed_tokens == seq.num_tokens]

    @rule(prompt=PROMPTS, stateful=st.booleans(), salt=st.sampled_from([None, None, None, "a"]))
    def submit(self, prompt, stateful, salt):
        seq = PlainSequence(prompt, has_per_req_cache=stateful, cache_salt=salt)
        if self.blocks.can_never_allocate(seq.num_tokens, stateful) is None:
            self.waiting.append(seq)

    @rule(data=st.data(), reserve=st.integers(0, 2))
    def ask(self, data, reserve):
        if self.waiting:
            self.ask_for(data.draw(st.sampled_from(self.waiting)), reserve)

    def ask_for(self, seq, reserve):
        """A remembered answer is the one that a sequence never seen before gets; asking changes nothing."""
        twin = PlainSequence(seq.tokens, has_per_req_cache=seq.has_per_req_cache, cache_salt=seq.cache_salt)
        before = self.observed(seq)
        answer = self.blocks.can_allocate(seq, reserve)
        assert answer == self.blocks.can_allocate(twin, reserve)
        assert self.observed(seq) == before
        if not self.running and not reserve:
            assert answer, "an empty cache refuses what it said it could hold"

    @rule(prompts=st.lists(st.tuples(PROMPTS, st.booleans()), min_size=1, max_size=6))
    def submit_and_admit(self, prompts):
        """As a scheduler does: in order of arrival, until one is refused."""
        for prompt, stateful in prompts:
            self.submit(prompt, stateful, None)
        while self.waiting and self.admit(self.waiting[0]):
            pass

    @rule(data=st.data())
    def allocate(self, data):
        if self.waiting:
            self.admit(data.draw(st.sampled_from(self.waiting)))

    def admit(self, seq):
        if not self.blocks.can_allocate(seq):
            before = self.observed(seq)
            with pytest.raises(EngineError):
                self.blocks.allocate(seq)
            assert self.observed(seq) == before
            return False
        held = {block_id for other in self.running for block_id in other.block_table}
        held.update(*self.blocks.per_req_cache_accounting.values())
        leased = {other.per_req_cache_group for other in self.running}
        self.blocks.allocate(seq)
        self.waiting.remove(seq)
        self.running.append(seq)
        hit_blocks, rest = divmod(seq.num_cached_tokens, BLOCK_SIZE)
        assert rest == 0
        assert seq.num_computed_tokens == seq.num_cached_tokens < seq.num_tokens
        assert len(seq.block_table) == -(-seq.num_tokens // BLOCK_SIZE)
        for index, block_id in enumerate(seq.block_table[:hit_blocks]):
            assert self.block_content[block_id] == self.prefix(seq, (index + 1) * BLOCK_SIZE), "a wrong hit"
        charged = self.blocks.per_req_cache_accounting.get(seq.id, [])
        fresh = [*seq.block_table[hit_blocks:], *charged]
        assert not held & set(fresh), "a block that others hold was handed out"
        for block_id in fresh:
            self.block_content.pop(block_id, None)
        if seq.has_per_req_cache:
            assert seq.per_req_cache_group not in leased
            assert len(charged) == self.config.per_req_cache_equiv_blocks
            assert (seq.restore_checkpoint is not None) == (hit_blocks > 0)
            self.group_content[seq.per_req_cache_group] = self.prefix(seq, 0)
        else:
            assert (seq.per_req_cache_group, seq.restore_checkpoint, charged) == (-1, None, [])
        return True

    @rule(data=st.data(), num_tokens=st.integers(1, 12), publish_at_once=st.booleans())
    def compute(self, data, num_tokens, publish_at_once):
        if self.prefilling:
            self.compute_chunk(data.draw(st.sampled_from(self.prefilling)), num_tokens, publish_at_once)

    @rule(chunk_tokens=st.integers(3, 12))
    def compute_all(self, chunk_tokens):
        for seq in self.running:
            while seq.num_computed_tokens < seq.num_tokens:
                self.compute_chunk(seq, chunk_tokens, publish_at_once=True)

    def compute_chunk(self, seq, num_tokens, publish_at_once):
        start = seq.num_computed_tokens
        if seq.restore_checkpoint is not None:
            assert self.checkpoint_content[seq.restore_checkpoint] == self.prefix(seq, start), "a wrong restore"
            self.group_content[seq.per_req_cache_group] = self.checkpoint_content[seq.restore_checkpoint]
            self.blocks.restored(seq)
        limit = min(seq.num_tokens, start + num_tokens)
        end = self.blocks.next_boundary(seq, start, limit)
        assert start < end <= limit
        for index in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            block_id = seq.block_table[index]
            holders = sum(other.block_table.count(block_id) for other in self.running)
            assert holders == 1, "a token is written into a shared block"
            self.block_content[block_id] = self.prefix(seq, min(end, (index + 1) * BLOCK_SIZE))
        if seq.has_per_req_cache:
            assert self.group_content[seq.per_req_cache_group] == self.prefix(seq, start)
            self.group_content[seq.per_req_cache_group] = self.prefix(seq, end)
        seq.num_computed_tokens = end
        self.blocks.publish(seq, end)
        checkpoint_id = self.blocks.take_checkpoint(seq, end)
        if checkpoint_id is not None:
            assert checkpoint_id not in self.unpublished
            assert all(checkpoint_id != other.restore_checkpoint for other in self.running), "overwritten while pinned"
            self.checkpoint_content[checkpoint_id] = self.prefix(seq, end)
            if publish_at_once:
                self.blocks.states.publish_checkpoint(checkpoint_id)
            else:
                self.unpublished.append(checkpoint_id)

    @rule()
    def publish_checkpoint(self):
        if self.unpublished:
            self.blocks.states.publish_checkpoint(self.unpublished.pop())

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def generate(self, data, tokens):
        if self.decoding:
            self.generate_tokens(data.draw(st.sampled_from(self.decoding)), tokens)

    def generate_tokens(self, seq, tokens):
        num_tokens = seq.num_tokens + len(tokens)
        if self.blocks.can_never_allocate(num_tokens, seq.has_per_req_cache) is not None:
            return
        table, before = list(seq.block_table), self.observed(seq)
        possible = self.blocks.can_append(seq, num_tokens)
        assert self.observed(seq) == before
        assert self.blocks.append(seq, num_tokens) == possible
        if not possible:
            assert self.observed(seq) == before
            return
        assert seq.block_table[: len(table)] == table
        assert len(seq.block_table) == max(len(table), -(-num_tokens // BLOCK_SIZE))
        for block_id in seq.block_table[len(table) :]:
            self.block_content.pop(block_id, None)
        seq.append_tokens(*tokens)

    @rule(data=st.data(), comes_back=st.booleans())
    def release(self, data, comes_back):
        if self.running:
            self.release_sequence(data.draw(st.sampled_from(self.running)), comes_back)

    def release_sequence(self, seq, comes_back):
        self.running.remove(seq)
        self.blocks.deallocate(seq)
        self.blocks.deallocate(seq)
        assert (seq.block_table, seq.per_req_cache_group, seq.restore_checkpoint) == ([], -1, None)
        if comes_back:
            self.waiting.append(seq)

    @rule(data=st.data())
    def cancel(self, data):
        if self.waiting:
            seq = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(seq)
            self.blocks.deallocate(seq)

    def act(self, random):
        kind = random.choice("submit admit admit compute compute compute generate release publish".split())
        if kind == "submit" and len(self.waiting) < 5:
            own = [random.randrange(3) for _ in range(random.randint(1, 6))]
            prompt = [random.randrange(2)] * random.randint(0, 14) + own
            self.submit(prompt, random.random() < 0.6, random.choice([None, None, None, "a"]))
        elif kind == "admit" and self.waiting:
            seq = random.choice(self.waiting)
            self.ask_for(seq, random.randrange(3))
            self.admit(seq)
        elif kind == "compute" and self.prefilling:
            self.compute_chunk(random.choice(self.prefilling), random.randint(1, 12), random.random() < 0.7)
        elif kind == "generate" and self.decoding:
            self.generate_tokens(random.choice(self.decoding), [random.randrange(2)] * random.randint(1, 6))
        elif kind == "release" and self.running:
            self.release_sequence(random.choice(self.running), random.random() < 0.4)
        elif kind == "publish":
            self.publish_checkpoint()

    @invariant()
    def every_block_and_group_is_somewhere_once(self):
        self.blocks.check()
        held = {block_id for seq in self.running for block_id in seq.block_table}
        charged = [block_id for blocks in self.blocks.per_req_cache_accounting.values() for block_id in blocks]
        assert self.blocks.num_used_blocks == len(held) + len(charged)
        assert self.blocks.num_free_blocks == self.config.num_blocks - len(held) - len(charged)
        groups = [seq.per_req_cache_group for seq in self.running if seq.has_per_req_cache]
        expected = sorted([*groups, *self.blocks.free_per_req_cache_groups])
        assert expected == list(range(self.config.num_per_req_cache_groups))


@given(config=CONFIGS, hash_function=HASH_FUNCTIONS, random=st.randoms(use_true_random=True))
@settings(max_examples=60, deadline=None)
def test_long_stories(config, hash_function, random):
    """Single rules are too short a story for contents to be shared, evicted and made again."""
    machine = CacheMachine()
    machine.start(config, hash_function)
    for _ in range(300):
        machine.act(random)
        machine.every_block_and_group_is_somewhere_once()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), phases=NO_SHRINK
)
