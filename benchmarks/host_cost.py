"""Host cost of a decode step without a model: draft, schedule, build the batch, take the tokens.

With n-gram drafting each sequence's text repeats itself, so that every step verifies drafts and keeps them all, which
costs most; `random` text is looked up, and nothing is found. Contexts differ by up to a block, so that in every step
some sequences fill one. The last lines are the engine's whole step around a stub that only says which token comes next.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig

from atom_core import LLM
from atom_core.cache.block_manager import BlockManager
from atom_core.cache.config import CacheConfig
from atom_core.engine.batch_builder import BatchBuilder, StateLayout, StepInputs
from atom_core.engine.ngram import NgramDrafter
from atom_core.engine.sampling import SamplingParams
from atom_core.engine.scheduler import Scheduler, SchedulerLimits
from atom_core.engine.sequence import Sequence
from atom_core.plugin import Rewind, StepBuffers, StepLimits

VOCAB = 50_000
BLOCK_SIZE, NUM_DRAFTS, PERIOD = 16, 4, 61
PARTS = ("draft", "schedule", "build", "take", "total")


class Case:
    """Running decodes of one kind.

    Args:
        num_seqs: rows.
        context: tokens of each prompt.
        num_steps: most steps.
        stateful: with a group of state, checkpoints and prefix caching.
        ngram: `off`, or the text that n-gram drafting meets, `repeats` or `random`.
    """

    def __init__(self, num_seqs: int, context: int, num_steps: int, stateful: bool, ngram: str) -> None:
        self.name = (stateful, ngram)
        tokens_per_step = 1 + NUM_DRAFTS if ngram == "repeats" else 1
        max_model_len = context + (num_steps + 2) * tokens_per_step + 2 * BLOCK_SIZE
        blocks_per_seq = -(-max_model_len // BLOCK_SIZE)
        config = CacheConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_seqs * blocks_per_seq,
            max_model_len=max_model_len,
            num_per_req_cache_groups=num_seqs if stateful else 0,
            num_checkpoints=num_seqs if stateful else 0,
            checkpoint_interval=2048 if stateful else None,
        )
        limits = SchedulerLimits(num_seqs, num_seqs * (context + BLOCK_SIZE), max_model_len)
        self.scheduler = Scheduler(limits, BlockManager(config))
        step_limits = StepLimits(num_seqs, limits.max_num_batched_tokens, blocks_per_seq, BLOCK_SIZE)
        states = {"state": StateLayout(1 + NUM_DRAFTS, Rewind.SLOTS)} if stateful else {}
        self.builder = BatchBuilder(states, StepBuffers(step_limits, torch.device("cpu")), self.scheduler.rows)
        self.speculator = None if ngram == "off" else NgramDrafter(NUM_DRAFTS, self.scheduler.rows)
        self.texts = [_text(index, max_model_len, ngram) for index in range(num_seqs)]
        params = SamplingParams(max_tokens=None, temperature=0)
        for index, text in enumerate(self.texts):
            prompt = text[: context + index % BLOCK_SIZE]
            seq = Sequence(index, prompt, params, max_num_tokens=max_model_len, has_per_req_cache=stateful)
            self.scheduler.add(seq)
        self.times: dict[str, list[float]] = {name: [] for name in PARTS}

    def step(self) -> None:
        """Run a step and note its times: milliseconds of this thread, which does all the work."""
        begun = time.thread_time()
        if self.speculator is not None:
            self.speculator.set_drafts(self.scheduler.running)
        drafted = time.thread_time()
        batch = self.scheduler.schedule()
        scheduled = time.thread_time()
        self.builder.build(batch)
        built = time.thread_time()
        chosen = [_model(self.texts[seq.id], seq) for seq in batch.seqs]
        ran = time.thread_time()
        self.scheduler.postprocess(batch, chosen)
        self.scheduler.states_saved(batch)
        taken = time.thread_time()
        parts = (drafted - begun, scheduled - drafted, built - scheduled, taken - ran, built - begun + taken - ran)
        for name, seconds in zip(self.times, parts, strict=True):
            self.times[name].append(seconds * 1e3)


def lookup_milliseconds(num_tokens: int, stateful: bool, repeats: int) -> float:
    """Median time to find a prompt that is cached whole, its blocks hashed and verified."""
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        num_blocks=2 * num_tokens // BLOCK_SIZE,
        max_model_len=num_tokens + 1,
        num_per_req_cache_groups=1 if stateful else 0,
        num_checkpoints=1 if stateful else 0,
    )
    blocks = BlockManager(config)
    tokens = _text(0, num_tokens, "random")

    def sequence(number: int) -> Sequence:
        params = SamplingParams(temperature=0)
        return Sequence(number, tokens, params, max_num_tokens=num_tokens + 1, has_per_req_cache=stateful)

    first = sequence(0)
    blocks.allocate(first)
    last_boundary = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    checkpoint_id = blocks.take_checkpoint(first, last_boundary)
    if checkpoint_id is not None:
        blocks.states.publish_checkpoint(checkpoint_id)
    blocks.publish(first, num_tokens)
    blocks.deallocate(first)
    times = []
    for number in range(1, repeats + 1):
        seq = sequence(number)
        begun = time.thread_time()
        found = blocks.can_allocate(seq)
        times.append((time.thread_time() - begun) * 1e3)
        blocks.allocate(seq)
        assert found, "the prompt does not fit"
        assert seq.num_cached_tokens == last_boundary, "the lookup missed"
        blocks.deallocate(seq)
    return statistics.median(times)


def engine_milliseconds(num_seqs: int, num_drafts: int, num_steps: int) -> float:
    """Median time of the engine's step, its forward replaced by one that gives logits at once; greedy, no tokenizer."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    options = {"speculation": "ngram", "num_spec_tokens": num_drafts} if num_drafts else {}
    num_tokens = (1 + num_drafts) * (num_steps + 20)
    llm = LLM(
        config,
        random_weights=0,
        skip_tokenizer=True,
        device="cpu",
        cache_memory="1GiB",
        max_model_len=num_tokens + 64,
        max_num_seqs=num_seqs,
        **options,
    )

    def forward(inputs: StepInputs, metadata: object, indices: np.ndarray | None = None) -> torch.Tensor:
        tokens = inputs.input_ids[0]
        chosen = tokens if indices is None or len(indices) == len(tokens) else tokens[torch.from_numpy(indices)]
        logits = torch.zeros(len(chosen), config.vocab_size)
        logits[torch.arange(len(chosen)), (chosen * 7 + 3) % 60] = 1
        return logits

    llm.engine.runner._forward = forward
    numbers = random.Random(0)
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    for index in range(num_seqs):
        llm.engine.add_request([numbers.randrange(128) for _ in range(20 + index % BLOCK_SIZE)], params)
    times = []
    for _ in range(num_steps + 15):
        begun = time.thread_time()
        llm.engine.step()
        times.append((time.thread_time() - begun) * 1e3)
    found = llm.engine.stats.last_step["num_generated_tokens"]
    assert found == num_seqs * (1 + num_drafts), f"a step gave {found} tokens"
    return statistics.median(times[15:])


