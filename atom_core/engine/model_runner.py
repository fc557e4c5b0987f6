"""ModelRunner: runs a scheduled batch through the model and samples."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from atom_core.engine.batch_builder import BatchBuilder, StepInputs, StepShape
from atom_core.engine.graphs import CaptureCost, StepGraphs
from atom_core.engine.sampler import Sampler, SamplingRow, prompt_logprobs
from atom_core.engine.scheduled_batch import ScheduledBatch
from atom_core.errors import EngineError
from atom_core.plugin import AttentionLayer, Step, StepBuffers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from atom_core.engine.sampling import Logprob
    from atom_core.engine.scheduled_batch import CheckpointSave, Fork
    from atom_core.engine.state_mover import StateMover
    from atom_core.plugin.model_hooks import ModelHooks

__all__ = ["LaunchedStep", "ModelRunner", "StepOutput", "sampling_rows"]


@dataclass(frozen=True)
class StepOutput:
    """What a step gave, one entry per row.

    Attributes:
        token_ids: new tokens of the row; none for a chunk that does not complete.
        logprobs: for each new token, its logprobs, or `None` where not asked for.
        prompt_logprobs: logprobs of the prompt tokens that follow the row's computed ones.
        forked: by row that computed the prompt of several samples, the first token of each further one.
        forked_logprobs: as many logprobs.
    """

    token_ids: list[list[int]]
    logprobs: list[list[dict[int, Logprob] | None]]
    prompt_logprobs: list[list[dict[int, Logprob]]]
    forked: dict[int, list[int]] = field(default_factory=dict)
    forked_logprobs: dict[int, list[dict[int, Logprob] | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class _WantedLogits:
    """Which logits a step needs.

    Attributes:
        indices: flat token index of each.
        sampled_rows: the row of each token to sample; a row that verifies drafts has one for each and one more, a
            row that computes the prompt of several samples one for each.
        sampled_at: for each of them, the place in `indices`.
        prompt_rows: `(row, first place in indices, count)` of rows that report prompt logprobs.
    """

    indices: np.ndarray[Any, np.dtype[np.int64]]
    sampled_rows: list[int]
    sampled_at: list[int]
    prompt_rows: list[tuple[int, int, int]]


@dataclass(frozen=True)
class _Chosen:
    """A step's tokens.

    Attributes:
        logits: [sampled, vocab_size] that they were chosen from.
        rows: what each choice depended on; none where all are the largest logits.
        token_ids: [sampled] int64, on the device.
        copy: the same on the host, once `ready`.
        ready: `None` where the host waits for every step anyway.
    """

    logits: Tensor
    rows: list[SamplingRow]
    token_ids: Tensor
    copy: Tensor
    ready: torch.cuda.Event | None

    def on_host(self) -> list[int]:
        """Wait for the tokens."""
        if self.ready is not None:
            self.ready.synchronize()
        token_ids: list[int] = self.copy.tolist()
        return token_ids


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device has been given.

    Attributes:
        scheduled: its rows.
        wanted: which logits it needs.
        logits: [wanted, vocab_size]; valid until the next step is launched.
        chosen: its tokens; `None` if no row completes.
    """

    scheduled: ScheduledBatch
    wanted: _WantedLogits
    logits: Tensor
    chosen: _Chosen | None


