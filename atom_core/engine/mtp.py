"""MtpDrafter: the model's own multi-token-prediction layer guesses, in a second role beside the model.

At position p the layer takes the model's hidden state and the token p + 1, and gives a hidden state from which the head
reads token p + 2. Behind every step it computes the step's positions, so that its cache holds as many tokens as the
model's. For further drafts it goes on from its own hidden states and drafts; the next step overwrites what these left.

The token behind a shared block belongs to whoever made it, so a request that starts from shared blocks finds one entry
that its next token may not fit; that can cost a draft, never a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from atom_core.engine.model_runner import sampling_rows
from atom_core.engine.running_rows import NUM_DRAFTS, SEQUENCE_ID, RunningRows
from atom_core.engine.sampler import Sampler
from atom_core.engine.scheduled_batch import CheckpointSave, Fork, ScheduledBatch
from atom_core.engine.speculation import Speculator

if TYPE_CHECKING:
    from transformers.modeling_layers import MtpModel

    from atom_core.engine.model_runner import ModelRunner, StepOutput
    from atom_core.engine.sequence import Sequence as TokenSequence

__all__ = ["MtpDrafter", "MtpRole"]


class _Output(NamedTuple):
    """What a runner reads of a model's output."""

    logits: Tensor


class MtpRole(nn.Module):
    """The layer in the form of a model that a runner can run; what it takes beside positions is fed to it.

    Args:
        mtp: the layer; its head and embedding stay the model's.
        model: the model, in its final form.

    Attributes:
        hidden: [num_tokens, hidden_size], what the last run gave.
    """

    def __init__(self, mtp: MtpModel, model: nn.Module) -> None:
        super().__init__()
        self.layers = mtp.layers
        mtp.shared_head = model.get_output_embeddings()  # type: ignore[operator]
        self._mtp = [mtp]  # in a list, so that head and embedding do not become modules of this one
        self._fed: tuple[Tensor, Tensor] | None = None
        self.hidden = torch.empty(0)

    def feed(self, input_ids: Tensor, hidden: Tensor) -> None:
        """Give the next run its inputs.

        Args:
            input_ids: [num_tokens], for each position the token behind it.
            hidden: [num_tokens, hidden_size].
        """
        self._fed = input_ids, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states of the layer, [tokens, hidden_size] to [tokens, vocab_size]."""
        projected: Tensor = self._mtp[0]._project_to_logits(hidden.unsqueeze(0))[0]
        return projected

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, logits_to_keep: Any = 0
    ) -> _Output:
        """Run the layer on what was fed, or on zeros where nothing was."""
        mtp = self._mtp[0]
        if self._fed is None:
            embedding = mtp.embed_tokens(input_ids)
            self._fed = input_ids[0], torch.zeros_like(embedding[0])
        tokens, hidden = self._fed
        self._fed = None
        output = mtp.forward_layer(0, hidden[None], position_ids + 1, None, input_ids=tokens[None])
        self.hidden = output[0]
        return _Output(self.logits(self.hidden[logits_to_keep])[None])


class MtpDrafter(Speculator):
    """Runs the layer behind every step, and once more for each draft after the first.

    Args:
        runner: of the role.
        role: the layer.
        target: the model's runner, which keeps its last hidden states.
        rows: the running sequences.
        num_spec_tokens: most drafts of a sequence and step.
        sampler: chooses drafts as it would the model's tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        role: MtpRole,
        target: ModelRunner,
        rows: RunningRows,
        *,
        num_spec_tokens: int,
        sampler: Sampler,
    ) -> None:
        self.runner = runner
        self._role = role
        self._num_spec_tokens = num_spec_tokens
        self._sampler = sampler
        self._target = target
        self._running = rows
        self._last: Tensor | None = None  # by row, the layer's hidden state of the last position
        self._owners = np.full(len(rows.counts), -1, dtype=np.int64)  # the sequence whose it is

    def set_drafts(self, running: Collection[TokenSequence]) -> None:
        """Make room for the drafts of sequences whose last position is known."""
        rows, counts = self._running.decoding(running), self._running.counts
        known = self._owners[rows] == counts[rows, SEQUENCE_ID]
        counts[rows, NUM_DRAFTS] = np.where(known, self._running.draft_room(rows, self._num_spec_tokens), 0)

    @torch.inference_mode()
    def draft(self, batch: ScheduledBatch) -> None:
        """Read first drafts from the last step's hidden states, and go on from there."""
        seqs = [seq for seq in batch.seqs[: batch.num_decodes] if seq.num_draft_tokens]
        if not seqs or self._last is None:
            return
        hidden = self._last[torch.tensor([seq.row for seq in seqs], device=self._last.device)]
        index = 0
        while True:
            chosen = self._sampler(self._role.logits(hidden), self._rows(seqs, index)).token_ids
            for seq, token_id in zip(seqs, chosen, strict=True):
                seq.set_draft(index, token_id)
            index += 1
            going_on = [place for place, seq in enumerate(seqs) if seq.num_draft_tokens > index]
            if not going_on:
                return
            if len(going_on) < len(seqs):
                seqs = [seqs[place] for place in going_on]
                hidden = hidden[torch.tensor(going_on, device=hidden.device)]
                chosen = [chosen[place] for place in going_on]
            count = len(seqs)
            self._role.feed(torch.tensor(chosen, device=hidden.device), hidden)
            self.runner.run(ScheduledBatch(seqs, [1] * count, count, ahead=[index - 1] * count, samples=False))
            hidden = self._role.hidden

    @torch.inference_mode()
    def follow(self, batch: ScheduledBatch, result: StepOutput) -> None:
        """Compute the positions of all tokens that the step keeps, and remember each row's last hidden state."""
        own = ScheduledBatch(list(batch.seqs), [], batch.num_decodes, batch.leased, samples=False)
        tokens: list[np.ndarray[Any, Any]] = []
        places: list[np.ndarray[Any, Any]] = []
        start = 0
        for row, (seq, count) in enumerate(zip(batch.seqs, batch.num_new_tokens, strict=True)):
            chosen = np.array(result.token_ids[row], dtype=np.int64)
            kept = len(chosen) if row < batch.num_decodes else count
            first = seq.num_computed_tokens + 1
            known = () if row < batch.num_decodes else seq.tokens_between(first, first + count - len(chosen))
            own.num_new_tokens.append(kept)
            tokens += [np.asarray(known, dtype=np.int64), chosen]
            places.append(np.arange(start, start + kept))
            start += count
        of_step = self._target.hidden
        assert of_step is not None, "the model's runner keeps no hidden states"
        device = of_step.device
        kept_places = torch.from_numpy(np.concatenate(places)).to(device)
        self._role.feed(torch.from_numpy(np.concatenate(tokens)).to(device), of_step[kept_places])
        self.runner.run(own)
        self._remember(own, result)

    def save_states(self, saves: Sequence[CheckpointSave]) -> None:
        """Copy the layer's states into its own checkpoints."""
        self.runner.save_states(saves)

    def copy_forks(self, forks: Sequence[Fork]) -> None:
        """Copy the layer's partial blocks and states; a new sample drafts once it has computed a token."""
        self.runner.copy_forks(forks)

    def release(self, seq: TokenSequence) -> None:
        """Keep nothing of a sequence but what its blocks and its group hold."""

    def _remember(self, own: ScheduledBatch, result: StepOutput) -> None:
        hidden = self._role.hidden
        if self._last is None:
            self._last = hidden.new_zeros(len(self._owners), hidden.shape[-1])
        ends = np.cumsum(own.num_new_tokens) - 1
        rows = [row for row in range(len(own.seqs)) if result.token_ids[row]]
        for row in rows:
            self._owners[own.seqs[row].row] = own.seqs[row].id
        if rows:
            where = torch.tensor([own.seqs[row].row for row in rows], device=hidden.device)
            self._last[where] = hidden[torch.from_numpy(ends[rows]).to(hidden.device)]

    def _rows(self, seqs: Sequence[TokenSequence], index: int) -> list[Any]:
        count = len(seqs)
        return sampling_rows(ScheduledBatch(list(seqs), [1] * count, count, ahead=[index] * count), range(count))
