"""Speculation: drafts for the sequences that decode, from the proposer that the user chose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atom_core.engine.ngram import NgramProposer
from atom_core.errors import ConfigError, PluginError
from atom_core.plugin.ops import load_function
from atom_core.plugin.proposer import DraftRequest, Proposer
from atom_core.plugin.types import Rewind

if TYPE_CHECKING:
    from atom_core.config import EngineConfig
    from atom_core.engine.sequence import Sequence
    from atom_core.engine.startup import Inspection

__all__ = ["Speculator", "check_rewind", "make_speculator"]

_NGRAM = "ngram"


class Speculator:
    """Puts drafts behind the known tokens of sequences that decode.

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

    def set_drafts(self, running: Iterable[Sequence]) -> None:
        """Give each decoding sequence the drafts that its next step may verify.

        A step gives one token more than the drafts it accepts, so the last token of a sequence needs no draft.

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
                requests.append(DraftRequest(seq.id, seq.token_ids, room))
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

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._proposer.release(seq.id)


def make_speculator(inspection: Inspection) -> Speculator | None:
    """Make what the config's `speculation` names; `None` where it is off.

    Raises:
        ConfigError: nobody brings a proposer of that name.
    """
    config, model_config = inspection.config, inspection.model_config
    chosen = config.speculation
    if chosen is None:
        return None
    if isinstance(chosen, str):
        proposer = _make_proposer(chosen, inspection)
        name = chosen
    else:
        proposer, name = chosen, type(chosen).__name__
    return Speculator(proposer, name, config.num_spec_tokens, model_config.vocab_size)


def check_rewind(config: EngineConfig, inspection: Inspection) -> None:
    """Refuse speculation where some plugin's state cannot take rejected drafts back.

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
    if name == _NGRAM:
        return NgramProposer()
    known = inspection.registry.proposers()
    if name not in known:
        raise ConfigError(
            f"there is no proposer {name!r}; known: {', '.join([_NGRAM, *sorted(known)])}. Proposers come from the "
            f"core and from plugins that implement atom_proposers"
        )
    factory = load_function(known[name])
    proposer: Proposer = factory(
        model_config=inspection.model_config, num_spec_tokens=inspection.config.num_spec_tokens
    )
    return proposer
