"""The real scheduler, pools, batch builder and state mover, around a model whose every cache entry can be checked.

The model's key of a token is a hash of the prefix that ends there, and so is its state; the next token follows from the
hash. A wrong block, a stale state or a lost token shows in the very step that reads it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import torch

from atom_core.cache.block_manager import BlockManager
from atom_core.cache.config import CacheConfig
from atom_core.cache.tensors import CacheTensors
from atom_core.engine.batch_builder import BatchBuilder, StateLayout
from atom_core.engine.sampling import SamplingParams
from atom_core.engine.scheduler import Scheduler, SchedulerLimits
from atom_core.engine.sequence import Sequence, SequenceStatus
from atom_core.engine.state_mover import StateMover
from atom_core.plugin import Rewind, StepBuffers, StepLimits

VOCAB, WINDOW, MAX_LEN, EOS = 4, 3, 40, 3
_PRIME = 1_000_003


def extend(value: int, token: int) -> int:
    return (value * _PRIME + int(token) + 1) % (2**61 - 1)


def next_token(value: int) -> int:
    return (value >> 9) % VOCAB


def hashes(tokens) -> list[int]:
    """Of the prefixes of 0, 1, ... tokens."""
    return list(itertools.accumulate(tokens, extend, initial=0))


@dataclass(frozen=True)
class WorldConfig:
    """What a world is made from; `slots` and `ring` say which kinds of state its model has."""

    slots: bool = True
    ring: bool = True
    block_size: int = 4
    num_blocks: int = 14
    num_groups: int = 3
    num_checkpoints: int = 3
    interval: int | None = 8
    caching: bool = True
    max_num_seqs: int = 4
    max_tokens: int = 12
    chunk: int | None = None
    num_spec_tokens: int = 3
    policy: str = "mixed"

    @property
    def stateful(self) -> bool:
        return self.slots or self.ring


class World:
    """Requests come, run, are cancelled, stopped and preempted; `step` checks everything that it reads."""

    def __init__(self, config: WorldConfig, seed: int = 0) -> None:
        self.config = config
        self.random = random.Random(seed)
        self.blocks = BlockManager(
            CacheConfig(
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                max_model_len=MAX_LEN,
                num_per_req_cache_groups=config.num_groups if config.stateful else 0,
                num_checkpoints=config.num_checkpoints,
                checkpoint_interval=config.interval,
                enable_prefix_caching=config.caching,
            )
        )
        rows = min(config.max_num_seqs, config.num_groups) if config.stateful else config.max_num_seqs
        limits = SchedulerLimits(rows, config.max_tokens, MAX_LEN, config.chunk, config.policy)
        self.scheduler = Scheduler(limits, self.blocks)
        self.layouts = {}
        if config.slots:
            self.layouts["slots"] = StateLayout(1 + config.num_spec_tokens, Rewind.SLOTS)
        if config.ring:
            self.layouts["ring"] = StateLayout(1, Rewind.OVERWRITE)
        self.ring_rows = WINDOW + config.num_spec_tokens
        widths = {"slots": 1, "ring": self.ring_rows}
        states = {
            f"{name}.hash": torch.full(
                (1, config.num_groups * layout.slots_per_req + config.num_checkpoints, widths[name]), -7
            )
            for name, layout in self.layouts.items()
        }
        self.keys = torch.full((1, config.num_blocks, config.block_size), -7)
        self.tensors = CacheTensors({"keys.hash": self.keys}, states, {})
        self.mover = StateMover(self.tensors, self.layouts, config.num_groups)
        limits_of_step = StepLimits(rows, config.max_tokens, -(-MAX_LEN // config.block_size), config.block_size)
        self.builder = BatchBuilder(self.layouts, StepBuffers(limits_of_step, torch.device("cpu")), self.scheduler.rows)
        self.flat_keys = self.keys.view(-1).numpy()
        self.states = {name: states[f"{name}.hash"][0].numpy() for name in self.layouts}
        self.numbers = itertools.count()
        self.unfinished: list[Sequence] = []
        self.conversations: list[Sequence] = []
        self.first_tokens: dict[int, int] = {}  # what samples that part were given
        self.num_forks = self.num_hits = self.num_preemptions = self.num_accepted = self.num_finished = 0

    def add(self, prompt, max_new=6, salt=None, num_samples=1) -> None:
        params = SamplingParams(max_tokens=max_new, temperature=0, ignore_eos=self.random.random() < 0.7)
        samples = [
            Sequence(
                next(self.numbers),
                prompt,
                params,
                max_num_tokens=min(MAX_LEN, len(prompt) + max_new),
                eos_token_ids=frozenset({EOS}),
                has_per_req_cache=self.config.stateful,
                cache_salt=salt,
            )
            for _ in range(min(num_samples, self.scheduler.limits.max_running))
        ]
        seq = samples[0]
        if self.blocks.can_never_allocate(seq.max_num_tokens, seq.has_per_req_cache) is None:
            seq.forks = samples[1:]
            self.scheduler.check(seq)
            self.scheduler.add(seq)
            self.unfinished += samples

    def cancel(self, index: int) -> None:
        if self.unfinished:
            seq = self.unfinished[index % len(self.unfinished)]
            seq = next((other for other in self.unfinished if seq in other.forks), seq)
            self.scheduler.cancel(seq)
            self.forget_ended()

    def forget_ended(self) -> None:
        self.unfinished = [seq for seq in self.unfinished if seq.status is not SequenceStatus.FINISHED]

    def stop(self, index: int) -> None:
        running = self.scheduler.running
        if running:
            seq = running[index % len(running)]
            self.scheduler.stop(seq, "stop")
            self.forget_ended()

    def step(self, quality: float = 0.6) -> None:
        """Run one step, with drafts that are right with this probability."""
        had_work = self.scheduler.has_work
        self.draft(quality)
        batch = self.scheduler.schedule()
        assert bool(batch.seqs) == had_work, "a step is empty while there is work"
        if not batch.seqs:
            return
        assert min(batch.num_new_tokens) >= 1
        assert batch.num_tokens <= self.config.max_tokens
        assert len(set(batch.seqs)) == len(batch.seqs) <= self.scheduler.limits.max_num_seqs
        decoding = {seq for seq in self.scheduler.running if not seq.is_prefilling}
        assert self.config.policy != "mixed" or decoding <= set(batch.seqs), "a decoding request makes no progress"
        self.mover.prepare(batch.leased)
        self.num_hits += sum(seq.num_cached_tokens > 0 for seq in batch.seqs if seq.num_accepted == 0)
        self.num_preemptions += len(batch.preempted)
        chosen = self.forward(batch)
        forked = self.choose_for_forks(batch)
        ended = self.scheduler.postprocess(batch, chosen, forked)
        self.num_forks += len(batch.forks)
        self.mover.save(batch.saves)
        self.mover.fork(batch.forks)
        self.scheduler.states_saved(batch)
        for seq in ended:
            self.unfinished.remove(seq)
            self.check_output(seq)
        self.num_finished += len(ended)
        self.conversations = [*self.conversations, *ended][-6:]
        self.check()

    def draft(self, quality: float) -> None:
        for seq in self.scheduler.running:
            if seq.is_prefilling:
                continue
            room = min(self.config.num_spec_tokens, seq.max_num_tokens - seq.num_tokens - 1)
            value, drafts = hashes(seq.token_ids)[-1], []
            for _ in range(self.random.randint(0, max(room, 0))):
                right = self.random.random() < quality
                drafts.append(next_token(value) if right else self.random.randrange(VOCAB))
                value = extend(value, drafts[-1])
            seq.set_drafts(drafts)

    def forward(self, batch) -> list[list[int]]:
        """Check what each row reads, write what it computes, and choose its tokens."""
        inputs = self.builder.build(batch)
        attention = inputs.batch
        input_ids = inputs.input_ids[0].numpy()
        holders = {}
        for seq in self.scheduler.running:
            for block_id in seq.block_table:
                holders[block_id] = holders.get(block_id, 0) + 1
        chosen = []
        for row, seq in enumerate(batch.seqs):
            first, last = attention.query_start_loc_host[row : row + 2].tolist()
            start = int(attention.num_computed_host[row])
            new = input_ids[first:last]
            assert attention.positions_host[first:last].tolist() == list(range(start, start + len(new)))
            assert new.tolist() == seq.tokens_between(start, start + len(new)).tolist(), "wrong input tokens"
            values = hashes(seq.tokens_between(0, start + len(new)))
            slots = attention.block_tables_host[row][:, None] * self.config.block_size + np.arange(
                self.config.block_size
            )
            assert self.flat_keys[slots.reshape(-1)[:start]].tolist() == values[1 : start + 1], "wrong keys are read"
            mapping = attention.slot_mapping_host[first:last]
            assert all(holders[slot // self.config.block_size] == 1 for slot in mapping.tolist()), "a shared write"
            self.flat_keys[mapping] = values[start + 1 :]
            self.run_states(attention, row, (first, last), start, values)
            after = values[start + 1 :] if row < batch.num_decodes else values[-1:]
            chosen.append(self.choose(seq, after) if batch.completes(row) else [])
        return chosen

    def choose_for_forks(self, batch) -> dict[int, list[int]]:
        """Any first token for samples that part, so that their contents differ."""
        forked = {}
        for row, seq in enumerate(batch.seqs):
            if seq.forks and batch.completes(row):
                forked[row] = [self.random.randrange(VOCAB) for _ in seq.forks]
                self.first_tokens.update(zip((fork.id for fork in seq.forks), forked[row], strict=True))
        return forked

    def choose(self, seq, after) -> list[int]:
        tokens = [next_token(value) for value in after]
        if seq.num_output_tokens == 0 and seq.id in self.first_tokens:
            tokens[0] = self.first_tokens[seq.id]  # it queued up, for want of a block
        drafts = seq.tokens_between(seq.num_tokens, seq.num_tokens + seq.num_draft_tokens).tolist()
        num_kept = 1
        while num_kept <= len(drafts) and tokens[num_kept - 1] == drafts[num_kept - 1]:
            num_kept += 1
        self.num_accepted += num_kept - 1
        return tokens[:num_kept]

    def run_states(self, attention, row, tokens, start, values) -> None:
        first, last = tokens
        if "slots" in self.layouts:
            state, read = self.states["slots"], attention.state_read_host["slots"][row]
            assert state[read, 0] == values[start], "a wrong state is read"
            for index, slot in enumerate(attention.state_write_host["slots"][first:last].tolist()):
                if slot >= 0:
                    state[slot, 0] = values[start + index + 1]
        if "ring" in self.layouts:
            ring = self.states["ring"][attention.state_read_host["ring"][row]]
            for position in range(max(0, start - WINDOW + 1), start):
                assert ring[position % self.ring_rows] == values[position + 1], "a wrong window is read"
            end = start + last - first
            for position in range(max(start, end - self.ring_rows), end):
                ring[position % self.ring_rows] = values[position + 1]

    def check_output(self, seq) -> None:
        value = hashes(seq.prompt_token_ids)[-1]
        for index, token in enumerate(seq.output_token_ids):
            given = self.first_tokens.get(seq.id) if index == 0 else None
            assert token == (next_token(value) if given is None else given)
            value = extend(value, token)
        assert seq.status is SequenceStatus.FINISHED
        assert seq.stop_token_ids.isdisjoint(seq.output_token_ids[:-1]), "tokens behind the end of sequence"
        ended = int(seq.token_ids[-1]) in seq.stop_token_ids
        assert seq.finish_reason == ("stop" if ended else "length")
        assert ended or seq.num_tokens == seq.max_num_tokens

    def check(self) -> None:
        self.blocks.check()
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        assert set(self.unfinished) == {*queued, *(fork for seq in queued for fork in seq.forks)}
        for queue in (self.scheduler.running, self.scheduler.waiting):
            assert [seq.id for seq in queue] == sorted(seq.id for seq in queue), "out of order"
        order = [seq.id for seq in queued if seq.id not in self.first_tokens]
        assert order == sorted(order), "not first come, first served"  # but for samples that found no block to part

    def drain(self, quality: float = 0.6) -> None:
        """Run until all have ended; then nothing is held."""
        for _ in range(60 * len(self.unfinished) + 1):
            self.step(quality)
        assert not self.scheduler.has_work, "a request does not end"
        assert self.blocks.num_used_blocks == 0
        assert sorted(self.blocks.free_per_req_cache_groups) == list(range(self.blocks.states.num_groups))
        assert not self.blocks.states._pins
        assert not self.blocks.states._writing

    def random_prompt(self) -> list[int]:
        own = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 6))]
        return [self.random.randrange(2)] * self.random.randint(0, 20) + own

    def act(self) -> None:
        """Do something at random."""
        kind = self.random.choice("add add step step step step cancel stop exhaust return".split())
        if kind == "add" and len(self.unfinished) < 12:
            salt = self.random.choice([None, None, None, "a"])
            self.add(self.random_prompt(), self.random.randint(1, 16), salt, self.random.choice([1, 1, 1, 2, 3, 4]))
        elif kind == "step":
            self.step(self.random.choice([0.0, 0.7, 1.0]))
        elif kind == "cancel" and self.random.random() < 0.3:
            self.cancel(self.random.randrange(100))
        elif kind == "stop" and self.random.random() < 0.3:
            self.stop(self.random.randrange(100))
        elif kind == "exhaust" and self.random.random() < 0.1:
            for _ in range(6):
                self.add(self.random_prompt(), 16)
        elif kind == "return" and self.conversations and len(self.unfinished) < 12:
            seq = self.random.choice(self.conversations)
            self.add([*seq.token_ids.tolist(), 1][: MAX_LEN - 8], 8, seq.cache_salt)
