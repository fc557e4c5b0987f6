"""CacheConfig: what a BlockManager is made from."""

from __future__ import annotations

from dataclasses import dataclass

from atom_core.errors import ConfigError

__all__ = ["CacheConfig"]


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The counts of a planned cache and how it is shared.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks in all.
        max_model_len: most tokens of a request, prompt and output together.
        num_per_req_cache_groups: requests with per-request state that can run at once.
        per_req_cache_equiv_blocks: blocks charged per stateful request; 0 where the state's bytes are reserved.
        enable_prefix_caching: share blocks between requests with equal prefixes.
        num_checkpoints: state checkpoints in all.
        checkpoint_interval: tokens between regular checkpoints, or `None` for none but at the end of prompts.
        prefix_cacheable: whether every plugin of the model can start from a shared prefix.
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    num_per_req_cache_groups: int = 0
    per_req_cache_equiv_blocks: int = 0
    enable_prefix_caching: bool = True
    num_checkpoints: int = 0
    checkpoint_interval: int | None = None
    prefix_cacheable: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("num_per_req_cache_groups", "per_req_cache_equiv_blocks", "num_checkpoints"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, found {getattr(self, name)}")
        interval = self.checkpoint_interval
        if interval is not None and (interval < 1 or interval % self.block_size):
            raise ConfigError(
                f"checkpoint_interval must be a positive multiple of the block size {self.block_size}, found {interval}"
            )
