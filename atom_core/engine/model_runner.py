"""ModelRunner: runs a scheduled batch through the model and samples."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from atom_core.engine.batch_builder import BatchBuilder
from atom_core.engine.sampler import Sampler, SamplingRow, prompt_logprobs
from atom_core.errors import EngineError
from atom_core.plugin import AttentionLayer, Step, StepBuffers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from atom_core.engine.sampling import Logprob
    from atom_core.engine.scheduled_batch import CheckpointSave, ScheduledBatch
    from atom_core.engine.state_mover import StateMover
    from atom_core.plugin.model_hooks import ModelHooks

__all__ = ["ModelRunner", "StepOutput"]


@dataclass(frozen=True)
class StepOutput:
    """What a step gave, one entry per row.

    Attributes:
        token_ids: new tokens of the row; none for a chunk that does not complete.
        logprobs: for each new token, its logprobs, or `None` where not asked for.
        prompt_logprobs: logprobs of the prompt tokens that follow the row's computed ones.
    """

    token_ids: list[list[int]]
    logprobs: list[list[dict[int, Logprob] | None]]
    prompt_logprobs: list[list[dict[int, Logprob]]]


@dataclass(frozen=True)
class _WantedLogits:
    """Which logits a step needs.

    Attributes:
        indices: flat token index of each.
        sampled_rows: the row of each token to sample; a row that verifies drafts has one for each and one more.
        sampled_at: for each of them, the place in `indices`.
        prompt_rows: `(row, first place in indices, count)` of rows that report prompt logprobs.
    """

    indices: np.ndarray[Any, np.dtype[np.int64]]
    sampled_rows: list[int]
    sampled_at: list[int]
    prompt_rows: list[tuple[int, int, int]]


class ModelRunner:
    """One model with its bound layers and caches.

    Attributes:
        step: what the layers hold a reference to.
        states: what fills and copies the slots of per-request state.
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
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def run(self, scheduled: ScheduledBatch) -> StepOutput:
        """Compute one step.

        Args:
            scheduled: at least one row.
        """
        self.states.prepare(scheduled.leased)
        inputs = self._builder.build(scheduled)
        metadata = self._hooks.build_metadata(layers=self._layers, batch=inputs.batch, buffers=self._buffers)
        wanted = _wanted_logits(scheduled, inputs.batch.query_start_loc_host)
        self.step.begin(inputs.batch, metadata)
        try:
            logits = self._forward(inputs.input_ids, inputs.position_ids, wanted.indices)
        finally:
            self.step.end()
        return self._sample(scheduled, wanted, logits)

    @torch.inference_mode()
    def save_states(self, saves: Rows[CheckpointSave]) -> None:
        """Copy states that the last step made; call it before the next."""
        self.states.save(saves)

    def step_finished(self, stats: Mapping[str, Any]) -> None:
        """Tell the plugins that observe."""
        self._hooks.step_finished(stats)

    def _forward(self, input_ids: Tensor, position_ids: Tensor, indices: np.ndarray[Any, Any]) -> Tensor:
        """Return logits, [len(indices), vocab_size]."""
        keep = torch.from_numpy(indices).to(self._device)
        if self._keeps_logits:
            output = self._model(input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=keep)
            logits: Tensor = output.logits[0]
        else:
            logits = self._model(input_ids, position_ids=position_ids, use_cache=False).logits[0][keep]
        if logits.shape[0] != len(indices):
            raise EngineError(f"the model gave {logits.shape[0]} rows of logits, expected {len(indices)}")
        return logits

    def _sample(self, scheduled: ScheduledBatch, wanted: _WantedLogits, logits: Tensor) -> StepOutput:
        num_rows = len(scheduled.seqs)
        output = StepOutput([[] for _ in range(num_rows)], [[] for _ in range(num_rows)], [[] for _ in range(num_rows)])
        if wanted.sampled_rows:
            at = wanted.sampled_at
            chosen = logits if len(at) == len(logits) else logits[torch.tensor(at, device=self._device)]
            sampled = self._sampler(chosen, _sampling_rows(scheduled, wanted.sampled_rows))
            for row, token_id, logprobs in zip(wanted.sampled_rows, sampled.token_ids, sampled.logprobs, strict=True):
                output.token_ids[row].append(token_id)
                output.logprobs[row].append(logprobs)
            _drop_after_mismatch(scheduled, output)
        for row, first, count in wanted.prompt_rows:
            seq = scheduled.seqs[row]
            start = seq.num_computed_tokens + 1
            targets = seq.tokens_between(start, start + count).tolist()
            output.prompt_logprobs[row].extend(
                prompt_logprobs(logits[first : first + count], targets, seq.params.prompt_logprobs or 0)
            )
        return output


def _wanted_logits(scheduled: ScheduledBatch, query_start_loc: np.ndarray[Any, Any]) -> _WantedLogits:
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
            sampled_rows.append(row)
            sampled_at.append(place - 1)
    return _WantedLogits(np.concatenate(indices), sampled_rows, sampled_at, prompt_rows)


def _sampling_rows(scheduled: ScheduledBatch, sampled_rows: Rows[int]) -> list[SamplingRow]:
    """Rows for the sampler; a token behind drafts is chosen as if they had been chosen before it.

    A draw depends on seed and position alone, so a token is the one that would be drawn without speculation. A draft
    is accepted exactly where that is the draft itself, which for a certain guess is rejection sampling (Leviathan et
    al., arXiv:2211.17192, with all of q on one token): it holds with the draft's probability.
    """
    rows: list[SamplingRow] = []
    previous, num_drafts = -1, 0
    for row in sampled_rows:
        num_drafts = num_drafts + 1 if row == previous else 0
        previous = row
        seq = scheduled.seqs[row]
        rows.append(
            SamplingRow(
                params=seq.params,
                seed=seq.seed,
                prompt_token_ids=seq.tokens_between(0, seq.num_prompt_tokens),
                output_token_ids=seq.tokens_between(seq.num_prompt_tokens, seq.num_tokens + num_drafts),
                position=seq.num_output_tokens + num_drafts,
                eos_token_ids=seq.eos_token_ids,
            )
        )
    return rows


def _drop_after_mismatch(scheduled: ScheduledBatch, output: StepOutput) -> None:
    """Keep of each verified row the accepted drafts and the token after them."""
    for row in range(scheduled.num_decodes):
        seq = scheduled.seqs[row]
        if not seq.num_draft_tokens:
            continue
        drafts = seq.tokens_between(seq.num_tokens, seq.num_tokens + seq.num_draft_tokens).tolist()
        tokens = output.token_ids[row]
        num_kept = 1
        while num_kept <= len(drafts) and tokens[num_kept - 1] == drafts[num_kept - 1]:
            num_kept += 1
        del tokens[num_kept:], output.logprobs[row][num_kept:]
