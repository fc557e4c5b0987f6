"""Latent attention over paged latents."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from atom_core.plugin import AttentionLayer
from atom_mla.checks import check_call, check_original
from atom_mla.expansion import Expansion
from atom_mla.families import Family, Gate, Rotary
from atom_mla.metadata import LatentMetadata, rows

if TYPE_CHECKING:
    from atom_core.plugin import AttentionBatch, KernelTable, KVCacheTensor, SelectedKernel

__all__ = ["LatentLayer"]


class LatentLayer(AttentionLayer, nn.Module):
    """Replaces a latent attention module, with the module's own projections under their own names.

    The cache holds the normalized latent and the rotated shared key. Decode rows absorb `kv_b_proj` into query and
    output; prefill chunks expand latents into keys and values.

    Attributes:
        num_heads: of this rank.
        key_dim: of a head's expanded key, `qk_nope_head_dim + qk_rope_head_dim`.
        value_dim: of a head's expanded value.
        latent_dim: `kv_lora_rank`.
    """

    q_proj: Any
    q_a_proj: Any
    q_a_layernorm: Any
    q_b_proj: Any
    q_gate_proj: Any
    g_proj: Any
    kv_a_proj_with_mqa: Any
    kv_a_layernorm: Any
    kv_b_proj: Any
    o_proj: Any
    indexer: Any

    ops: ClassVar[tuple[str, ...]] = ("write_latent", "decode", "prefill", "prefill_paged")
    compiled: ClassVar[tuple[str, ...]] = ("project", "absorb", "expand_output", "project_out")

    def __init__(self, module: nn.Module, module_name: str, family: Family, modeling: ModuleType, tp_size: int) -> None:
        """Take over the projections.

        Args:
            module: the original.
            module_name: its dotted name, for messages.
            family: what is particular to its class.
            modeling: where its class lives, for its rotary functions.
            tp_size: ranks that share the heads.

        Raises:
            LayerError: heads do not divide, or the module has a part that its class is not known to have.
        """
        super().__init__()
        original: Any = module
        self.family = family
        self.original_class = type(module).__name__
        check_original(original, module_name, family, tp_size)
        self.config, self.layer_idx = original.config, original.layer_idx
        self.num_heads: int = original.num_heads // tp_size
        self.latent_dim: int = original.kv_lora_rank
        self.rope_dim: int = original.qk_rope_head_dim
        self.nope_dim: int = original.qk_nope_head_dim
        self.key_dim: int = original.qk_head_dim
        self.value_dim: int = original.v_head_dim
        self.scaling: float = original.scaling
        if family.lora_scales:
            self._query_scale: float = original.mla_scale_q_lora
            self._latent_scale: float = original.mla_scale_kv_lora
        self._modeling = modeling
        self._rotary = family.rotary
        if family.rotary is Rotary.CONFIG:
            self._rotary = Rotary.INTERLEAVED if original.config.rope_interleave else Rotary.HALF
        for name, child in module.named_children():
            self.add_module(name, child)
        for name in ("q_proj", "q_a_proj"):
            if not hasattr(self, name):
                self.add_module(name, None)

    def cache_widths(self) -> dict[str, int]:
        """Values per token by cache field."""
        return {"latent_cache": self.latent_dim + self.rope_dim}

    def facts(self) -> dict[str, int]:
        """Shape facts by which kernels are chosen."""
        return {
            "num_heads": self.num_heads,
            "latent_dim": self.latent_dim,
            "rope_dim": self.rope_dim,
            "nope_dim": self.nope_dim,
            "value_dim": self.value_dim,
            "block_size": self._latent_cache.shape[1],
        }

    def bind(self, kv_cache: KVCacheTensor, kernels: KernelTable) -> None:
        """Take the caches, choose kernels and look up the weight of `kv_b_proj`."""
        super().bind(kv_cache, kernels)
        self._latent_cache = kv_cache.paged["latent_cache"]
        self._cache_scale = kv_cache.paged.get("latent_scale")
        self._kernels = {op: self._select_kernel(kernels, op) for op in self.ops}
        self._expansion = Expansion(
            self.kv_b_proj, self.num_heads, self.nope_dim, self.latent_dim, self.kv_a_layernorm.weight.dtype
        )

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: Any = None,
        position_ids: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Any, ...]:
        """Run the step's tokens; keywords and values returned are the original's.

        Args:
            hidden_states: [1, num_tokens, hidden_size].
            position_embeddings: what the model's rotary embedding returned for these tokens.
            position_ids: [1, num_tokens]; used by classes that scale queries by position.
            keywords: the original's others, all of them without meaning here.

        Returns:
            [1, num_tokens, hidden_size], and `None` for the attention weights.
        """
        check_call(self._what(), self.step.batch.num_tokens, hidden_states, keywords)
        output, _ = self._run(hidden_states, position_embeddings, position_ids, None)
        return output, None

    def _run(
        self, hidden: Tensor, position_embeddings: Any, position_ids: Tensor | None, previous: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The whole layer; returns the output and, in sparse layers, the selection."""
        turns = position_embeddings
        if self._rotary is Rotary.COMPLEX:
            turns = torch.view_as_real(position_embeddings)  # here, since the compiler knows no complex numbers
        query, latent, residual, gate = self.project(hidden, turns, position_ids)
        self._kernels["write_latent"](latent, self._latent_cache, self._cache_scale, self.step.batch.slot_mapping)
        attended, selection = self._attend(query, latent, hidden, residual, position_embeddings, previous)
        return self.project_out(attended, gate), selection

    def project(
        self, hidden: Tensor, turns: Any, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Compute what meets the cache.

        Args:
            hidden: [1, num_tokens, hidden_size].
            turns: `position_embeddings`, complex numbers as pairs of real ones.
            position_ids: as in `forward`.

        Returns:
            Queries [num_tokens, heads, key_dim]; the rows of the cache [num_tokens, latent_dim + rope_dim]; the
            low-rank query if there is one; and the gate if there is one.
        """
        compressed = self.kv_a_proj_with_mqa(hidden)
        query, residual, gate = self._project_query(hidden)
        latent, key_rope = torch.split(compressed, [self.latent_dim, self.rope_dim], -1)
        latent = self.kv_a_layernorm(latent)
        if self.family.lora_scales:
            query, latent = query * self._query_scale, latent * self._latent_scale
        query_nope, query_rope = torch.split(query.transpose(1, 2), [self.nope_dim, self.rope_dim], -1)
        query_rope, key_rope = self.rotate(self._rotary, query_rope, key_rope[:, None], turns)
        query = torch.cat((query_nope, query_rope), -1)
        if self.family.position_scale:
            query = query * self._position_scale(position_ids).to(query.dtype)
        return query[0].transpose(0, 1), torch.cat((latent, key_rope[:, 0]), -1)[0], residual, gate

    def project_out(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        """Turn [num_tokens, heads, value_dim] into [1, num_tokens, hidden_size]."""
        output = attended[None]
        if gate is not None:
            output = (output * gate).to(output.dtype)
        projected: Tensor = self.o_proj(output.flatten(2))
        return projected

    def absorb(self, query: Tensor) -> Tensor:
        """Make [num_tokens, heads, key_dim] queries over latents; see `Expansion.absorb`."""
        return self._expansion.absorb(query)

    def expand_output(self, attended: Tensor) -> Tensor:
        """Make output over values of output over latents; see `Expansion.expand_output`."""
        return self._expansion.expand_output(attended)

    def _project_query(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries [1, num_tokens, heads, key_dim], the low-rank query if there is one, and the gate."""
        residual = gate = None
        if self.q_a_proj is None:
            query = self.q_proj(hidden)
        else:
            compressed = self.q_a_proj(hidden)
            residual = self.q_a_layernorm(compressed)
            if self.family.gate is Gate.QUERY:
                both = self.q_gate_proj(torch.cat((residual, compressed), -1)).unflatten(-1, (self.num_heads, -1))
                query, gate = both.split((self.key_dim, self.value_dim), -1)
                return query, residual, gate.float().sigmoid()
            query = self.q_b_proj(residual)
        if self.family.gate is Gate.HEAD:
            gate = self.g_proj(hidden).float().sigmoid().to(hidden.dtype)[..., None]
        return query.unflatten(-1, (self.num_heads, self.key_dim)), residual, gate

    def rotate(self, rotary: Rotary, query: Tensor, key: Tensor, turns: Any) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys [1, heads, num_tokens, rope_dim] as the modeling module does."""
        if rotary is Rotary.NONE:
            return query, key
        if rotary is Rotary.COMPLEX:
            return _rotate_pairs(query, turns), _rotate_pairs(key, turns)
        modeling: Any = self._modeling
        if rotary is Rotary.INTERLEAVED:
            rotated: tuple[Tensor, Tensor] = modeling.apply_rotary_pos_emb_interleave(query, key, *turns)
        else:
            rotated = modeling.apply_rotary_pos_emb(query, key, *turns)
        return rotated

    def _position_scale(self, position_ids: Tensor | None) -> Tensor:
        parameters, modeling = self.config.rope_parameters, self._modeling
        scale: Tensor = modeling.get_llama_4_attn_scale(
            position_ids, parameters.get("llama_4_scaling_beta"), parameters.get("original_max_position_embeddings")
        )
        return scale

    def _attend(
        self,
        query: Tensor,
        latent: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        position_embeddings: Any,
        previous: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend densely; the arguments after `latent` are for sparse layers."""
        return self._attend_dense(query, latent), None

    def _attend_dense(self, query: Tensor, latent: Tensor) -> Tensor:
        """Decode rows first, then prefill chunks; [num_tokens, heads, value_dim]."""
        batch = self.step.batch
        metadata: LatentMetadata = self.step.metadata["mla"]
        decodes = batch.num_decode_tokens
        if decodes == batch.num_tokens:
            return self._decode(query, batch)
        chunks = query[decodes:]
        # All chunks attend to latents as a float8 cache has them: what is cached never depends on how a prompt was cut.
        if metadata.prefill_has_prefix or self._cache_scale is not None:
            output = self._kernels["prefill_paged"](
                chunks,
                self._expansion.weight,
                self._latent_cache,
                self._cache_scale,
                **rows(batch, batch.num_decodes, batch.num_seqs),
                scaling=self.scaling,
            )
        else:
            output = self._prefill(chunks, latent[decodes:], batch)
        return torch.cat((self._decode(query[:decodes], batch), output)) if decodes else output

    def _decode(self, query: Tensor, batch: AttentionBatch) -> Tensor:
        attended = self._kernels["decode"](
            self.absorb(query),
            self._latent_cache,
            self._cache_scale,
            **rows(batch, 0, batch.num_decodes),
            scaling=self.scaling,
            value_dim=self.latent_dim,
        )
        return self.expand_output(attended)

    def _prefill(self, query: Tensor, latent: Tensor, batch: AttentionBatch) -> Tensor:
        low_rank, rotary = torch.split(latent, [self.latent_dim, self.rope_dim], -1)
        expanded = self.kv_b_proj(low_rank).view(-1, self.num_heads, self.nope_dim + self.value_dim)
        key_nope, value = torch.split(expanded, [self.nope_dim, self.value_dim], -1)
        key = torch.cat((key_nope, rotary[:, None].expand(-1, self.num_heads, -1)), -1)
        output: Tensor = self._kernels["prefill"](
            query,
            key,
            value,
            batch.query_start_loc[batch.num_decodes : batch.num_seqs + 1],
            batch.query_start_loc_host[batch.num_decodes : batch.num_seqs + 1],
            batch.max_query_len,
            self.scaling,
        )
        return output

    def _what(self) -> str:
        return f"{self.module_name} ({self.original_class})"

    def _select_kernel(self, kernels: KernelTable, op: str) -> SelectedKernel:
        cache = self._latent_cache
        dtypes = {"query": self.kv_a_layernorm.weight.dtype, "cache": cache.dtype}
        return kernels.select(f"mla.{op}", device=cache.device, dtypes=dtypes, facts=self.facts())


def _rotate_pairs(states: Tensor, turns: Tensor) -> Tensor:
    """Multiply neighbours, taken as complex numbers, by the turns of their tokens.

    Args:
        states: [1, heads, num_tokens, rope_dim].
        turns: [1, num_tokens, rope_dim / 2, 2] float32, cosine and sine.
    """
    first, second = states.float().reshape(*states.shape[:-1], -1, 2).unbind(-1)
    cosine, sine = turns.unsqueeze(1).unbind(-1)
    turned = torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1)
    return turned.flatten(3).to(states.dtype)
