"""Drive scheduler, pools and batches with random operations, as tests/engine/test_state_machine.py does, for longer.

    python scripts/random_operations.py [--operations 500000] [--seed 0]

Every step checks what it reads against what must be there; the first fault ends the run with its seed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.engine.hash_world import World
from tests.engine.test_state_machine import KINDS, random_config

STORY = 250


def main() -> None:
    """Run stories of every kind in turn, and say what happened in them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    seed = options.seed
    while counts["operations"] < options.operations:
        for kind in KINDS:
            world = World(random_config(random.Random(seed), kind), seed)
            try:
                for _ in range(STORY):
                    world.act()
                world.drain()
            except BaseException:
                print(f"seed {seed}, {kind}", file=sys.stderr)
                raise
            counts.update(
                operations=STORY,
                finished=world.num_finished,
                hits=world.num_hits,
                preemptions=world.num_preemptions,
                accepted=world.num_accepted,
                forks=world.num_forks,
                restored=world.blocks.stats()["checkpoints_restored"],
            )
        seed += 1
    print(", ".join(f"{name} {count:,}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
