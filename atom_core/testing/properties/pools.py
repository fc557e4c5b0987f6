"""I11 and I15: the core's pools and scheduler, at the sizes that the plugin's bytes give; no model runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from atom_core.cache.block_manager import BlockManager
from atom_core.cache.config import CacheConfig
from atom_core.cache.plan import plan_cache
from atom_core.engine.sampling import SamplingParams
from atom_core.engine.scheduled_batch import ScheduledBatch
from atom_core.engine.scheduler import Scheduler, SchedulerLimits
from atom_core.engine.sequence import Sequence, SequenceStatus
from atom_core.errors import AtomError, EngineError
from atom_core.testing.profile import try_examples
from atom_core.testing.report import Violation
from atom_core.testing.subject import Subject

__all__ = ["allocation", "progress"]

_ROOM = 3
"""Requests of full length that the cache has memory for."""


@dataclass(frozen=True)
class _Load:
    """What happens to the pools: a seed for the choices, how many, and the pools' options."""

    seed: int
    operations: int
    caching: bool
    max_tokens: int


_LOADS = st.builds(_Load, st.integers(0, 999), st.integers(1, 60), st.booleans(), st.integers(1, 40))


def allocation(subject: Subject) -> None:
    """I11: `can_allocate` true => `allocate` cannot raise. A refusal has no side effects. Nothing leaks."""

    def body(load: _Load) -> None:
        manager = BlockManager(_cache_config(subject, load.caching))
        subject.wrap(manager)
        choose = random.Random(load.seed)
        held: list[Sequence] = []
        story = f"I11 pools: operation {{}} of seed {load.seed}"
        for number in range(load.operations):
            told = story.format(number)
            if held and choose.random() < 0.4:
                _use(manager, held, choose)
            else:
                _allocate(manager, held, _sequence(subject, number, choose), told)
            _checked(manager, told)
        while held:
            manager.deallocate(held.pop())
        _checked(manager, story.format("the last"))
        if manager.num_used_blocks or len(manager.free_per_req_cache_groups) != manager.states.num_groups:
            raise Violation(
                f"{story.format('the last')}: everything was given back, but {manager.num_used_blocks} blocks and "
                f"{manager.states.num_groups - len(manager.free_per_req_cache_groups)} groups are in use"
            )

    always = [_Load(seed, 60, caching, 8) for seed in (0, 1) for caching in (False, True)]
    try_examples(body, _LOADS, subject.profile.operations, subject.profile.shrink, always)


