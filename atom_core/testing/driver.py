"""StepDriver: one model with its plugins, run step by step without scheduler; the test decides about every row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atom_core.cache.plan import CachePlan
from atom_core.cache.tensors import CacheTensors, allocate_caches
from atom_core.config import EngineConfig
from atom_core.engine.startup import inspect_model
from atom_core.errors import EngineError
from atom_core.models.binding import bind_layers, claim_layers
from atom_core.models.loader import load_model
from atom_core.plugin import (
    AttentionBatch,
    AttentionLayer,
    KernelTable,
    Rewind,
    SelectedKernel,
    Step,
    StepBuffers,
    StepLimits,
)
from atom_core.plugin.registry import PluginRegistry
from atom_core.testing.batch import Request, Row, StateShape, build_batch
from atom_core.testing.poison import fill
from atom_core.testing.report import Trace

__all__ = ["StepDriver", "StepResult"]

_MOST_TOKENS = 1024
_GARBAGE = 1e4


@dataclass(frozen=True)
class StepResult:
    """What a step gave, per row in the order in which the rows were given.

    Attributes:
        rows: per row, the trace of all its tokens, drafts included.
    """

    rows: list[Trace]

    @property
    def logits(self) -> list[Tensor]:
        """Per row, [count + drafts, vocab_size]."""
        return [row.logits for row in self.rows]


@dataclass
class _ListeningTable(KernelTable):
    """A kernel table that remembers what it was asked."""

    cases: dict[str, list[tuple[Mapping[str, torch.dtype], Mapping[str, Any]]]] = field(default_factory=dict)

    def select(
        self, op: str, *, device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]
    ) -> SelectedKernel:
        case = dict(dtypes), dict(facts)
        known = self.cases.setdefault(op, [])
        if case not in known:
            known.append(case)
        return super().select(op, device=device, dtypes=dtypes, facts=facts)


class StepDriver:
    """Claims, allocates and binds a model through the core, then runs the steps that a test makes up.

    Every cache holds NaN at first, but for the initial values of the slot that a request leases. Blocks and groups
    are given out in a shuffled order. The model is copied; the copy stays frozen.

    Args:
        model: a transformers model.
        plugins: plugin objects by name, or a registry.
        block_size: tokens per block; the least from 4 on that the plugins accept when `None`.
        num_blocks: blocks in all.
        num_groups: groups of state slots.
        num_spec_tokens: most drafts of a row.
        kernels: forced kernels, op name to kernel name.
        poison: what caches hold at first; `None` leaves them as the plugins allocated them.

    Attributes:
        layers: the claimed layers.
        caches: their tensors, `caches.paged` and `caches.state`, by full name.
        states: by plugin with state, its slots.
        batch: the last step's batch.
        block_size: tokens per block.
        kernel_cases: by op, the dtypes and facts for which layers asked for a kernel.
        inspection: what the core learned before it loaded weights; figures, config, owners.
    """

    batch: AttentionBatch

    def __init__(
        self,
        model: nn.Module,
        plugins: Mapping[str, object] | PluginRegistry,
        *,
        block_size: int | None = None,
        num_blocks: int = 96,
        num_groups: int = 6,
        num_spec_tokens: int = 0,
        kernels: Mapping[str, str] | None = None,
        poison: float | None = float("nan"),
    ) -> None:
        registry = plugins if isinstance(plugins, PluginRegistry) else PluginRegistry.of(plugins)
        device = next(model.parameters()).device
        self._device = device
        self._poison = poison
        self.num_spec_tokens = num_spec_tokens
        config = EngineConfig(
            model=copy.deepcopy(model),
            device=str(device),
            skip_tokenizer=True,
            block_size=block_size or least_block_size(model, registry),
            max_num_batched_tokens=_MOST_TOKENS,
            num_spec_tokens=num_spec_tokens,
        )
        self.inspection = inspection = inspect_model(config, registry)
        self.block_size = inspection.block_size
        self.model: nn.Module = load_model(config, inspection.model_config, inspection.dtype, device)
        self._claimed = claim_layers(self.model, registry, inspection.model_config, 1)
        self.layers: tuple[AttentionLayer, ...] = self._claimed.layers
        self.step = Step()
        bind_layers(self.model, self._claimed, self.step)
        self.num_blocks, self.num_groups = num_blocks, num_groups
        figures = inspection.figures
        self.states = {
            name: StateShape(figures.slots_per_req[name], Rewind(figures.requirements[name].rewind))
            for name, num_bytes in figures.slot_bytes.items()
            if num_bytes
        }
        table = _ListeningTable(**vars(registry.kernel_table(kernels)))
        self.kernel_cases: Mapping[str, list[tuple[Mapping[str, torch.dtype], Mapping[str, Any]]]] = table.cases
        self.caches = self._allocate(table)
        limits = StepLimits(64, _MOST_TOKENS, -(-_MOST_TOKENS // self.block_size), self.block_size)
        self._buffers = StepBuffers(limits, device)
        self.reset()

    def reset(self, poison: float | None = None) -> None:
        """Forget all requests and fill the caches again.

        Args:
            poison: with what; the constructor's when `None`.
        """
        value = self._poison if poison is None else poison
        if value is not None:
            fill(self.caches.paged, value)
            fill(self.caches.state, value)
        self.free_blocks, self.free_groups = _last_shuffled(self.num_blocks), _last_shuffled(self.num_groups)

    def owner(self, module_name: str) -> str:
        """The name of the plugin that owns a layer."""
        return self._claimed.owners[module_name]

    def request(
        self, tokens: Sequence[int], *, blocks: Sequence[int] | None = None, group: int | None = None
    ) -> Request:
        """Make a request; its group's first slot gets the initial values, as the core does it at a lease.

        Args:
            tokens: its text, as much of it as will be computed.
            blocks: in order; free ones when `None`.
            group: a free one when `None`.

        Raises:
            EngineError: no block or group is free.
        """
        needed = -(-(len(tokens) + self.num_spec_tokens) // self.block_size)
        if blocks is None:
            if needed > len(self.free_blocks):
                raise EngineError(f"the driver has {len(self.free_blocks)} free blocks, expected {needed}")
            blocks = [self.free_blocks.pop() for _ in range(needed)]
        if group is None and self.states:
            if not self.free_groups:
                raise EngineError(f"all {self.num_groups} groups of the driver are leased; release a request")
            group = self.free_groups.pop()
        request = Request(list(tokens), list(blocks), -1 if group is None else group)
        if request.group >= 0:
            self.caches.initialize_slots(
                {name: [request.group * state.slots_per_req] for name, state in self.states.items()}
            )
        return request

    def release(self, request: Request) -> None:
        """Give a request's blocks and group back; what they hold stays."""
        self.free_blocks.extend(request.blocks)
        if request.group >= 0:
            self.free_groups.append(request.group)

    @torch.inference_mode()
    def run(
        self,
        *rows: Row,
        padding_rows: int = 0,
        padding_tokens: int = 0,
        around_layer: Callable[[AttentionLayer, bool], None] | None = None,
    ) -> StepResult:
        """Run one step. Afterwards the first `count` tokens of each row count as computed, drafts do not.

        Args:
            rows: in any order; decodes come first in the batch.
            padding_rows: rows without tokens behind the others.
            padding_tokens: tokens of no row behind the others, with huge hidden states.
            around_layer: called before (`False`) and after (`True`) each claimed layer runs.
        """
        order = sorted(range(len(rows)), key=lambda index: not rows[index].decode)
        ordered = [rows[index] for index in order]
        self.batch = build_batch(
            ordered,
            self.states,
            self.block_size,
            padding_rows=padding_rows,
            padding_tokens=padding_tokens,
            device=self._device,
        )
        ids = [token for row in ordered for token in row.token_ids] + [1] * padding_tokens
        self._buffers.turn()
        metadata = self.inspection.hooks.build_metadata(layers=self.layers, batch=self.batch, buffers=self._buffers)
        outputs: dict[str, Tensor] = {}
        self.step.begin(self.batch, metadata)
        try:
            with self._watching(outputs, around_layer, padding_tokens):
                logits = self.model(
                    torch.tensor([ids], device=self._device),
                    position_ids=self.batch.positions[None],
                    use_cache=False,
                ).logits[0]
        finally:
            self.step.end()
        counts = [len(row.token_ids) for row in ordered]
        whole = Trace(logits.float(), outputs).between(0, sum(counts))
        traces: list[Any] = [None] * len(rows)
        start = 0
        for place, count in zip(order, counts, strict=True):
            traces[place] = whole.between(start, start + count)
            start += count
        for row in ordered:
            row.request.num_computed += row.count
            row.request.num_accepted = row.count if row.decode else 1
        return StepResult(traces)

    def one_shot(self, tokens: Sequence[int]) -> Trace:
        """Compute a text alone, in one chunk, in caches that nobody used; forgets all requests before and after."""
        self.reset()
        trace = self.run(Row(self.request(tokens), len(tokens))).rows[0]
        self.reset()
        return trace

    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Trace]:
        """Generate greedily, alone: the prompt in one chunk, then one token at a time, in caches that nobody used.

        Returns:
            The new tokens, and the trace of prompt and new tokens but the last.
        """
        self.reset()
        request = self.request([*prompt, *[0] * num_tokens])
        traces = [self.run(Row(request, len(prompt))).rows[0]]
        new: list[int] = []
        while True:
            token = int(traces[-1].logits[-1].argmax())
            request.tokens[len(prompt) + len(new)] = token
            new.append(token)
            if len(new) == num_tokens:
                break
            traces.append(self.run(Row(request, decode=True)).rows[0])
        self.reset()
        return new, Trace.join(traces)

    def _allocate(self, table: KernelTable) -> CacheTensors:
        """Have the plugins allocate their tensors and bind the layers, as the engine does it at its start."""
        inspection, figures = self.inspection, self.inspection.figures
        plan = CachePlan(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_groups=self.num_groups if self.states else 0,
            num_checkpoints=0,
            block_bytes=figures.bytes_per_block,
            group_bytes=figures.group_bytes,
            checkpoint_bytes=figures.checkpoint_bytes,
            workspace_bytes=0,
            budget_bytes=0,
            max_model_len=inspection.max_model_len,
            slots_per_req=figures.state_slots_per_req,
        )
        return allocate_caches(
            inspection.hooks,
            self.layers,
            model_config=inspection.model_config,
            figures=figures,
            plan=plan,
            cache_dtype=inspection.dtype,
            num_spec_tokens=self.num_spec_tokens,
            kernels=table,
            device=self._device,
        )

    @contextmanager
    def _watching(
        self,
        outputs: dict[str, Tensor],
        around_layer: Callable[[AttentionLayer, bool], None] | None,
        padding_tokens: int,
    ) -> Iterator[None]:
        """Record the output of every claimed layer; make the padding tokens' hidden states huge."""
        handles = []
        for layer in self.layers:
            module = layer if isinstance(layer, nn.Module) else self._claimed.modules[layer.module_name]

            def record(_: nn.Module, __: Any, output: Any, name: str = layer.module_name) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                outputs[name] = hidden[0].float().flatten(1)

            handles.append(module.register_forward_hook(record))
            if around_layer is not None:

                def before(*_: Any, layer: AttentionLayer = layer) -> None:
                    around_layer(layer, False)

                def after(*_: Any, layer: AttentionLayer = layer) -> None:
                    around_layer(layer, True)

                handles.append(module.register_forward_pre_hook(before))
                handles.append(module.register_forward_hook(after))
        if padding_tokens:
            model: Any = self.model

            def spoil(_: nn.Module, __: Any, output: Tensor) -> Tensor:
                output = output.clone()
                output[..., -padding_tokens:, :] *= _GARBAGE
                return output

            handles.append(model.get_input_embeddings().register_forward_hook(spoil))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _last_shuffled(count: int) -> list[int]:
    """The last of `count` numbers, at most 256, in an order that is the same every time."""
    shuffled: list[int] = np.random.default_rng(0).permutation(np.arange(max(0, count - 256), count)).tolist()
    return shuffled


def least_block_size(model: nn.Module, registry: PluginRegistry) -> int:
    """The least block size from 4 on that the plugins of a model accept."""
    config = EngineConfig(model=model, skip_tokenizer=True)
    requirements = inspect_model(config, registry).figures.requirements
    multiple = int(np.lcm.reduce([needs.block_size_multiple for needs in requirements.values()]))
    return -(-4 // multiple) * multiple
