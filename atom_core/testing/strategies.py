"""What properties try: texts, chunkings, mixes of rows, acceptance patterns, and schedules of requests.

Every strategy shrinks towards short texts, few requests, few cuts and small numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

__all__ = [
    "Arrival",
    "acceptances",
    "arrivals",
    "batch_mixes",
    "block_sizes",
    "chunkings",
    "lengths",
    "text",
    "verifications",
]


def text(length: int, seed: int, vocab_size: int) -> list[int]:
    """Random tokens; the same for the same seed, so that a failing example stays what it is while it shrinks."""
    tokens: list[int] = np.random.default_rng(seed + 1).integers(0, vocab_size, length).tolist()
    return tokens


def lengths(longest: int, block_size: int, least: int = 1) -> st.SearchStrategy[int]:
    """Lengths from `least` on; around multiples of the block more often than elsewhere."""
    around = [block_size * count + offset for count in (1, 2, 3) for offset in (-1, 0, 1)]
    telling = sorted({length for length in (1, 2, *around) if least <= length <= longest})
    return st.one_of(st.integers(least, longest), st.sampled_from(telling or [least]))


def block_sizes(multiple: int, longest: int = 48) -> st.SearchStrategy[int]:
    """Block sizes that are multiples of what the plugin needs; the smallest from 4 on comes first."""
    smallest = -(-4 // multiple) * multiple
    return st.sampled_from([size for size in (smallest, 2 * smallest, 3 * smallest) if size <= max(longest, smallest)])


@st.composite
def chunkings(draw: st.DrawFn, length: int, most: int = 8) -> tuple[int, ...]:
    """Sizes of consecutive chunks that make up `length` tokens."""
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=most - 1)) if length > 1 else set()
    edges = [0, *sorted(cuts), length]
    return tuple(end - start for start, end in itertools.pairwise(edges))


@st.composite
def acceptances(draw: st.DrawFn, num_spec_tokens: int, most: int = 8) -> tuple[tuple[int, int], ...]:
    """Pairs (drafts of a step, how many of them are accepted)."""
    pair = st.integers(0, num_spec_tokens).flatmap(lambda drafts: st.tuples(st.just(drafts), st.integers(0, drafts)))
    return tuple(draw(st.lists(pair, min_size=1, max_size=most)))


@dataclass(frozen=True)
class Verification:
    """A text's start, then steps that verify drafts, then the rest as a chunk.

    Attributes:
        prefill: tokens of the first chunk.
        pattern: per step, its drafts and how many are accepted.
        rest: tokens of a chunk behind them; 0 for none.
    """

    prefill: int
    pattern: tuple[tuple[int, int], ...]
    rest: int

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.prefill + sum(1 + accepted for _, accepted in self.pattern) + self.rest


@st.composite
def verifications(draw: st.DrawFn, num_spec_tokens: int, longest: int) -> Verification:
    """Verifications of drafts, at any place of a text."""
    pattern = draw(acceptances(num_spec_tokens))
    room = max(1, longest - 5 - sum(1 + accepted for _, accepted in pattern))
    return Verification(draw(st.integers(1, room)), pattern, draw(st.integers(0, 5)))


@dataclass(frozen=True)
class Neighbour:
    """Another row of a step: tokens computed before, tokens in the step, and whether it decodes."""

    computed: int
    count: int
    decode: bool


@st.composite
def batch_mixes(draw: st.DrawFn, longest: int, most: int = 4) -> tuple[tuple[Neighbour, ...], int]:
    """Other rows of a step, and the place of the row in question among them."""
    decode = st.builds(Neighbour, st.integers(1, longest - 1), st.just(1), st.just(True))
    chunk = st.builds(Neighbour, st.integers(0, longest // 2), st.integers(1, longest // 2), st.just(False))
    neighbours = tuple(draw(st.lists(st.one_of(decode, chunk), min_size=1, max_size=most)))
    return neighbours, draw(st.integers(0, len(neighbours)))


@dataclass(frozen=True)
class Arrival:
    """A request of a schedule.

    Attributes:
        shared: leading tokens that all requests of the schedule have in common.
        own: further tokens of its prompt.
        num_tokens: tokens to generate.
        step: the step before which it arrives.
        cancelled_after: steps after which it is cancelled, if it is not over; `None` for never.
    """

    shared: int
    own: int
    num_tokens: int
    step: int = 0
    cancelled_after: int | None = None


@st.composite
def arrivals(
    draw: st.DrawFn, longest: int, most_tokens: int, *, most: int = 5, cancel: bool = True, share: bool = True
) -> tuple[Arrival, ...]:
    """Schedules of requests: when they come, how long they are, and who is cancelled."""
    half = max(1, longest // 2)
    one = st.builds(
        Arrival,
        st.integers(0, half) if share else st.just(0),
        st.integers(1, half),
        st.integers(1, most_tokens),
        st.integers(0, 6),
        st.one_of(st.none(), st.integers(1, 6)) if cancel else st.none(),
    )
    return tuple(draw(st.lists(one, min_size=1, max_size=most)))
