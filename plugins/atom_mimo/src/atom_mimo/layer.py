"""What MiMo-V2's attention modules become: full layers over blocks, sliding-window layers over rings."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from atom_core.errors import LayerError
from atom_core.plugin import InterfaceLayer, KernelTable, KVCacheTensor
from atom_mimo.metadata import MimoMetadata

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["FullLayer", "Heads", "MimoLayer", "WindowLayer"]

_CAUSAL = {"window": None, "chunk": None, "soft_cap": None}


@dataclass(frozen=True)
class Heads:
    """Shapes of a module's queries, keys and values on this rank.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of a query and a key.
        v_head_dim: size of a value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def row_elements(self) -> int:
        """Elements of one token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


class MimoLayer(InterfaceLayer):
    """Grouped-query attention whose keys and values differ in size; the values come scaled by the module.

    Attributes:
        heads: shapes on this rank.
        window: keys that a query sees, itself included; `None` for all.
    """

    known_keywords: ClassVar[frozenset[str]] = frozenset({"sliding_window", "s_aux"})

    def __init__(self, heads: Heads, window: int | None) -> None:
        self.heads = heads
        self.window = window

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend, and keep the step's keys and values.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            value: [num_tokens, num_kv_heads, v_head_dim].
            scaling: factor of the scores.
            sliding_window: must be the layer's window.
            s_aux: [num_heads] sinks: logits that take part in the softmax and have no value.

        Returns:
            [num_tokens, num_heads, v_head_dim]

        Raises:
            LayerError: shapes or window differ from what was learned when the module was claimed.
        """
        self._check(query, key, value, sliding_window, s_aux)
        metadata: MimoMetadata = self.step.metadata["mimo"]
        shape = query.shape[0], self.heads.num_heads, self.heads.v_head_dim
        out = query.new_empty(shape) if not metadata.has_padding else metadata.padded_out(query, shape)
        self._run(query, key, value, out, metadata, scaling, s_aux)
        return out

    @abstractmethod
    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        metadata: MimoMetadata,
        scaling: float,
        sinks: Tensor | None,
    ) -> None:
        """Write the rows' outputs into `out`, and the step's keys and values into the cache."""

    def _case(self, cache: Tensor, **facts: int | None) -> dict[str, Any]:
        """What kernels are chosen by."""
        dtypes: dict[str, torch.dtype] = {"cache": cache.dtype}
        return {"device": cache.device, "dtypes": dtypes, "facts": {**vars(self.heads), "window": self.window, **facts}}

    def _check(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: Tensor | None) -> None:
        heads = self.heads
        found = (query.shape[1:], key.shape[1:], value.shape[1:])
        keys = heads.num_kv_heads
        expected = ((heads.num_heads, heads.head_dim), (keys, heads.head_dim), (keys, heads.v_head_dim))
        if found != expected or not query.shape[0] == key.shape[0] == value.shape[0]:
            raise LayerError(
                f"{self.module_name} passed query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)}; atom-mimo learned {heads} when it claimed the module"
            )
        if window != self.window:
            raise LayerError(
                f"{self.module_name} passed sliding_window={window}; atom-mimo learned {self.window} when it claimed "
                "the module"
            )
        if sinks is not None and sinks.shape != (heads.num_heads,):
            raise LayerError(f"{self.module_name} passed sinks {tuple(sinks.shape)}, expected ({heads.num_heads},)")


class FullLayer(MimoLayer):
    """Causal attention over paged keys and values, by the ops `mha.*`."""

    def __init__(self, heads: Heads) -> None:
        super().__init__(heads, None)

    def bind(self, kv_cache: KVCacheTensor, kernels: KernelTable) -> None:
        """Take the blocks and choose kernels."""
        super().bind(kv_cache, kernels)
        case = self._case(kv_cache.k_cache, block_size=kv_cache.k_cache.shape[1], chunk=None)
        self._write_kv = kernels.select("mha.write_kv", **case)
        self._decode = kernels.select("mha.decode", **case)
        self._prefill = kernels.select("mha.prefill", **case)
        self._prefill_paged = kernels.select("mha.prefill_paged", **case)

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        metadata: MimoMetadata,
        scaling: float,
        sinks: Tensor | None,
    ) -> None:
        new = {"key": key, "value": value}
        caches = {name: getattr(self.kv_cache, name) for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
        options = {"query": query, "out": out, "scaling": scaling, "sinks": sinks} | _CAUSAL
        slot_mapping, scratch = self.step.batch.slot_mapping, metadata.rows.paged_scratch
        self._write_kv(**new, **caches, slot_mapping=slot_mapping, scratch=scratch)
        if (rows := metadata.decodes) is not None:
            self._decode(**caches, **rows.paged_arguments, **options)
        # Keys as a float8 cache has them: a prompt's result does not depend on how it is cut.
        from_cache = metadata.has_prefix or self.kv_cache.k_scale is not None
        if (rows := metadata.chunks) is not None and from_cache:
            self._prefill_paged(**caches, **rows.paged_arguments, **options)
        elif rows is not None:
            self._prefill(**new, **rows.own_key_arguments, **options)


class WindowLayer(MimoLayer):
    """Causal attention to the last `window` tokens, kept in a ring per request, by the ops `mimo.*`."""

    window: int

    def __init__(self, heads: Heads, window: int) -> None:
        super().__init__(heads, window)

    def bind(self, kv_cache: KVCacheTensor, kernels: KernelTable) -> None:
        """Take the rings and choose kernels."""
        super().bind(kv_cache, kernels)
        self.ring_k, self.ring_v = kv_cache.state["ring_k"], kv_cache.state["ring_v"]
        case = self._case(self.ring_k, ring_rows=self.ring_k.shape[1])
        self._ring_decode = kernels.select("mimo.ring_decode", **case)
        self._ring_prefill = kernels.select("mimo.ring_prefill", **case)
        self._ring_write = kernels.select("mimo.ring_write", **case)

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        metadata: MimoMetadata,
        scaling: float,
        sinks: Tensor | None,
    ) -> None:
        rings = {"key": key, "value": value, "ring_k": self.ring_k, "ring_v": self.ring_v}
        options = {"scaling": scaling, "window": self.window, "sinks": sinks}
        for kernel, rows in ((self._ring_decode, metadata.decodes), (self._ring_prefill, metadata.chunks)):
            if rows is not None:
                kernel(query=query, out=out, **rings, **rows.ring_arguments, **options)
        # Only now: the new tokens may lie on rows that the row's first tokens had to read.
        self._ring_write(**rings, **metadata.rows.ring_arguments)