def _text(index: int, length: int, ngram: str) -> list[int]:
    if ngram == "random":
        numbers = random.Random(index)
        return [numbers.randrange(VOCAB) for _ in range(length)]
    return [(index * 7919 + position % PERIOD * 31) % VOCAB for position in range(length)]


def _model(text: list[int], seq: Sequence) -> list[int]:
    """The next tokens of the text, as many as the drafts that are right and one more."""
    known, count = seq.num_tokens, seq.num_draft_tokens
    drafts = seq.tokens_between(known, known + count).tolist()
    num_right = next((place for place in range(count) if drafts[place] != text[known + place]), count)
    return text[known : known + num_right + 1]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--apart", action="store_true", help="one kind after the other, not in turns step by step")
    arguments = parser.parse_args()
    how = "one kind after the other" if arguments.apart else "the kinds take turns, step by step"
    print(f"{arguments.num_seqs} running decodes, medians in ms; {how}")
    print(f"{'context':>8} {'state':>6} {'n-gram':>8}" + "".join(f"{name:>10}" for name in PARTS))
    for context in arguments.contexts:
        kinds = ((False, "off"), (True, "off"), (True, "random"), (True, "repeats"))
        cases = [Case(arguments.num_seqs, context, arguments.steps, *kind) for kind in kinds]
        together = [[case] for case in cases] if arguments.apart else [cases]
        for group in together:
            for _ in range(arguments.steps):
                for case in group:
                    case.step()
        for case in cases:
            stateful, ngram = case.name
            medians = (statistics.median(case.times[name][2:]) for name in PARTS)
            print(
                f"{context:>8} {'yes' if stateful else 'no':>6} {ngram:>8}" + "".join(f"{ms:>10.3f}" for ms in medians)
            )
    for stateful in (False, True):
        found_in = lookup_milliseconds(131_072, stateful, repeats=9)
        print(f"hit lookup of 131,072 tokens{' and a checkpoint' if stateful else ''}: {found_in:.1f} ms")
    for num_drafts in (0, NUM_DRAFTS):
        step = engine_milliseconds(arguments.num_seqs, num_drafts, arguments.steps)
        print(f"the engine's whole step without a model, {num_drafts} drafts a row: {step:.1f} ms")


if __name__ == "__main__":
    main()
