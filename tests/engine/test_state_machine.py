"""The scheduler and the pools under random load: invariants 6, 7, 9, 11 and 15."""

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.hash_world import World, WorldConfig

NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)  # a story is short, and shrinking one takes minutes
KINDS = {
    "stateless": {"slots": False, "ring": False},
    "slots": {"ring": False},
    "ring": {"slots": False},
    "hybrid": {},
}


def random_config(source, kind):
    return WorldConfig(
        **KINDS[kind],
        block_size=source.choice([2, 4, 4, 8]),
        num_blocks=source.choice([20, 24, 40]),
        num_groups=source.randint(1, 5),
        num_checkpoints=source.choice([0, 1, 3, 8]),
        interval=source.choice([None, 8, 8, 16]),
        caching=source.random() < 0.85,
        max_num_seqs=source.randint(1, 6),
        max_tokens=source.choice([1, 5, 12, 40]),
        chunk=source.choice([None, None, 1, 3, 8]),
        num_spec_tokens=source.choice([0, 1, 3]),
        policy=source.choice(["mixed", "mixed", "prefill_first"]),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_random_operations(kind):
    """2,500 for each kind; a story is long enough for contents to be shared, evicted and made again."""
    hits = preemptions = accepted = restored = forks = 0
    for seed in range(10):
        world = World(random_config(random.Random(seed), kind), seed)
        for _ in range(250):
            world.act()
        world.drain()
        hits += world.num_hits
        preemptions += world.num_preemptions
        accepted += world.num_accepted
        forks += world.num_forks
        restored += world.blocks.stats()["checkpoints_restored"]
    assert min(hits, preemptions, accepted, forks) > 0
    assert bool(restored) == (kind != "stateless")


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 10**6), kind=st.sampled_from(list(KINDS)))
    def start(self, seed, kind):
        self.world = World(random_config(random.Random(seed), kind), seed)

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_new=st.integers(1, 16),
        salt=st.sampled_from([None, None, "a"]),
        num_samples=st.sampled_from([1, 1, 2, 3]),
    )
    def add(self, shared, own, max_new, salt, num_samples):
        self.world.add([1] * shared + own, max_new, salt, num_samples)

    @rule(quality=st.sampled_from([0.0, 0.5, 1.0]), count=st.integers(1, 8))
    def step(self, quality, count):
        for _ in range(count):
            self.world.step(quality)

    @rule(index=st.integers(0, 20))
    def cancel(self, index):
        self.world.cancel(index)

    @rule(index=st.integers(0, 20))
    def stop(self, index):
        self.world.stop(index)

    @rule()
    def exhaust(self):
        for length in range(6):
            self.world.add([0] * (20 - length), 16)

    @invariant()
    def everything_is_somewhere_once(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), phases=NO_SHRINK
)