class ModelRunner:
    """One model with its bound layers and caches.

    Attributes:
        step: what the layers hold a reference to.
        states: what fills and copies the slots of per-request state.
        hidden: [tokens, hidden_size], the last step's last hidden states, its first tokens first; `None` unless
            `keep_hidden` was called.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[AttentionLayer, ...],
        hooks: ModelHooks,
        step: Step,
        builder: BatchBuilder,
        buffers: StepBuffers,
        states: StateMover,
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._layers = layers
        self._hooks = hooks
        self.step = step
        self._builder = builder
        self._buffers = buffers
        self.states = states
        self._device = device
        self._sampler = Sampler(vocab_size, device)
        self._graphs: StepGraphs | None = None
        self.hidden: Tensor | None = None
        self._uploads: deque[torch.cuda.Event] = deque()  # of the last two steps, which filled one host side each
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, scheduled: ScheduledBatch) -> StepOutput:
        """Compute one step.

        Args:
            scheduled: at least one row.
        """
        return self.finish(self.launch(scheduled))

    @torch.inference_mode()
    def launch(self, scheduled: ScheduledBatch, follows: LaunchedStep | None = None) -> LaunchedStep:
        """Give the device a step, without waiting for it where `needs_host` allows.

        Args:
            scheduled: at least one row.
            follows: the step before, if its tokens are not known yet; each row of this one is a row of it and computes
                the token that it chose.
        """
        self.states.prepare(scheduled.leased)
        shape = None if self._graphs is None else self._graphs.shape_of(scheduled)
        inputs, metadata = self._prepare(scheduled, shape)
        if follows is not None:
            self._take_tokens(inputs, scheduled, follows)
        wanted = _wanted_logits(scheduled, inputs.batch.query_start_loc_host)
        if self._graphs is not None and shape is not None:
            logits, self.hidden = self._graphs.run(shape, inputs, metadata)
            logits = logits[: len(wanted.indices)]
        else:
            logits = self._forward(inputs, metadata, wanted.indices)
        return self._choose(scheduled, wanted, logits)

    @torch.inference_mode()
    def finish(self, launched: LaunchedStep) -> StepOutput:
        """Wait for a step's tokens; before the next one is launched where anybody asked for logprobs."""
        scheduled, wanted, logits = launched.scheduled, launched.wanted, launched.logits
        num_rows = len(scheduled.seqs)
        output = StepOutput([[] for _ in range(num_rows)], [[] for _ in range(num_rows)], [[] for _ in range(num_rows)])
        if launched.chosen is not None:
            chosen, token_ids = launched.chosen, launched.chosen.on_host()
            logprobs = self._sampler.logprobs(chosen.logits, chosen.token_ids, chosen.rows) if chosen.rows else None
            for row, token_id in zip(wanted.sampled_rows, token_ids, strict=True):
                output.token_ids[row].append(token_id)
            for row, answer in zip(wanted.sampled_rows, logprobs or [None] * len(token_ids), strict=True):
                output.logprobs[row].append(answer)
            _drop_after_mismatch(scheduled, output)
            _part_forks(scheduled, output)
        for row, first, count in wanted.prompt_rows:
            seq = scheduled.seqs[row]
            start = seq.num_computed_tokens + 1
            targets = seq.tokens_between(start, start + count).tolist()
            output.prompt_logprobs[row].extend(
                prompt_logprobs(logits[first : first + count], targets, seq.params.prompt_logprobs or 0)
            )
        return output

    def keep_hidden(self) -> None:
        """Keep each step's last hidden states from now on; call it before steps are captured."""

        def keep(_: nn.Module, __: object, output: Any) -> None:
            self.hidden = output.last_hidden_state[0]

        self._model.get_decoder().register_forward_hook(keep)  # type: ignore[operator]

    @torch.inference_mode()
    def use_graphs(
        self, shapes: Rows[StepShape], *, capture: bool = True, inside: AbstractContextManager[Any] | None = None
    ) -> CaptureCost:
        """Run decode steps in padded shapes from now on.

        Args:
            shapes: the ladder.
            capture: capture each shape as a CUDA graph; else padded steps run as any other, for tests.
            inside: what to enter while capturing.

        Returns:
            What capturing took.
        """
        self._graphs = None
        if not shapes:
            return CaptureCost()
        self._builder.reserve(shapes)
        self._graphs = StepGraphs(shapes, lambda *arguments: (self._forward(*arguments), self.hidden))
        if not capture:
            return CaptureCost()
        with inside or nullcontext():
            return self._graphs.capture(lambda shape: self._prepare(ScheduledBatch(), shape), self._device)

    @torch.inference_mode()
    def save_states(self, saves: Rows[CheckpointSave]) -> None:
        """Copy states that the last step made; call it before the next."""
        self.states.save(saves)

    @torch.inference_mode()
    def copy_forks(self, forks: Rows[Fork]) -> None:
        """Copy what samples that part need of their own; call it before the next step."""
        self.states.fork(forks)

    def step_finished(self, stats: Mapping[str, Any]) -> None:
        """Tell the plugins that observe."""
        self._hooks.step_finished(stats)

    def _prepare(self, scheduled: ScheduledBatch, shape: StepShape | None) -> tuple[StepInputs, Mapping[str, Any]]:
        """Fill the step's arrays, and the plugins' buffers, once the step that filled the same side is uploaded."""
        if len(self._uploads) == 2:
            self._uploads.popleft().synchronize()
        self._buffers.turn()
        inputs = self._builder.build(scheduled, shape)
        metadata = self._hooks.build_metadata(layers=self._layers, batch=inputs.batch, buffers=self._buffers)
        if self._device.type == "cuda":
            uploaded: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            uploaded.record()
            self._uploads.append(uploaded)
        return inputs, metadata

    def _forward(
        self, inputs: StepInputs, metadata: Mapping[str, Any], indices: np.ndarray[Any, Any] | None = None
    ) -> Tensor:
        """Return the logits of the tokens `indices`, or of all: [len(indices), vocab_size]."""
        if indices is not None and len(indices) == inputs.batch.num_tokens:
            indices = None  # each token's, and no upload of which
        count = inputs.batch.num_tokens if indices is None else len(indices)
        keep: Any = slice(None) if indices is None else torch.from_numpy(indices).to(self._device)
        arguments: dict[str, Any] = {"position_ids": inputs.position_ids, "use_cache": False}
        if self._keeps_logits:
            arguments["logits_to_keep"] = 0 if indices is None else keep
        self.step.begin(inputs.batch, metadata)
        try:
            logits: Tensor = self._model(inputs.input_ids, **arguments).logits[0]
        finally:
            self.step.end()
        if not self._keeps_logits:
            logits = logits[keep]
        if logits.shape[0] != count:
            raise EngineError(f"the model gave {logits.shape[0]} rows of logits, expected {count}")
        return logits

    def _choose(self, scheduled: ScheduledBatch, wanted: _WantedLogits, logits: Tensor) -> LaunchedStep:
        """Choose tokens on the device, and send them on their way to the host."""
        if not wanted.sampled_rows:
            return LaunchedStep(scheduled, wanted, logits, None)
        at = wanted.sampled_at
        chosen = logits if len(at) == len(logits) else logits[torch.tensor(at, device=self._device)]
        if all(seq.params.takes_largest for seq in scheduled.seqs):
            rows, token_ids = [], self._sampler.largest(chosen)
        else:
            rows = sampling_rows(scheduled, wanted.sampled_rows)
            token_ids = self._sampler.choose(chosen, rows)
        if self._device.type != "cuda":
            return LaunchedStep(scheduled, wanted, logits, _Chosen(chosen, rows, token_ids, token_ids, None))
        copy = torch.empty(len(token_ids), dtype=torch.int64, pin_memory=True)
        copy.copy_(token_ids, non_blocking=True)
        ready: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return LaunchedStep(scheduled, wanted, logits, _Chosen(chosen, rows, token_ids, copy, ready))

    def _take_tokens(self, inputs: StepInputs, scheduled: ScheduledBatch, follows: LaunchedStep) -> None:
        """Make the tokens that a step chose the inputs of the next, on the device."""
        assert follows.chosen is not None, "a step that follows another reads the tokens that it chose"
        token_ids = follows.chosen.token_ids
        count = len(scheduled.seqs)
        if count < len(token_ids):
            places = {id(seq): row for row, seq in enumerate(follows.scheduled.seqs)}
            source = torch.tensor([places[id(seq)] for seq in scheduled.seqs])
            if self._device.type == "cuda":
                source = source.pin_memory().to(self._device, non_blocking=True)
            token_ids = token_ids[source]
        inputs.input_ids[0, :count].copy_(token_ids)


