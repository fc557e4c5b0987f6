"""I1 and I13: declared bytes are allocated bytes, for every dtype, block size and share of a rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from atom_core.errors import AtomError, LayerError
from atom_core.models.binding import ClaimedLayers, claim_layers
from atom_core.models.loader import build_meta_model
from atom_core.testing.report import Violation
from atom_core.testing.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["declared_bytes", "sharded_bytes"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUM_BLOCKS, _NUM_SLOTS = 3, 5


def declared_bytes(subject: Subject) -> None:
    """I1: declared bytes = allocated bytes, for every config, dtype and shard."""
    for claimed, dtype, tp_size in _variants(subject):
        paged_dtypes = (dtype, torch.float8_e4m3fn) if _takes_float8(subject) else (dtype,)
        for block_size, paged_dtype in itertools.product((subject.block_size, 3 * subject.block_size), paged_dtypes):
            for num_spec_tokens in (0, 2):
                _check_bytes(subject, claimed, dtype, paged_dtype, block_size, num_spec_tokens, tp_size)


def sharded_bytes(subject: Subject) -> list[str]:
    """I13: sharded over ranks = unsharded, as far as layouts tell: no head is lost.

    Returns:
        The sizes that the plugin refuses, with its reasons.
    """
    whole: Mapping[str, int] = {}
    refused = []
    for tp_size in (1, 2, 4):
        try:
            claimed = _claim(subject, torch.float32, tp_size)
        except LayerError as error:
            if tp_size == 1:
                raise
            refused.append(f"tp {tp_size}, refused: {str(error).splitlines()[0]}")
            continue
        shares = _bytes_by_layer(subject, claimed)
        if tp_size == 1:
            whole = shares
        for name, share in shares.items():
            if share * tp_size < whole[name]:
                raise Violation(
                    f"I13 sharding: at tp {tp_size}, {name} has {share} bytes on each rank, {share * tp_size} on all; "
                    f"unsharded it has {whole[name]}: heads are lost"
                )
            if share > whole[name]:
                raise Violation(
                    f"I13 sharding: at tp {tp_size}, {name} has {share} bytes on each rank, more than the "
                    f"{whole[name]} of all heads"
                )
    return refused


def _variants(subject: Subject) -> Iterator[tuple[ClaimedLayers, torch.dtype, int]]:
    for dtype in _DTYPES:
        yield _claim(subject, dtype, 1), dtype, 1
    for tp_size in (2, 4):
        try:
            yield _claim(subject, torch.bfloat16, tp_size), torch.bfloat16, tp_size
        except LayerError:
            continue


def _claim(subject: Subject, dtype: torch.dtype, tp_size: int) -> ClaimedLayers:
    config = subject.inspection.model_config
    return claim_layers(build_meta_model(config, dtype), subject.registry, config, tp_size)


def _bytes_by_layer(subject: Subject, claimed: ClaimedLayers) -> dict[str, int]:
    """Bytes of one block and one slot of each layer, asked for one layer at a time."""
    config, hooks = subject.inspection.model_config, subject.inspection.hooks
    found = {}
    for layer in claimed.layers:
        common = {"layers": (layer,), "model_config": config, "cache_dtype": torch.float32}
        paged = hooks.block_bytes(**common, block_size=subject.block_size)
        state = hooks.per_req_cache_bytes(**common, num_spec_tokens=0)
        found[layer.module_name] = sum(paged.values()) + sum(state.values())
    return found


def _takes_float8(subject: Subject) -> bool:
    return all(needs.float8_cache for needs in subject.inspection.figures.requirements.values())


def _check_bytes(
    subject: Subject,
    claimed: ClaimedLayers,
    dtype: torch.dtype,
    paged_dtype: torch.dtype,
    block_size: int,
    num_spec_tokens: int,
    tp_size: int,
) -> None:
    hooks = subject.inspection.hooks
    common: Any = {"layers": claimed.layers, "model_config": subject.inspection.model_config}
    device = torch.device("cpu")
    dtypes = f"{dtype}" if dtype is paged_dtype else f"{dtype}, paged {paged_dtype}"
    case = f"{dtypes}, block size {block_size}, {num_spec_tokens} drafts, tp {tp_size}"
    try:
        paged = hooks.allocate_kv_cache_tensors(
            **common, num_blocks=_NUM_BLOCKS, block_size=block_size, cache_dtype=paged_dtype, device=device
        )
        block_bytes = hooks.block_bytes(**common, block_size=block_size, cache_dtype=paged_dtype)
        num_slots = dict.fromkeys(hooks.owners, _NUM_SLOTS)
        state_options: Any = {**common, "cache_dtype": dtype, "num_spec_tokens": num_spec_tokens}
        state = hooks.allocate_per_req_cache(**state_options, num_slots=num_slots, device=device)
        slot_bytes = hooks.per_req_cache_bytes(**state_options)
        hooks.check_allocated_bytes(paged, block_bytes, dict.fromkeys(block_bytes, _NUM_BLOCKS))
        hooks.check_allocated_bytes(state, slot_bytes, num_slots)
    except AtomError as error:
        raise Violation(f"I1 bytes: {case}: {error}") from error
    tensors = {**paged, **state}
    held, shown = _storage_bytes(tensors), sum(tensor.nbytes for tensor in tensors.values())
    if held != shown:
        raise Violation(f"I1 bytes: {case}: the tensors show {shown} bytes, as declared, but their memory has {held}")


def _storage_bytes(tensors: Mapping[str, Tensor]) -> int:
    storages = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
