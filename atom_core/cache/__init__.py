"""The cache: its plan (pure arithmetic), its blocks and state on the host, and the allocated tensors.

`plan` turns byte figures into counts, `block_manager` hands out blocks and groups, with `block_pool`, `prefix`,
`state_pool` and `checkpoint_policy` below it; `tensors` alone touches torch, so import it from its own module.
"""

from atom_core.cache.block_manager import BlockManager
from atom_core.cache.cached_sequence import CachedSequence
from atom_core.cache.config import CacheConfig
from atom_core.cache.plan import CacheFigures, CachePlan, choose_block_size, least_over_ranks, plan_cache
from atom_core.cache.state_pool import StatePool

__all__ = [
    "BlockManager",
    "CacheConfig",
    "CacheFigures",
    "CachePlan",
    "CachedSequence",
    "StatePool",
    "choose_block_size",
    "least_over_ranks",
    "plan_cache",
]