def _wanted_logits(scheduled: ScheduledBatch, query_start_loc: np.ndarray[Any, Any]) -> _WantedLogits:
    if not scheduled.samples:
        return _WantedLogits(np.empty(0, dtype=np.int64), [], [], [])
    num_decodes = scheduled.num_decodes
    place = int(query_start_loc[num_decodes])
    indices = [np.arange(place, dtype=np.int64)]
    sampled_rows = np.repeat(np.arange(num_decodes), scheduled.num_new_tokens[:num_decodes]).tolist()
    sampled_at = list(range(place))
    prompt_rows = []
    for row in range(num_decodes, len(scheduled.seqs)):
        seq, count = scheduled.seqs[row], scheduled.num_new_tokens[row]
        start = int(query_start_loc[row])
        completes = scheduled.completes(row)
        num_prompt = 0
        if seq.params.prompt_logprobs is not None:
            num_prompt = max(0, min(count, seq.num_prompt_tokens - 1 - seq.num_computed_tokens))
        first = start if num_prompt else start + count - 1
        if not num_prompt and not completes:
            continue
        end = start + count if completes else start + num_prompt
        if num_prompt:
            prompt_rows.append((row, place, num_prompt))
        indices.append(np.arange(first, end, dtype=np.int64))
        place += end - first
        if completes:
            num_samples = 1 + len(seq.forks)
            sampled_rows += [row] * num_samples
            sampled_at += [place - 1] * num_samples
    return _WantedLogits(np.concatenate(indices), sampled_rows, sampled_at, prompt_rows)


