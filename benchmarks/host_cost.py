"""Host cost of a decode step without a model: schedule, build the batch, take the tokens."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from atom_core.cache.block_manager import BlockManager
from atom_core.cache.config import CacheConfig
from atom_core.engine.batch_builder import BatchBuilder, StateLayout
from atom_core.engine.sampling import SamplingParams
from atom_core.engine.scheduler import Scheduler, SchedulerLimits
from atom_core.engine.sequence import Sequence
from atom_core.plugin import Rewind, StepBuffers, StepLimits

BLOCK_SIZE = 16


def measure(num_seqs: int, context: int, num_steps: int, stateful: bool) -> dict[str, float]:
    """Medians over decode steps from `context` tokens on: milliseconds of this thread, which does all the work."""
    max_model_len = context + num_steps + BLOCK_SIZE
    blocks_per_seq = -(-max_model_len // BLOCK_SIZE)
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_seqs * blocks_per_seq,
        max_model_len=max_model_len,
        num_per_req_cache_groups=num_seqs if stateful else 0,
    )
    limits = SchedulerLimits(num_seqs, num_seqs * context, max_model_len)
    scheduler = Scheduler(limits, BlockManager(config))
    step_limits = StepLimits(num_seqs, limits.max_num_batched_tokens, blocks_per_seq, BLOCK_SIZE)
    states = {"state": StateLayout(1, Rewind.SLOTS)} if stateful else {}
    builder = BatchBuilder(states, StepBuffers(step_limits, torch.device("cpu")))
    params = SamplingParams(max_tokens=None, temperature=0)
    for index in range(num_seqs):
        prompt = [(index * 7919 + position * 31) % 50000 for position in range(context)]
        scheduler.add(Sequence(index, prompt, params, max_num_tokens=max_model_len, has_per_req_cache=stateful))
    times: dict[str, list[float]] = {"schedule": [], "build": [], "postprocess": [], "total": []}
    for step in range(num_steps + 1):
        started = time.thread_time()
        batch = scheduler.schedule()
        scheduled = time.thread_time()
        builder.build(batch)
        built = time.thread_time()
        scheduler.postprocess(batch, [[step % 100] for _ in batch.seqs])
        ended = time.thread_time()
        if step:
            parts = (scheduled - started, built - scheduled, ended - built, ended - started)
            for name, seconds in zip(times, parts, strict=True):
                times[name].append(seconds * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    print(f"{arguments.num_seqs} running decodes, medians in ms")
    print(f"{'context':>8} {'state':>6} {'schedule':>9} {'build':>7} {'postprocess':>12} {'total':>7}")
    for stateful in (False, True):
        for context in arguments.contexts:
            found = measure(arguments.num_seqs, context, arguments.steps, stateful)
            print(
                f"{context:>8} {'yes' if stateful else 'no':>6} {found['schedule']:>9.3f} {found['build']:>7.3f} "
                f"{found['postprocess']:>12.3f} {found['total']:>7.3f}"
            )


if __name__ == "__main__":
    main()
