"""Detokenizer: turns one sample's tokens into text as they come, and finds stop strings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from tokenizers.decoders import DecodeStream

from atom_core.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns one sample's tokens into text as they come.

    All deltas together are `text`, and after `flush` that is what the tokenizer decodes all tokens to, up to a stop
    string. Characters of which bytes are missing, and text that may be the beginning of a stop string, are held back.
    Where several stop strings match, the one that ends first counts, of those the longest: how the tokens cut the
    text, and how many come at once, make no difference.

    A stop token whose text is unwanted (`include_stop_str_in_output` off) is not to be appended.

    Attributes:
        text: what was given out so far.
        num_tokens: tokens taken so far; those after the one that completed a stop string are not taken.
        finished_by: the stop string found, or `None`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> None:
        """Start a sample.

        Args:
            tokenizer: any of transformers' tokenizers.
            params: the request's; those about stop strings, special tokens and `min_tokens` are read.
        """
        self.text = ""
        self.num_tokens = 0
        self.finished_by: str | None = None
        skip = params.skip_special_tokens
        self._stream: _Stream = _FastStream(tokenizer, skip) if tokenizer.is_fast else _SlowStream(tokenizer, skip)
        self._stop_strings = params.stop_strings
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._tail = ""

    def append(self, token_ids: Iterable[int]) -> str:
        """Take tokens; returns the text that they add."""
        delta = ""
        for token_id in token_ids:
            if self.finished_by is not None:
                break
            self.num_tokens += 1
            new = self._stream.step(token_id)
            delta += self._release(new) if self._stop_strings else new
        self.text += delta
        return delta

    def flush(self) -> str:
        """Give out what was held back, because no more tokens come; returns it, and nothing the next time."""
        if self.finished_by is not None:
            return ""
        new = self._stream.finish()
        delta = self._release(new) if self._stop_strings else new
        if self.finished_by is None and not self._include_stop:
            delta += self._tail
        self._tail = ""
        self.text += delta
        return delta

    def _release(self, new: str) -> str:
        """Give out what cannot be part of a stop string; the tail, which may begin one, is out already if included."""
        window = self._tail + new
        num_out = len(self._tail) if self._include_stop else 0
        match = self._find_stop(window) if self.num_tokens >= self._min_tokens else None
        if match is not None:
            start, self.finished_by = match
            self._tail = ""
            return window[num_out : start + len(self.finished_by) if self._include_stop else start]
        self._tail = self._longest_beginning(window)
        return window[num_out:] if self._include_stop else window[: len(window) - len(self._tail)]

    def _find_stop(self, window: str) -> tuple[int, str] | None:
        """Find the stop string that ends first after the tail: where it starts, and which it is."""
        found = []
        for stop in self._stop_strings:
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _longest_beginning(self, window: str) -> str:
        """Find the longest end of the window that is a beginning, but not all, of a stop string."""
        longest = 0
        for stop in self._stop_strings:
            for length in range(min(len(stop) - 1, len(window)), longest, -1):
                if window.endswith(stop[:length]):
                    longest = length
                    break
        return window[len(window) - longest :]


class _Stream(Protocol):
    """Tokens in, text out, complete characters only."""

    def step(self, token_id: int) -> str:
        """Take a token; returns the text that is complete now."""

    def finish(self) -> str:
        """Return what is incomplete, with replacement characters."""


class _FastStream:
    """Streams through `tokenizers`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._text_length = 0
        self._num_decoded = 0

    def step(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        try:
            new = self._stream.step(self._backend, token_id)
        except Exception:
            # A byte that is no character made the decoder take back text that is out (byte-fallback vocabularies do
            # that); tokenizers raises a bare Exception. Go on from what is not out yet.
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            new = self._stream.step(self._backend, self._token_ids[self._num_decoded :])
        if new is None:
            return ""
        self._num_decoded = len(self._token_ids)
        self._text_length += len(new)
        return new

    def finish(self) -> str:
        if self._num_decoded == len(self._token_ids):
            return ""
        new = _decode(self._tokenizer, self._token_ids, self._skip)[self._text_length :]
        self._num_decoded = len(self._token_ids)
        return new


class _SlowStream:
    """Streams by decoding twice, with and without the new tokens, from a place some tokens back.

    The tokens before that place would change how the first ones decode (a leading space is dropped); the same text
    decoded twice cancels that. As in text-generation-inference's `decode_token`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._token_ids: list[int] = []
        self._num_out = 0

    def step(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        new = self._new_text()
        if not new or new.endswith(_INCOMPLETE):
            return ""
        self._token_ids = self._token_ids[self._num_out :]
        self._num_out = len(self._token_ids)
        return new

    def finish(self) -> str:
        new = self._new_text()
        self._num_out = len(self._token_ids)
        return new

    def _new_text(self) -> str:
        out = _decode(self._tokenizer, self._token_ids[: self._num_out], self._skip)
        return _decode(self._tokenizer, self._token_ids, self._skip)[len(out) :]


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip_special_tokens: bool) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))
