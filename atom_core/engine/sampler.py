"""Sampler: turns one step's logits into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atom_core.engine.distribution import draw_plain, draw_ranked, filtered_weights, token_weights, uniform_numbers
from atom_core.engine.logprobs import prompt_logprobs, row_pieces, token_logprobs
from atom_core.engine.sampling import Logprob, SamplingKind, SamplingParams
from atom_core.errors import EngineError

__all__ = ["SampledTokens", "Sampler", "SamplingRow", "edit_logits", "needs_host", "prompt_logprobs"]

_KINDS: tuple[SamplingKind, ...] = ("greedy", "plain", "ranked", "nucleus")


@dataclass(slots=True)
class SamplingRow:
    """What choosing one row's token depends on, besides its logits.

    Attributes:
        params: the request's.
        seed: of this sample's draws, 0 to 2**64 - 1; samples of one request need different ones.
        prompt_token_ids: the prompt; may be left out where nothing is penalized.
        output_token_ids: all tokens before the one to choose, for a verify row with its drafts; as the prompt.
        position: how many those are; a draw depends on seed and position alone.
        eos_token_ids: the model's, which `min_tokens` bars.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int] | NDArray[np.integer]
    output_token_ids: Sequence[int] | NDArray[np.integer]
    position: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's choice: per row a token and, for rows that asked, logprobs by token id, the chosen one first."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]


