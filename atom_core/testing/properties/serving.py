"""I6, I7 and I14: whole requests through the engine, and against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from atom_core.testing import strategies
from atom_core.testing.profile import try_examples
from atom_core.testing.report import Trace, Violation, difference
from atom_core.testing.strategies import Arrival
from atom_core.testing.subject import Subject, serve

if TYPE_CHECKING:
    from atom_core.engine.llm_engine import LLMEngine
    from atom_core.engine.outputs import RequestOutput

__all__ = ["graph_replay", "oracle", "preemption", "prefix_hits", "uncacheable"]


def preemption(subject: Subject) -> None:
    """I6: preempt and resume = never preempted. Finish and reuse of the group = fresh engine."""
    size = subject.block_size
    longest = 3 * size + 1

    def body(example: tuple[tuple[Arrival, ...], int]) -> LLMEngine:
        schedule, max_num_seqs = example
        engine = subject.engine(max_model_len=longest, max_blocks=-(-longest // size), max_num_seqs=max_num_seqs)
        story = f"{_told(schedule)}, {max_num_seqs} at once in {engine.plan.num_blocks} blocks of {size}"
        _check_served(subject, engine, schedule, f"I6 preemption: {story}")
        return engine

    schedules = strategies.arrivals(size, longest - size, share=False)
    try_examples(body, st.tuples(schedules, st.integers(1, 3)), subject.profile.servings, subject.profile.shrink)
    growing = tuple(Arrival(0, size - 1, 2 * size + 2) for _ in range(3))
    if not body((growing, 3)).scheduler.num_preemptions:
        raise Violation("I6 preemption: no request was preempted, so nothing was tried; the kit must be adapted")
    body(((Arrival(0, 3, 2), Arrival(0, size, 4, cancelled_after=2), Arrival(0, size + 1, 3), Arrival(0, 1, 2)), 1))


def uncacheable(subject: Subject) -> str | None:
    """Why I7 does not apply, or `None`."""
    figures = subject.inspection.figures
    unable = [name for name, needs in figures.requirements.items() if not needs.prefix_cacheable]
    return f"{', '.join(unable)} cannot start from cached blocks (prefix_cacheable=False)" if unable else None


def prefix_hits(subject: Subject) -> None:
    """I7: prefix hit = cold, for every prompt length modulo block size and prompts sharing any prefix."""
    size = subject.block_size
    longest = max(subject.max_tokens, 3 * size + 8)

    def body(example: tuple[tuple[Arrival, ...], int | None, bool]) -> LLMEngine:
        schedule, chunk, tight = example
        engine = subject.engine(
            enable_prefix_caching=True,
            state_checkpoint_interval=size,
            max_num_batched_tokens=2 * size,
            prefill_chunk_tokens=chunk,
            max_model_len=longest,
            max_blocks=-(-longest // size) + 1 if tight else None,
        )
        for use in ("first", "second"):
            story = f"{use} use of {_told(schedule)}, blocks of {size}, chunks of {chunk or 'any size'}"
            _check_served(subject, engine, schedule, f"I7 prefix: {story}")
        return engine

    schedules = strategies.arrivals(min(longest - 8, 3 * size), 6, cancel=False)
    chunks = st.sampled_from([None, 3, size])
    examples = st.tuples(schedules, chunks, st.booleans())
    try_examples(body, examples, subject.profile.servings, subject.profile.shrink)
    sharing = tuple(
        Arrival(shared, own, 3, step)
        for shared, own, step in (
            (2 * size, 2, 0),
            (2 * size, 1, 0),
            (size, 1, 1),
            (2 * size - 1, 3, 2),
            (size + 1, 1, 9),
        )
    )
    hits = body((sharing, None, False)).snapshot()["cache"]["hit_tokens"]
    if not hits:
        raise Violation("I7 prefix: no prompt started from cached blocks, so nothing was tried; see `atom check`")


def graph_replay(subject: Subject) -> str | None:
    """I10: decode steps replayed as device graphs give what they give eagerly.

    Returns:
        Why it was not tried, or `None`.
    """
    never = [name for name, needs in subject.inspection.figures.requirements.items() if needs.graph_support == "never"]
    if never:
        return f"graph replay: {', '.join(never)} does not support graphs"
    if not torch.cuda.is_available():
        return "graph replay: needs a CUDA device"
    size = subject.block_size
    schedule = tuple(Arrival(0, own, 8, step) for own, step in ((size - 1, 0), (1, 0), (2 * size + 1, 2)))
    prompts = [subject.prompt(arrival, number) for number, arrival in enumerate(schedule)]
    eager, replayed = (
        serve(subject.engine(device="cuda", eager=eager, compile=False), prompts, schedule) for eager in (True, False)
    )
    for number, (one, other) in enumerate(zip(eager, replayed, strict=True)):
        tokens = [list(output.outputs[0].token_ids) for output in (one, other)]
        if tokens[0] != tokens[1]:
            place = next(index for index, pair in enumerate(zip(*tokens, strict=True)) if pair[0] != pair[1])
            raise Violation(
                f"I10 graphs: {_told(schedule)}: request {number} differs at output token {place} where "
                f"steps are replayed"
            )
    return None


def oracle(subject: Subject) -> None:
    """I14: output = transformers' own for the same weights."""
    size = subject.block_size

    def body(example: tuple[int, int]) -> None:
        length, num_tokens = example
        prompt = subject.text(length, 3)
        tokens, found = subject.generated(prompt, num_tokens)
        logits = subject.expected([*prompt, *tokens[:-1]])
        wrong = difference(Trace(logits, {}), found, subject.tolerance)
        if wrong:
            where = wrong.rpartition(", ")[0]
            raise Violation(
                f"I14 oracle: a prompt of {length} tokens and {num_tokens} greedy ones {where} from the oracle's logits"
            )

    longest = subject.max_tokens
    num_tokens = min(16, longest // 2)
    examples = st.tuples(strategies.lengths(longest - num_tokens, size), st.integers(1, num_tokens))
    always: list[Any] = [(length, num_tokens) for length in (1, size, size + 1) if length + num_tokens <= longest]
    always.append((longest - num_tokens, num_tokens))
    try_examples(body, examples, subject.profile.steps // 2, subject.profile.shrink, always)


def _check_served(subject: Subject, engine: LLMEngine, schedule: tuple[Arrival, ...], story: str) -> None:
    prompts = [subject.prompt(arrival, number) for number, arrival in enumerate(schedule)]
    outputs = serve(engine, prompts, schedule)
    for number, (arrival, output) in enumerate(zip(schedule, outputs, strict=True)):
        wrong = _differs(subject, prompts[number], arrival, output)
        if wrong:
            raise Violation(f"{story}: request {number} {wrong}")


def _differs(subject: Subject, prompt: list[int], arrival: Arrival, output: RequestOutput) -> str | None:
    """Compare a request's tokens and their log probabilities with what it gets alone in fresh caches."""
    expected, trace = subject.generated(prompt, arrival.num_tokens)
    completion = output.outputs[0]
    if arrival.cancelled_after is None and len(completion.token_ids) != arrival.num_tokens:
        return f"gave {len(completion.token_ids)} tokens of {arrival.num_tokens}"
    logprobs = trace.logits[len(prompt) - 1 :].log_softmax(-1)
    for index, token in enumerate(completion.token_ids):
        row = logprobs[index]
        if token != expected[index]:
            gap = float(row[expected[index]] - row[token])
            if gap <= 10 * subject.tolerance:
                return None  # equally likely tokens, after which the texts differ rightly
            return (
                f"differs at output token {index}: {token} instead of {expected[index]}, which is likelier by {gap:.2g}"
            )
        assert completion.logprobs is not None, "logprobs were asked for"
        error = abs(completion.logprobs[index][token].logprob - float(row[token]))
        if not error <= 10 * subject.tolerance:
            return f"differs at output token {index}, log probability off by {error:.2g}"
    return None


def _told(schedule: tuple[Arrival, ...]) -> str:
    def one(arrival: Arrival) -> str:
        shared = f"{arrival.shared}+" if arrival.shared else ""
        late = f" at step {arrival.step}" if arrival.step else ""
        cancelled = f" cancelled after {arrival.cancelled_after}" if arrival.cancelled_after is not None else ""
        return f"{shared}{arrival.own}->{arrival.num_tokens}{late}{cancelled}"

    return f"requests (prompt->output) [{', '.join(one(arrival) for arrival in schedule)}]"
