"""A sequence that holds nothing but what the block manager needs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_ids = itertools.count()


@dataclass(eq=False)
class PlainSequence:
    tokens: list[int]
    has_per_req_cache: bool = False
    cache_salt: str | None = None
    use_prefix_cache: bool = True
    id: int = field(default_factory=lambda: next(_ids))
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    per_req_cache_group: int = -1
    restore_checkpoint: int | None = None

    def __post_init__(self) -> None:
        self._array = np.array(self.tokens, dtype=np.int32)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return self._array

    @property
    def num_tokens(self) -> int:
        return len(self._array)

    def append_tokens(self, *tokens: int) -> None:
        self.tokens = [*self.tokens, *tokens]
        self._array = np.array(self.tokens, dtype=np.int32)
