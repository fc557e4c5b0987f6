"""AttentionBatch, Step and the persistent buffers: all that a layer sees of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

__all__ = ["AttentionBatch", "HostDeviceBuffer", "Step", "StepBuffers", "StepLimits"]


class HostDeviceBuffer:
    """An array that the host fills and the device reads, at a fixed address.

    On a GPU the host side is there twice, in turns: the copy of one step may still read one while the next step fills
    the other. So a step fills all that it uses, and nobody keeps `host` from one step to the next.

    Attributes:
        host: numpy view of the host side (pinned memory where the device is a GPU).
        device: the device side; the very same memory on the CPU.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: int | float) -> None:
        import torch

        pinned = device.type == "cuda"
        self._sides = [torch.full(shape, fill, dtype=dtype, pin_memory=pinned) for _ in range(1 + pinned)]
        self._views = [side.numpy() for side in self._sides]
        self._turn = 0
        self.host: np.ndarray[Any, Any] = self._views[0]
        self.device: Tensor = self._sides[0].to(device) if pinned else self._sides[0]

    def turn(self) -> None:
        """Take the other host side; the core calls it before each step."""
        self._turn = (self._turn + 1) % len(self._sides)
        self.host = self._views[self._turn]

    def upload(self, num_rows: int) -> Tensor:
        """Send the first `num_rows` rows to the device, in stream order.

        Returns:
            The device side's first `num_rows` rows.
        """
        side = self._sides[self._turn]
        if self.device is not side:
            self.device[:num_rows].copy_(side[:num_rows], non_blocking=True)
        return self.device[:num_rows]


@dataclass(frozen=True)
class StepLimits:
    """The largest step.

    Attributes:
        max_num_seqs: most rows.
        max_num_tokens: most tokens.
        max_blocks_per_seq: most blocks of a row.
        block_size: tokens per block.
    """

    max_num_seqs: int
    max_num_tokens: int
    max_blocks_per_seq: int
    block_size: int


class StepBuffers:
    """Named persistent buffers, made at first use and kept at one address.

    Attributes:
        limits: the largest step, which a buffer's shape must hold.
        device: where buffers are read.
    """

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self.limits = limits
        self.device = device
        self._buffers: dict[str, HostDeviceBuffer] = {}

    def turn(self) -> None:
        """Take the other host side of every buffer; the core calls it before each step."""
        for buffer in self._buffers.values():
            buffer.turn()

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: int | float = 0) -> HostDeviceBuffer:
        """Return the buffer `name`, made with this shape the first time.

        Args:
            name: prefixed with the plugin's name by convention, `plugin.buffer`.
            shape: the largest that any step needs.
            dtype: element type.
            fill: what a new buffer holds.

        Raises:
            ValueError: the buffer exists with another shape or dtype.
        """
        found = self._buffers.get(name)
        if found is None:
            found = self._buffers[name] = HostDeviceBuffer(shape, dtype, self.device, fill)
        if tuple(found.device.shape) != tuple(shape) or found.device.dtype != dtype:
            raise ValueError(
                f"buffer {name!r} has shape {tuple(found.device.shape)} and {found.device.dtype}, "
                f"asked for {tuple(shape)} and {dtype}; a persistent buffer never changes shape"
            )
        return found


@dataclass(frozen=True)
class AttentionBatch:
    """One step, as attention sees it: rows are requests, decodes first, then prefill chunks.

    A decode row has one new token, or 1 + drafts when it verifies; its tokens come first in the flat order.
    Every tensor has a host mirror of equal content under `<name>_host`, a numpy array. Padding rows have
    zero-length queries; padding tokens have slot -1.

    Attributes:
        num_seqs: rows.
        num_tokens: tokens of all rows.
        num_decodes: the first `num_decodes` rows are decodes.
        num_decode_tokens: tokens of these rows.
        max_query_len: most tokens of a row.
        max_decode_query_len: most tokens of a decode row.
        max_seq_len: most keys of a row, its new tokens included.
        block_size: tokens per block.
        query_start_loc: [num_seqs + 1] int32, first flat token of each row; the last is num_tokens, or less where
            tokens of no row follow.
        seq_lens: [num_seqs] int32, num_computed + new tokens.
        num_computed: [num_seqs] int32, tokens already in the cache.
        positions: [num_tokens] int64.
        slot_mapping: [num_tokens] int64, block * block_size + offset of the token's place; -1 for a token of no row.
        block_tables: [num_seqs, max_blocks] int32; entries past a row's blocks are 0.
        state_groups: [num_seqs] int32, the row's group, -1 for none.
        num_accepted: [num_seqs] int32, tokens kept from the row's previous step; 0 at its first.
        state_read: by plugin, [num_seqs] int64, the slot that holds the row's state; -1 for none.
        state_write: by plugin, [num_tokens] int64, the slot that takes the state after this token; -1 for no
            write. A decode row's token i writes base + i, a chunk's last token writes base.
    """

    num_seqs: int
    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    max_query_len: int
    max_decode_query_len: int
    max_seq_len: int
    block_size: int
    query_start_loc: Tensor
    query_start_loc_host: np.ndarray[Any, Any]
    seq_lens: Tensor
    seq_lens_host: np.ndarray[Any, Any]
    num_computed: Tensor
    num_computed_host: np.ndarray[Any, Any]
    positions: Tensor
    positions_host: np.ndarray[Any, Any]
    slot_mapping: Tensor
    slot_mapping_host: np.ndarray[Any, Any]
    block_tables: Tensor
    block_tables_host: np.ndarray[Any, Any]
    state_groups: Tensor
    state_groups_host: np.ndarray[Any, Any]
    num_accepted: Tensor
    num_accepted_host: np.ndarray[Any, Any]
    state_read: Mapping[str, Tensor] = field(default_factory=dict)
    state_read_host: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    state_write: Mapping[str, Tensor] = field(default_factory=dict)
    state_write_host: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


class Step:
    """The step that is running; every layer holds a reference to its runner's.

    Attributes:
        batch: the running step's batch.
        metadata: by plugin, what its `atom_build_metadata` returned for this step.
    """

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self.metadata: Mapping[str, Any] = {}

    @property
    def batch(self) -> AttentionBatch:
        """The running step's batch.

        Raises:
            RuntimeError: a layer ran outside a step.
        """
        if self._batch is None:
            raise RuntimeError("an attention layer ran outside a step; call the model through its runner")
        return self._batch

    def begin(self, batch: AttentionBatch, metadata: Mapping[str, Any]) -> None:
        """Make `batch` the running step."""
        self._batch = batch
        self.metadata = metadata

    def end(self) -> None:
        """Leave the step; a layer that runs now is an error."""
        self._batch = None
        self.metadata = {}