def sampling_rows(scheduled: ScheduledBatch, sampled_rows: Rows[int]) -> list[SamplingRow]:
    """Rows for the sampler; a token behind drafts is chosen as if they had been chosen before it.

    A draw depends on seed and position alone, so a token is the one that would be drawn without speculation. A draft
    is accepted exactly where that is the draft itself, which for a certain guess is rejection sampling (Leviathan et
    al., arXiv:2211.17192, with all of q on one token): it holds with the draft's probability.
    """
    rows: list[SamplingRow] = []
    previous, num_before = -1, 0
    for row in sampled_rows:
        num_before = num_before + 1 if row == previous else scheduled.ahead[row] if scheduled.ahead else 0
        previous = row
        seq, num_drafts = scheduled.seqs[row], num_before
        if row >= scheduled.num_decodes:  # a row that computed the prompt of several samples
            seq, num_drafts = (seq, *seq.forks)[num_before], 0
        num_prompt, end = seq.num_prompt_tokens, seq.num_tokens + num_drafts
        prompt: np.ndarray[Any, Any] | tuple[()] = ()
        output: np.ndarray[Any, Any] | tuple[()] = ()
        if seq.params.penalizes:
            prompt, output = seq.tokens_between(0, num_prompt), seq.tokens_between(num_prompt, end)
        rows.append(SamplingRow(seq.params, seq.seed, prompt, output, end - num_prompt, seq.eos_token_ids))
    return rows


def _part_forks(scheduled: ScheduledBatch, output: StepOutput) -> None:
    """Leave to each row the token of its own sequence."""
    for row in range(scheduled.num_decodes, len(scheduled.seqs)):
        if len(output.token_ids[row]) > 1:
            output.forked[row], output.forked_logprobs[row] = output.token_ids[row][1:], output.logprobs[row][1:]
            del output.token_ids[row][1:], output.logprobs[row][1:]


def _drop_after_mismatch(scheduled: ScheduledBatch, output: StepOutput) -> None:
    """Keep of each verified row the accepted drafts and the token after them."""
    if scheduled.ahead:
        return
    for row, num_new in enumerate(scheduled.num_new_tokens[: scheduled.num_decodes]):
        if num_new == 1:
            continue
        seq, tokens = scheduled.seqs[row], output.token_ids[row]
        known = seq.num_tokens
        drafts = seq.tokens_between(known, known + num_new - 1).tolist()
        if tokens[:-1] == drafts:
            continue
        num_kept = 1 + next(place for place, draft in enumerate(drafts) if tokens[place] != draft)
        del tokens[num_kept:], output.logprobs[row][num_kept:]
