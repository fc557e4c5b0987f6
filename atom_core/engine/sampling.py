"""SamplingParams: how one request's tokens are chosen, checked where it is made. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from atom_core.errors import RequestError

__all__ = ["Logprob", "SamplingKind", "SamplingParams"]

SamplingKind = Literal["greedy", "plain", "ranked", "nucleus"]

_GREEDY_BELOW: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's place in the distribution that the model gave, before any filter.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: 1 for the likeliest token; 1 + the number of tokens that are strictly likelier.
    """

    logprob: float
    rank: int


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Order of the filters: repetition, frequency and presence penalty and `min_tokens`, then temperature,
    top-k, top-p, min-p, each on what the one before left, as transformers' logits processors do it.
    Tokens with equal logits are kept or removed together.

    Attributes:
        n: samples of one prompt, which is computed once; they run at once, so no more than `max_num_seqs`.
        max_tokens: most tokens of output; `None` goes on to the model's limit.
        min_tokens: end-of-sequence and stop tokens cannot be chosen, and stop strings do not count, before this many.
        temperature: divides the logits; below 1e-5 the likeliest token is taken (greedy).
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities reach this sum.
        min_p: keep tokens at least this fraction as likely as the likeliest.
        seed: of this request's draws; `None` lets the engine pick one.
        repetition_penalty: above 1 makes tokens of prompt and output less likely (CTRL, arXiv:1909.05858, section 4.1).
        presence_penalty: subtracted once from the logit of each token that the output has.
        frequency_penalty: subtracted from a token's logit for each time that the output has it.
        stop: strings that end the output; read them as `stop_strings`.
        stop_token_ids: tokens that end the output, besides the model's own.
        include_stop_str_in_output: keep the stop string, or the stop token's text, in the text.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: alternatives to report per output token; 0 reports the chosen one only, `None` nothing.
        prompt_logprobs: the same for prompt tokens.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a field has a bad value, or two do not fit together.
    """

    n: int = 1
    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, (holds, expected) in _CHECKS.items():
            value: object = getattr(self, name)
            if not holds(value):
                raise RequestError(f"{name} must be {expected}, found {value!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({self.max_tokens}), found {self.min_tokens}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, a tuple whatever `stop` was given as."""
        return tuple(self.stop)

    @cached_property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.temperature < _GREEDY_BELOW

    @cached_property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it (besides through the model)."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def takes_largest(self) -> bool:
        """Whether each token is that of the largest logit, and nothing else is wanted."""
        return self.greedy and not self.penalizes and self.min_tokens == 0 and self.logprobs is None

    @cached_property
    def kind(self) -> SamplingKind:
        """What choosing a token needs.

        `greedy`: the largest logit. `plain`: all tokens, unfiltered. `ranked`: the likeliest tokens only.
        `nucleus`: those, and the mass of all tokens, because top-p applies to the whole vocabulary.
        """
        if self.greedy:
            return "greedy"
        if self.top_k == 0 and self.top_p < 1:
            return "nucleus"
        return "ranked" if self.top_k > 0 or self.min_p > 0 else "plain"


def _whole(low: int, high: float = math.inf) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _real(low: float, high: float = math.inf) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    )


def _positive(high: float = math.inf) -> Callable[[object], bool]:
    return lambda value: _real(0, high)(value) and value != 0


def _optional(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _stop_strings(value: object) -> bool:
    strings = [value] if isinstance(value, str) else value
    return isinstance(strings, Sequence) and all(isinstance(text, str) and text for text in strings)


def _token_ids(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(_whole(0), value))


_CHECKS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "n": (_whole(1), "a whole number, at least 1"),
    "max_tokens": (_optional(_whole(1)), "a whole number, at least 1, or None for the model's limit"),
    "min_tokens": (_whole(0), "a whole number, 0 or more"),
    "temperature": (_real(0), "a finite number, 0 (greedy) or more"),
    "top_k": (_whole(0), "a whole number, 0 (off) or more"),
    "top_p": (_positive(1), "a number above 0 and at most 1 (off)"),
    "min_p": (_real(0, 1), "a number from 0 (off) to 1"),
    "seed": (_optional(_whole(0, 2**64 - 1)), "a whole number from 0 to 2**64 - 1, or None"),
    "repetition_penalty": (_positive(), "a finite number above 0, 1 for off"),
    "presence_penalty": (_real(-2, 2), "a number from -2 to 2, 0 for off"),
    "frequency_penalty": (_real(-2, 2), "a number from -2 to 2, 0 for off"),
    "stop": (_stop_strings, "a non-empty string or a sequence of such strings"),
    "stop_token_ids": (_token_ids, "a sequence of token ids, 0 or more"),
    "include_stop_str_in_output": (_flag, "True or False"),
    "ignore_eos": (_flag, "True or False"),
    "logprobs": (_optional(_whole(0)), "a whole number, 0 or more, or None for none"),
    "prompt_logprobs": (_optional(_whole(0)), "a whole number, 0 or more, or None for none"),
    "skip_special_tokens": (_flag, "True or False"),
}