def progress(subject: Subject) -> None:
    """I15: every scheduled row has a token, every running request makes progress, no step is empty for nothing."""

    def body(load: _Load) -> None:
        config = _cache_config(subject, load.caching)
        manager = BlockManager(config)
        rows = min(4, config.num_per_req_cache_groups) if subject.owns_state else 4
        scheduler = Scheduler(SchedulerLimits(rows, load.max_tokens, config.max_model_len), manager)
        subject.wrap(scheduler)
        choose = random.Random(load.seed)
        for number in range(load.operations // 4 + 2):
            scheduler.add(_sequence(subject, number, choose))
        story = f"I15 progress: seed {load.seed}, {load.max_tokens} tokens a step"
        num_steps = 0
        while scheduler.has_work:
            _run_step(scheduler, choose, load.max_tokens, f"{story}, step {num_steps}")
            num_steps += 1
            if num_steps > 5000:
                raise Violation(f"{story}: requests are left after {num_steps} steps")

    always = [
        _Load(seed, 30, caching, tokens) for seed, caching, tokens in ((0, False, 8), (1, True, 3), (2, True, 40))
    ]
    try_examples(body, _LOADS, subject.profile.operations, subject.profile.shrink, always)


def _cache_config(subject: Subject, caching: bool) -> CacheConfig:
    """The pools that the planner makes out of the plugin's bytes, with memory for a few requests."""
    inspection, size = subject.inspection, subject.block_size
    figures, longest = inspection.figures, 4 * size
    budget = figures.workspace_bytes + figures.checkpoint_bytes * 4
    budget += _ROOM * (figures.group_bytes + 4 * figures.bytes_per_block)
    plan = plan_cache(
        figures,
        budget_bytes=budget,
        block_size=size,
        max_model_len=longest,
        max_num_seqs=4,
        max_blocks=_ROOM * 4,
        checkpoint_share=0.5 if caching else 0.0,
    )
    return CacheConfig(
        block_size=size,
        num_blocks=plan.num_blocks,
        max_model_len=longest,
        num_per_req_cache_groups=plan.num_groups,
        enable_prefix_caching=caching,
        num_checkpoints=plan.num_checkpoints if subject.owns_state else plan.num_blocks,
        checkpoint_interval=size,
        prefix_cacheable=figures.prefix_cacheable,
    )


def _sequence(subject: Subject, number: int, choose: random.Random) -> Sequence:
    size = subject.block_size
    longest = 4 * size
    shared = choose.randrange(2 * size)
    prompt = [1] * shared + [choose.randrange(3) for _ in range(choose.randint(1, longest - 1 - shared))]
    return Sequence(
        number,
        prompt,
        SamplingParams(temperature=0, ignore_eos=True),
        max_num_tokens=choose.randint(len(prompt) + 1, longest),
        has_per_req_cache=subject.owns_state,
    )


def _allocate(manager: BlockManager, held: list[Sequence], seq: Sequence, story: str) -> None:
    before = _snapshot(manager)
    if manager.can_allocate(seq):
        if _snapshot(manager) != before:
            raise Violation(f"{story}: can_allocate changed the pools")
        try:
            manager.allocate(seq)
        except Exception as error:
            raise Violation(f"{story}: can_allocate was true, but allocate raised {_first_line(error)}") from error
        if seq.restore_checkpoint is not None:
            manager.restored(seq)
        held.append(seq)
        return
    try:
        manager.allocate(seq)
    except EngineError:
        if _snapshot(manager) != before:
            after = _snapshot(manager)
            traces = ", ".join(
                f"{name} {before[name]} to {after[name]}" for name in after if after[name] != before[name]
            )
            raise Violation(f"{story}: a refused request left traces: {traces}") from None
        return
    raise Violation(f"{story}: can_allocate was false, but allocate went through")


def _use(manager: BlockManager, held: list[Sequence], choose: random.Random) -> None:
    """Compute, grow or give back one of the sequences."""
    seq = choose.choice(held)
    kind = choose.choice(("compute", "grow", "end"))
    if kind == "compute":
        manager.publish(seq, seq.num_tokens)
        boundary = seq.num_tokens // manager.block_size * manager.block_size
        checkpoint = manager.take_checkpoint(seq, boundary) if boundary else None
        if checkpoint is not None:
            manager.states.publish_checkpoint(checkpoint)
    elif kind == "grow" and seq.num_tokens < seq.max_num_tokens and manager.append(seq, seq.num_tokens + 1):
        seq.append_token(choose.randrange(3))
    else:
        held.remove(seq)
        manager.deallocate(seq)


def _checked(manager: BlockManager, story: str) -> None:
    try:
        manager.check()
    except EngineError as error:
        raise Violation(f"{story}: {_first_line(error)}") from error


def _snapshot(manager: BlockManager) -> dict[str, Any]:
    return {**manager.stats(), "groups": sorted(manager.free_per_req_cache_groups)}


def _run_step(scheduler: Scheduler, choose: random.Random, max_tokens: int, story: str) -> None:
    try:
        batch = scheduler.schedule()
    except AtomError as error:
        raise Violation(f"{story}: {_first_line(error)}") from error
    _expect(bool(batch.seqs), f"{story}: it is empty, with work to do")
    _expect(min(batch.num_new_tokens) >= 1, f"{story}: a row has no token")
    _expect(batch.num_tokens <= max_tokens, f"{story}: it has {batch.num_tokens} tokens")
    decoding = [seq for seq in scheduler.running if not seq.is_prefilling and seq not in batch.seqs]
    _expect(not decoding, f"{story}: request {decoding[0].id if decoding else ''} decodes, but is left out")
    before = [(seq, seq.num_computed_tokens) for seq in batch.seqs]
    scheduler.postprocess(batch, _sampled(batch, choose))
    scheduler.states_saved(batch)
    for seq, computed in before:
        done = seq.status is not SequenceStatus.RUNNING or seq.num_computed_tokens > computed
        _expect(done, f"{story}: request {seq.id} ran without getting on")
    _checked(scheduler.block_manager, story)


def _sampled(batch: ScheduledBatch, choose: random.Random) -> list[list[int]]:
    return [[choose.randrange(3)] if batch.completes(row) else [] for row in range(len(batch.seqs))]


def _expect(holds: bool, report: str) -> None:
    if not holds:
        raise Violation(report)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