class Sampler:
    """Turns logits into tokens; a row's token depends on no other row and not on its place.

    Args:
        vocab_size: tokens per row of logits.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        """Choose one token per row.

        Args:
            logits: [rows, vocab_size], any floating dtype; not changed.
            rows: one per row of logits.

        Raises:
            EngineError: the logits' shape is not [rows, vocab_size].
        """
        token_ids = self.choose(logits, rows)
        return SampledTokens(token_ids.tolist(), self.logprobs(logits, token_ids, rows))

    def choose(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Choose one token per row, on the logits' device.

        On a GPU this waits for the device only where a row's filters do: `needs_host` says so.

        Args:
            logits: [rows, vocab_size], any floating dtype; not changed.
            rows: one per row of logits.

        Returns:
            [rows] int64.

        Raises:
            EngineError: the logits' shape is not [rows, vocab_size].
        """
        self._check(logits, len(rows))
        edited = edit_logits(logits, rows)
        result = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        return self._by_kind(edited, rows, self._choose, result)

    def largest(self, logits: Tensor) -> Tensor:
        """Choose the largest logit of each row: what `choose` does where all params say `takes_largest`.

        Args:
            logits: [rows, vocab_size], any floating dtype.

        Returns:
            [rows] int64, on the logits' device.

        Raises:
            EngineError: the logits' shape is not [rows, vocab_size].
        """
        self._check(logits, len(logits))
        return _argmax(logits)

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, rows: Sequence[SamplingRow]
    ) -> list[dict[int, Logprob] | None]:
        """Report logprobs of chosen tokens, for the rows that asked.

        Args:
            logits: [rows, vocab_size], any floating dtype, unfiltered.
            token_ids: [rows] int64, from `choose`.
            rows: one per row of logits.
        """
        logprobs: list[dict[int, Logprob] | None] = [None] * len(rows)
        asking = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        if asking:
            nums_top = [rows[index].params.logprobs or 0 for index in asking]
            answers = token_logprobs(logits[asking], token_ids[asking], nums_top)
            for index, answer in zip(asking, answers, strict=True):
                logprobs[index] = answer
        return logprobs

    def probabilities(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Give the distributions that `__call__` draws from; a greedy row's has all mass on one token.

        Args:
            logits: [rows, vocab_size], any floating dtype; not changed.
            rows: one per row of logits.

        Returns:
            [rows, vocab_size] float32, on the logits' device.

        Raises:
            EngineError: the logits' shape is not [rows, vocab_size].
        """
        self._check(logits, len(rows))
        result = torch.empty(logits.shape, dtype=torch.float32, device=self._device)
        return self._by_kind(edit_logits(logits, rows), rows, self._distribute, result)

    def uniforms(self, rows: Sequence[SamplingRow], stream: int = 0) -> Tensor:
        """Give each row its random number.

        Args:
            rows: of which seed and position count.
            stream: numbers of different streams are independent; `__call__` uses stream 0.

        Returns:
            [rows] float64 in [0, 1), on the sampler's device.
        """
        return self._upload(uniform_numbers([row.seed for row in rows], [row.position for row in rows], stream))

    def _check(self, logits: Tensor, num_rows: int) -> None:
        expected = (num_rows, self._vocab_size)
        if tuple(logits.shape) != expected:
            raise EngineError(f"the sampler got logits of shape {tuple(logits.shape)}, expected {expected}")

    def _by_kind(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        work: Callable[[SamplingKind, Tensor, Sequence[SamplingRow]], Tensor],
        result: Tensor,
    ) -> Tensor:
        """Do the work on the rows of each kind together, on few of them at a time, and put the answers in place."""
        kinds = [row.params.kind for row in rows]
        for kind in _KINDS:
            index = [place for place, other in enumerate(kinds) if other == kind]
            if len(index) == len(rows):
                return self._in_pieces(kind, logits, rows, work)
            if index:
                where = self._upload(torch.tensor(index))
                result[where] = self._in_pieces(kind, logits[where], [rows[place] for place in index], work)
        return result

    def _in_pieces(
        self,
        kind: SamplingKind,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        work: Callable[[SamplingKind, Tensor, Sequence[SamplingRow]], Tensor],
    ) -> Tensor:
        pieces = [slice(0, len(rows))] if kind == "greedy" else row_pieces(logits)
        return torch.cat([work(kind, logits[piece], rows[piece]) for piece in pieces])

    def _choose(self, kind: SamplingKind, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        if kind == "greedy":
            return _argmax(logits)
        filters, uniforms = self._filters(rows), self.uniforms(rows)
        if kind == "plain":
            return draw_plain(logits, filters, uniforms)
        return draw_ranked(logits, filters, uniforms, whole_mass=kind == "nucleus")

    def _distribute(self, kind: SamplingKind, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        if kind == "greedy":
            result = torch.zeros(logits.shape, dtype=torch.float32, device=self._device)
            return result.scatter_(1, _argmax(logits).unsqueeze(1), 1.0)
        filters = self._filters(rows)
        if kind == "plain":
            weights = token_weights(logits, filters[:, :1])
        else:
            weights = filtered_weights(logits, filters, whole_mass=kind == "nucleus")
        return (weights / weights.sum(-1, keepdim=True).double()).float()

    def _filters(self, rows: Sequence[SamplingRow]) -> Tensor:
        values = [
            (params.temperature, min(params.top_k, self._vocab_size), params.top_p, params.min_p)
            for params in (row.params for row in rows)
        ]
        return self._upload(torch.from_numpy(np.array(values, dtype=np.float64)))

    def _upload(self, values: Tensor) -> Tensor:
        """Send to the device without waiting for what runs there."""
        if self._device.type == "cuda":
            values = values.pin_memory()
        return values.to(self._device, non_blocking=True)


def needs_host(params: SamplingParams) -> bool:
    """Say whether choosing a token needs the tokens before it, or the device's answers, on the host."""
    return params.penalizes or params.logprobs is not None or params.kind not in ("greedy", "plain")


def edit_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply penalties and `min_tokens`, touching only the tokens that they name.

    Args:
        logits: [rows, vocab], any floating dtype; not changed.
        rows: one per row of logits.

    Returns:
        The logits themselves where no row asks for an edit, else an edited float32 copy.
    """
    penalized = [index for index, row in enumerate(rows) if row.params.penalizes]
    barred = [index for index, row in enumerate(rows) if row.position < row.params.min_tokens]
    if penalized or barred:
        logits = logits.to(torch.float32, copy=True)
    if penalized:
        _penalize(logits, rows, penalized)
    if barred:
        names = [(index, rows[index].eos_token_ids.union(rows[index].params.stop_token_ids)) for index in barred]
        pairs = [(index, token_id) for index, ids in names for token_id in ids if token_id < logits.shape[1]]
        row_ids, token_ids = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(logits.device).unbind(1)
        logits[row_ids, token_ids] = -torch.inf
    return logits


def _penalize(logits: Tensor, rows: Sequence[SamplingRow], penalized: Sequence[int]) -> None:
    """Apply the penalties of the rows named, in place, by one gather and one scatter of the tokens they have seen."""
    token_ids: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.int64]] = []
    for index in penalized:
        row = rows[index]
        prompt = row.prompt_token_ids if row.params.repetition_penalty != 1 else ()
        seen = np.concatenate([np.asarray(prompt, np.int64), np.asarray(row.output_token_ids, np.int64)])
        ids, places = np.unique(seen, return_inverse=True)
        token_ids.append(ids)
        counts.append(np.bincount(places[len(prompt) :], minlength=len(ids)))
    lengths = [len(ids) for ids in token_ids]
    asked = [rows[index].params for index in penalized]
    penalties = [(params.repetition_penalty, params.frequency_penalty, params.presence_penalty) for params in asked]
    factor, frequency, presence = np.repeat(np.array(penalties), lengths, axis=0).T
    times = np.concatenate(counts)
    less_by = frequency * times + presence * (times > 0)
    where = np.stack([np.repeat(penalized, lengths), np.concatenate(token_ids)])
    known = where[1] < logits.shape[1]
    at_row, at_token = torch.from_numpy(where[:, known]).to(logits.device)
    divisor, less = torch.from_numpy(np.stack([factor, less_by])[:, known]).float().to(logits.device)
    values = logits[at_row, at_token]
    logits[at_row, at_token] = torch.where(values > 0, values / divisor, values * divisor) - less


def _argmax(logits: Tensor) -> Tensor:
    """[rows] int64, the first of the largest; numpy's is three times as fast as torch's on a CPU."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.float().numpy().argmax(-1))
    return logits.argmax(-1)
