"""Proposer: what guesses the tokens that a step then verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["DraftRequest", "Proposer"]


class DraftRequest(NamedTuple):
    """A sequence whose next step may verify drafts.

    Attributes:
        sequence_id: unique in the engine, the same in every step.
        token_ids: [num_tokens] int32, all known tokens, a read-only view to be used until `propose` returns: copy what
            you keep, another sequence may get its memory; more than the last time by those accepted since.
        max_drafts: most drafts of use, at least 1.
    """

    sequence_id: int
    token_ids: npt.NDArray[np.int32]
    max_drafts: int


class Proposer(Protocol):
    """Guesses how sequences go on.

    Its factory is called as `factory(model_config=..., num_spec_tokens=...)`. A wrong guess costs time and nothing
    else: the tokens that a request gets are those that it would get without speculation.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """Guess the next tokens. Called before every step in which some sequence decodes.

        Args:
            requests: the sequences that decode.

        Returns:
            For each, up to `max_drafts` token ids of the vocabulary, most likely ones first in order; empty for none.
        """

    def release(self, sequence_id: int) -> None:
        """Forget a sequence that has ended; it may never have been proposed for."""
