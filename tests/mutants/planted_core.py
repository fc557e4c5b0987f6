"""Bugs of the core, planted into the engines, schedulers and block managers that the kit makes."""

from __future__ import annotations

from atom_core.cache.block_manager import BlockManager
from atom_core.engine.llm_engine import LLMEngine
from atom_core.engine.scheduler import Scheduler
from atom_core.errors import EngineError

__all__ = [
    "late_copy",
    "leaking_refusal",
    "no_reset_on_reuse",
    "no_restore",
    "resume_in_old_slot",
    "shared_fork",
    "starved_decodes",
]


def no_reset_on_reuse(part) -> None:
    """A group gets its initial values at its first lease alone."""
    if isinstance(part, LLMEngine):
        prepare, seen = part.runner.states.prepare, set()

        def prepare_once(leased):
            new = [seq for seq in leased if seq.per_req_cache_group not in seen]
            seen.update(seq.per_req_cache_group for seq in leased)
            prepare(new)

        part.runner.states.prepare = prepare_once


def resume_in_old_slot(part) -> None:
    """A preempted request goes on in the group that it had at first, whoever has it now."""
    if isinstance(part, LLMEngine):
        first: dict[int, int] = {}

        def group_of(seq) -> int:
            return first.setdefault(seq.id, seq.per_req_cache_group) if seq.num_preemptions else seq.per_req_cache_group

        def remember(seqs) -> None:
            for seq in seqs:
                if not seq.num_preemptions:
                    first[seq.id] = seq.per_req_cache_group

        _with_groups(part, group_of, remember)


def shared_fork(part) -> None:
    """The samples of a prompt share the group of the first of them that runs."""
    if isinstance(part, LLMEngine):
        groups: dict[tuple[int, ...], tuple[int, int]] = {}

        def group_of(seq) -> int:
            if seq.params.n == 1:
                return seq.per_req_cache_group
            return groups.setdefault(tuple(seq.prompt_token_ids), (seq.id, seq.per_req_cache_group))[1]

        _with_groups(part, group_of, lambda seqs: None)


def no_restore(part) -> None:
    """A prefix hit starts from the initial values."""
    if isinstance(part, LLMEngine):
        prepare = part.runner.states.prepare

        def prepare_fresh(leased):
            restored = [(seq, seq.restore_checkpoint) for seq in leased]
            for seq, _ in restored:
                seq.restore_checkpoint = None
            prepare(leased)
            for seq, checkpoint in restored:
                seq.restore_checkpoint = checkpoint

        part.runner.states.prepare = prepare_fresh


def late_copy(part) -> None:
    """A checkpoint is published at once, and its bytes are copied after the next step."""
    if isinstance(part, LLMEngine):
        run, save, late = part.runner.run, part.runner.save_states, []

        def run_then_copy(scheduled, *arguments, **keywords):
            result = run(scheduled, *arguments, **keywords)
            save(late)
            late.clear()
            return result

        part.runner.run = run_then_copy
        part.runner.save_states = late.extend


def leaking_refusal(part) -> None:
    """`allocate` takes a group before it finds that there is no room."""
    if isinstance(part, BlockManager):
        allocate = part.allocate

        def allocate_hastily(seq):
            if part.states.free_groups and not part.can_allocate(seq):
                part.states.lease()
                raise EngineError("no room")
            allocate(seq)

        part.allocate = allocate_hastily


def starved_decodes(part) -> None:
    """Where a step has prompts, its decodes are left out."""
    if isinstance(part, Scheduler):
        schedule = part.schedule

        def schedule_prompts():
            batch = schedule()
            if 0 < batch.num_decodes < len(batch.seqs):
                del batch.seqs[: batch.num_decodes], batch.num_new_tokens[: batch.num_decodes]
                batch.num_decodes = 0
            return batch

        part.schedule = schedule_prompts


def _with_groups(engine, group_of, before) -> None:
    """Let every step see other groups than the sequences hold."""
    build = engine.runner._builder.build

    def build_with(scheduled, *arguments, **keywords):
        before(scheduled.seqs)
        held = [seq.per_req_cache_group for seq in scheduled.seqs]
        for seq in scheduled.seqs:
            seq.per_req_cache_group = group_of(seq)
        try:
            return build(scheduled, *arguments, **keywords)
        finally:
            for seq, group in zip(scheduled.seqs, held, strict=True):
                seq.per_req_cache_group = group

    engine.runner._builder.build = build_with
