"""Speculation: drafts for the sequences that decode, from the proposer that the user chose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from atom_core.config import DRAFT_MODEL, MTP, NGRAM
from atom_core.errors import ConfigError, PluginError
from atom_core.plugin.ops import load_function
from atom_core.plugin.proposer import DraftRequest, Proposer
from atom_core.plugin.types import Rewind

if TYPE_CHECKING:
    from atom_core.config import EngineConfig
    from atom_core.engine.model_runner import StepOutput
    from atom_core.engine.scheduled_batch import CheckpointSave, Fork, ScheduledBatch
    from atom_core.engine.sequence import Sequence as TokenSequence
    from atom_core.engine.startup import Inspection

__all__ = ["ProposerSpeculator", "Speculator", "check_rewind", "make_proposer_speculator"]


class Speculator(ABC):
    """Puts drafts behind the known tokens of sequences that decode; the step then verifies them.

    In every step the engine calls `set_drafts`, schedules, calls `draft`, runs the model, calls `follow`, takes the
    step's tokens, and calls `save_states` and `copy_forks`. What a speculator keeps in caches of its own holds the
    same tokens as the model's whenever blocks are published and states are copied.
    """

    @abstractmethod
    def set_drafts(self, running: Collection[TokenSequence]) -> None:
        """Give each decoding sequence its drafts for the next step, or room for them: `RunningRows.draft_room`."""

    @abstractmethod
    def draft(self, batch: ScheduledBatch) -> None:
        """Fill the room that scheduling left for drafts."""

    @abstractmethod
    def follow(self, batch: ScheduledBatch, result: StepOutput) -> None:
        """Compute what the step computed, once its tokens are chosen and before anybody takes them."""

    @abstractmethod
    def save_states(self, saves: Sequence[CheckpointSave]) -> None:
        """Copy states of its own beside those of the model."""

    @abstractmethod
    def copy_forks(self, forks: Sequence[Fork]) -> None:
        """Copy blocks and states of its own for samples that part."""

    @abstractmethod
    def release(self, seq: TokenSequence) -> None:
        """Forget a sequence that has ended."""


class ProposerSpeculator(Speculator):
    """Asks a `Proposer`, which sees tokens only.

    Args:
        proposer: guesses them.
        name: the proposer's, for messages.
        num_spec_tokens: most drafts of a sequence and step.
        vocab_size: drafts must be below it.
    """

    def __init__(self, proposer: Proposer, name: str, num_spec_tokens: int, vocab_size: int) -> None:
        self._proposer = proposer
        self._name = name
        self._num_spec_tokens = num_spec_tokens
        self._vocab_size = vocab_size

    def set_drafts(self, running: Collection[TokenSequence]) -> None:
        """Ask for the drafts.

        Raises:
            PluginError: the proposer answered with something else than tokens, or with too many.
        """
        seqs, requests = [], []
        for seq in running:
            if seq.is_prefilling:
                continue
            seq.num_draft_tokens = 0
            room = min(self._num_spec_tokens, seq.max_num_tokens - seq.num_tokens - 1)
            if room > 0:
                seqs.append(seq)
                tokens = seq.token_ids
                tokens.flags.writeable = False
                requests.append(DraftRequest(seq.id, tokens, room))
        if not requests:
            return
        answers = self._proposer.propose(requests)
        if len(answers) != len(requests):
            raise PluginError(f"proposer {self._name!r} answered {len(answers)} of {len(requests)} requests")
        for seq, request, drafts in zip(seqs, requests, answers, strict=True):
            if not len(drafts):
                continue
            if len(drafts) > request.max_drafts or min(drafts) < 0 or max(drafts) >= self._vocab_size:
                raise PluginError(
                    f"proposer {self._name!r} drafted {list(drafts)}; expected at most {request.max_drafts} tokens of "
                    f"the vocabulary of {self._vocab_size}"
                )
            seq.set_drafts(drafts)

    def draft(self, batch: ScheduledBatch) -> None:
        """Leave the drafts as they are."""

    def follow(self, batch: ScheduledBatch, result: StepOutput) -> None:
        """Wait for the tokens until the next drafts are asked for."""

    def save_states(self, saves: Sequence[CheckpointSave]) -> None:
        """Keep no state of tokens that others may share."""

    def copy_forks(self, forks: Sequence[Fork]) -> None:
        """Learn of the new samples when drafts are asked for."""

    def release(self, seq: TokenSequence) -> None:
        """Let the proposer forget a sequence."""
        self._proposer.release(seq.id)


def make_proposer_speculator(inspection: Inspection) -> ProposerSpeculator:
    """Make what the config's `speculation` names: a plugin's proposer, or a `Proposer` itself.

    Raises:
        ConfigError: nobody brings a proposer of that name.
    """
    config, model_config = inspection.config, inspection.model_config
    chosen = config.speculation
    if isinstance(chosen, str):
        proposer = _make_proposer(chosen, inspection)
        name = chosen
    else:
        proposer, name = chosen, type(chosen).__name__
    return ProposerSpeculator(proposer, name, config.num_spec_tokens, model_config.vocab_size)


def check_rewind(config: EngineConfig, inspection: Inspection) -> None:
    """Refuse speculation where some plugin's state cannot take rejected drafts back.

    Args:
        config: says whether and how to speculate.
        inspection: of one role.

    Raises:
        ConfigError: names these plugins.
    """
    if config.speculation is None:
        return
    figures = inspection.figures
    unable = [
        inspection.registry.describe(name)
        for name, num_bytes in figures.slot_bytes.items()
        if num_bytes and figures.requirements[name].rewind is Rewind.NEVER
    ]
    if unable:
        raise ConfigError(
            f"speculation={config.speculation!r} does not work with this model: the per-request state of "
            f"{', '.join(unable)} cannot take rejected drafts back (rewind 'never'); leave speculation out"
        )


def _make_proposer(name: str, inspection: Inspection) -> Proposer:
    known = inspection.registry.proposers()
    if name not in known:
        raise ConfigError(
            f"there is no proposer {name!r}; known: {', '.join([NGRAM, DRAFT_MODEL, MTP, *sorted(known)])}. Proposers "
            f"come from the core and from plugins that implement atom_proposers"
        )
    factory = load_function(known[name])
    proposer: Proposer = factory(
        model_config=inspection.model_config, num_spec_tokens=inspection.config.num_spec_tokens
    )
    return proposer
