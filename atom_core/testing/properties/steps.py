"""I3, I4, I5, I8, I9 and I10: what must not change the outputs of a step, driven row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from atom_core.plugin import Rewind
from atom_core.testing import strategies
from atom_core.testing.batch import Request, Row
from atom_core.testing.driver import StepDriver
from atom_core.testing.profile import try_examples
from atom_core.testing.report import Trace, Violation, difference
from atom_core.testing.strategies import Neighbour, Verification
from atom_core.testing.subject import Subject

__all__ = ["batch_invariance", "causality", "chunking", "padding", "poison", "unsupported_drafts", "verification"]

_SPEC_TOKENS = (1, 3)


def chunking(subject: Subject) -> None:
    """I4: one-shot prefill = any chunking of it = token-by-token decode."""

    @st.composite
    def examples(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
        block_size = draw(_block_sizes(subject))
        length = draw(strategies.lengths(subject.max_tokens, block_size, least=2))
        num_decodes = draw(st.integers(0, min(4, length - 1)))
        return draw(strategies.chunkings(length - num_decodes)), num_decodes, block_size

    def body(example: tuple[tuple[int, ...], int, int]) -> None:
        chunks, num_decodes, block_size = example
        tokens = subject.text(sum(chunks) + num_decodes)
        driver = subject.driver(block_size)
        expected = driver.one_shot(tokens)
        found = _in_parts(driver, driver.request(tokens), chunks, num_decodes)
        wrong = difference(expected, found, subject.tolerance)
        if wrong:
            decodes = f" and {num_decodes} decodes" if num_decodes else ""
            raise Violation(
                f"I4 chunking: chunk {chunks}{decodes} of a {len(tokens)}-token prompt {wrong} "
                f"(block size {block_size})"
            )

    least, longest = subject.block_size, subject.max_tokens
    always: list[Any] = [
        ((1,), min(longest, 20) - 1, least),
        ((1, 1, 2, 1, 3, longest - 8), 0, least),
        ((longest // 2, longest - longest // 2 - 3), 3, least),
    ]
    try_examples(body, examples(), subject.profile.steps, subject.profile.shrink, always)


def batch_invariance(subject: Subject) -> None:
    """I5: a request's output depends neither on what else is in the batch nor on its place in it."""

    @st.composite
    def examples(draw: st.DrawFn) -> tuple[int, int, bool, tuple[Neighbour, ...], int]:
        half = max(2, subject.max_tokens // 2)
        neighbours, place = draw(strategies.batch_mixes(half))
        decode = draw(st.booleans())
        computed = draw(st.integers(1 if decode else 0, half - 1))
        return computed, 1 if decode else draw(st.integers(1, half)), decode, neighbours, place

    def body(example: tuple[int, int, bool, tuple[Neighbour, ...], int]) -> None:
        computed, count, decode, neighbours, place = example
        driver = subject.driver()
        tokens = subject.text(computed + count + 1)

        def run(others: Sequence[Neighbour]) -> Trace:
            driver.reset()
            rows = [_prepared(driver, subject.text(n.computed + n.count, 10 + i), n) for i, n in enumerate(others)]
            own = _prepared(driver, tokens, Neighbour(computed, count, decode))
            if others:
                rows.insert(place, own)
            else:
                rows = [own]
            together = driver.run(*rows).rows[rows.index(own)]
            return Trace.join([together, driver.run(Row(own.request, decode=True)).rows[0]])

        wrong = difference(run(()), run(neighbours), subject.tolerance, computed)
        if wrong:
            kind = "a decode" if decode else f"a chunk of {count}"
            others = ", ".join(_shown(neighbour) for neighbour in neighbours)
            raise Violation(
                f"I5 batch: {kind} at token {computed}, row {place} among [{others}], is not what it is alone: {wrong}"
            )

    half = max(4, subject.max_tokens // 2)
    mix = (Neighbour(half - 1, 1, True), Neighbour(2, 1, True), Neighbour(0, half // 2, False), Neighbour(3, 2, False))
    always: list[Any] = [
        (half // 2, 1, True, (Neighbour(half - 1, 1, True), Neighbour(1, 1, True)), 2),
        (3, half // 2, False, mix, 2),
        (0, 3, False, mix, 3),
        (2, 1, True, mix, 0),
    ]
    try_examples(body, examples(), subject.profile.steps, subject.profile.shrink, always)


def causality(subject: Subject) -> None:
    """I8: perturbing a later token never changes an earlier output."""

    @st.composite
    def examples(draw: st.DrawFn) -> tuple[int, int, int]:
        length = draw(st.integers(2, subject.max_tokens))
        position = draw(st.integers(1, length - 1))
        return length, position, draw(st.integers(0, position - 1))

    def body(example: tuple[int, int, int]) -> None:
        length, position, computed = example
        driver = subject.driver()
        tokens = subject.text(length)
        other = [*tokens]
        other[position:] = [(token + 1 + position) % subject.vocab_size for token in tokens[position:]]

        def run(text: list[int]) -> Trace:
            driver.reset()
            request = driver.request(text)
            if computed:
                driver.run(Row(request, computed))
            return driver.run(Row(request, length - computed)).rows[0].between(0, position - computed)

        wrong = difference(run(tokens), run(other), subject.tolerance, computed)
        if wrong:
            raise Violation(
                f"I8 causality: changing the tokens from {position} on of a chunk of tokens {computed} to {length - 1} "
                f"changes earlier outputs: it {wrong}"
            )

    longest = subject.max_tokens
    always = [(longest, longest - 1, 0), (longest, longest // 2, longest // 4), (3, 1, 0)]
    try_examples(body, examples(), subject.profile.steps, subject.profile.shrink, always)


def unsupported_drafts(subject: Subject) -> str | None:
    """Why I9 does not apply, or `None`."""
    figures = subject.inspection.figures
    unable = [
        name
        for name, num_bytes in figures.slot_bytes.items()
        if num_bytes and figures.requirements[name].rewind is Rewind.NEVER
    ]
    return f"{', '.join(unable)} cannot take drafts back (rewind 'never')" if unable else None


def verification(subject: Subject) -> None:
    """I9: verify k drafts with any acceptance = sequential decode; also a spec step followed by one without drafts."""

    @st.composite
    def examples(draw: st.DrawFn) -> tuple[int, Verification, int]:
        num_spec_tokens = draw(st.sampled_from(_SPEC_TOKENS))
        return num_spec_tokens, draw(strategies.verifications(num_spec_tokens, subject.max_tokens)), draw(_companions)

    def body(example: tuple[int, Verification, int]) -> None:
        num_spec_tokens, plan, companion = example
        driver = subject.driver(None, num_spec_tokens)
        tokens, others = subject.text(plan.length), subject.text(plan.length + 2, 1)

        def run(pattern: Sequence[tuple[int, int]], companion: int) -> list[Trace]:
            driver.reset()
            request, other = driver.request(tokens), driver.request(others)
            driver.run(Row(request, plan.prefill))
            driver.run(Row(other, 2))
            own, beside = [], []
            for drafts, accepted in pattern:
                wrong = [
                    (token + 1 + drafts) % subject.vocab_size for token in range(request.num_computed, 9**9)[:drafts]
                ]
                row = Row(request, 1 + accepted, wrong[accepted:], decode=True)
                plain = Row(other, decode=True)
                rows = {0: [row], 1: [plain, row], 2: [row, plain]}[companion]
                traces = driver.run(*rows).rows
                own.append(traces[rows.index(row)].between(0, 1 + accepted))
                if companion:
                    beside.append(traces[rows.index(plain)])
            if plan.rest:
                own.append(driver.run(Row(request, plan.rest)).rows[0])
            return [Trace.join(own), *([Trace.join(beside)] if companion else [])]

        # What is accepted, one token after the other.
        expected = run([(0, 0)] * sum(1 + accepted for _, accepted in plan.pattern), 0)[0]
        found = run(plan.pattern, companion)
        wrong = difference(expected, found[0], subject.tolerance, plan.prefill)
        if wrong is None and companion:
            driver.reset()
            other = driver.request(others)
            driver.run(Row(other, 2))
            alone = Trace.join([driver.run(Row(other, decode=True)).rows[0] for _ in plan.pattern])
            wrong = difference(alone, found[1], subject.tolerance, 2)
            wrong = None if wrong is None else f"a request beside it, which has no drafts, {wrong}"
        if wrong:
            steps = ", ".join(f"{accepted} of {drafts}" for drafts, accepted in plan.pattern)
            raise Violation(
                f"I9 drafts: after {plan.prefill} tokens, steps that accept {steps} drafts"
                f"{f', then a chunk of {plan.rest}' if plan.rest else ''} (at most {num_spec_tokens}): {wrong}"
            )

    longest = subject.max_tokens
    pattern = ((3, 0), (3, 2), (0, 0), (2, 1), (3, 3), (0, 0), (3, 0), (1, 0))
    always = [
        (3, Verification(5, pattern, 4), 1),
        (3, Verification(longest - 26, pattern, 4), 2),
        (1, Verification(2, ((1, 0), (0, 0), (1, 1), (1, 0), (1, 0)), 2), 0),
    ]
    try_examples(body, examples(), subject.profile.steps, subject.profile.shrink, always)


def padding(subject: Subject) -> None:
    """I10: garbage in padding rows changes nothing."""

    def body(example: tuple[int, int, int]) -> None:
        length, padding_rows, padding_tokens = example
        driver = subject.driver()

        def run(rows: int, tokens: int) -> Trace:
            driver.reset()
            # A bystander in block 0 and group 0, where a padding row that is not skipped ends up.
            blocks = [0, *sorted(block for block in driver.free_blocks if block)[-20:]]
            text = subject.text(3, 5)
            bystander = driver.request(text, blocks=blocks, group=0 if driver.states else None)
            driver.free_blocks.remove(0)
            driver.free_groups = [group for group in driver.free_groups if group]
            own, second = driver.request(subject.text(length + 2)), driver.request(subject.text(4, 3))
            pads: Any = {"padding_rows": rows, "padding_tokens": tokens}
            traces = [*driver.run(Row(bystander, 2), Row(own, length), **pads).rows, driver.run(Row(second, 2)).rows[0]]
            traces += driver.run(Row(own, decode=True), Row(second, decode=True), **pads).rows
            traces += driver.run(Row(own, decode=True), Row(second, 1), **pads).rows
            traces += driver.run(Row(bystander, decode=True)).rows
            return Trace.join(traces)

        wrong = difference(run(0, 0), run(padding_rows, padding_tokens), subject.tolerance)
        if wrong:
            raise Violation(
                f"I10 padding: {padding_rows} padding rows and {padding_tokens} padding tokens behind decodes and a "
                f"chunk of {length} change the outputs: counted through all rows, it {wrong}"
            )

    examples = st.tuples(st.integers(1, subject.max_tokens // 2), st.integers(0, 3), st.integers(0, 5))
    always = [(min(9, subject.max_tokens // 2), 2, 3), (2, 1, 0)]
    try_examples(body, examples, subject.profile.steps // 2, subject.profile.shrink, always)


def poison(subject: Subject) -> None:
    """I3: caches filled with NaN before use change nothing."""

    def body(example: tuple[tuple[int, ...], int]) -> None:
        chunks, num_decodes = example
        driver = subject.driver()
        tokens = subject.text(sum(chunks) + num_decodes)

        def run(value: float) -> Trace:
            driver.reset(value)
            return _in_parts(driver, driver.request(tokens), chunks, num_decodes)

        expected = run(0.0)
        for value in (1e4, float("nan")):
            wrong = difference(expected, run(value), subject.tolerance)
            if wrong:
                raise Violation(
                    f"I3 poison: with {value} instead of 0 where nobody wrote, chunks {chunks} and {num_decodes} "
                    f"decodes: it {wrong}"
                )

    longest = subject.max_tokens
    examples = st.integers(2, longest - 2).flatmap(
        lambda length: st.tuples(strategies.chunkings(length, most=3), st.integers(0, 2))
    )
    always = [((1,), 2), ((5, 3), 2), ((longest // 2, longest // 3), 2)]
    try_examples(body, examples, subject.profile.steps // 2, subject.profile.shrink, always)


_companions = st.integers(0, 2)


def _block_sizes(subject: Subject) -> st.SearchStrategy[int]:
    return strategies.block_sizes(subject.block_size)


def _in_parts(driver: StepDriver, request: Request, chunks: Sequence[int], num_decodes: int) -> Trace:
    parts = [driver.run(Row(request, count)).rows[0] for count in chunks]
    parts += [driver.run(Row(request, decode=True)).rows[0] for _ in range(num_decodes)]
    return Trace.join(parts)


def _prepared(driver: StepDriver, tokens: list[int], row: Neighbour) -> Row:
    request = driver.request(tokens)
    if row.computed:
        driver.run(Row(request, row.computed))
    return Row(request, row.count, decode=row.decode)


def _shown(row: Neighbour) -> str:
    return f"decode at {row.computed}" if row.decode else f"chunk of {row.count} at {row.computed}"
