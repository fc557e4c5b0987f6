"""BoundModel: a model whose attention layers belong to plugins, and the runners over caches for it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from atom_core.cache.tensors import allocate_caches
from atom_core.engine.batch_builder import BatchBuilder, StateLayout
from atom_core.engine.graphs import least_support, step_shapes
from atom_core.engine.memory import available_bytes, format_bytes
from atom_core.engine.model_runner import ModelRunner
from atom_core.engine.sampling import SamplingParams
from atom_core.engine.scheduled_batch import ScheduledBatch
from atom_core.engine.sequence import Sequence
from atom_core.engine.state_mover import StateMover
from atom_core.models import cpu_linear, fusion
from atom_core.models.binding import LayerProbe, bind_layers, claim_layers, decoder_layers
from atom_core.models.compiled import CompiledBlocks
from atom_core.models.experts import choose_experts, prepare_experts
from atom_core.models.rotary import fix_rotary_scaling
from atom_core.plugin import GraphSupport, Rewind, Step, StepBuffers, StepLimits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Rows
    from contextlib import AbstractContextManager

    from atom_core.cache.plan import CachePlan
    from atom_core.config import EngineConfig
    from atom_core.engine.batch_builder import StepShape
    from atom_core.engine.graphs import CaptureCost
    from atom_core.engine.running_rows import RunningRows
    from atom_core.engine.scheduler import SchedulerLimits
    from atom_core.engine.startup import Inspection
    from atom_core.plugin.registry import PluginRegistry

__all__ = ["BoundModel"]

_log = logging.getLogger("atom_core")


class BoundModel:
    """Claims a model's attention layers and puts them in place; then makes runners over caches of any size.

    Only the runner made last can run: the layers are bound to its caches.

    Args:
        model: with weights; changed in place.
        config: what the user set.
        registry: the plugins.
        inspection: what is known of the model's role.

    Attributes:
        model: as given, changed.
        inspection: as given.
    """

    def __init__(
        self, model: nn.Module, config: EngineConfig, registry: PluginRegistry, inspection: Inspection
    ) -> None:
        self.model = model
        self._config = config
        self._registry = registry
        self.inspection = inspection
        fix_rotary_scaling(model, inspection.max_model_len)
        self._claimed = claim_layers(model, registry, inspection.model_config, config.tensor_parallel_size)
        self._step = Step()
        bind_layers(model, self._claimed, self._step)
        self._prepared = False
        self._blocks: CompiledBlocks | None = None
        if inspection.device.type == "cpu":
            cpu_linear.prepare_linears(model, self._claimed.replaced, available_bytes(inspection.device) // 4)
            self._prepared = True
        elif not config.eager:
            choose_experts(model)

    def make_runner(self, plan: CachePlan, limits: SchedulerLimits, rows: RunningRows) -> ModelRunner:
        """Allocate caches, bind the layers to them, and prove with a first step that every layer runs.

        Args:
            plan: how many blocks and groups, as this role sees it.
            limits: of a step.
            rows: the running sequences; roles of one model share them.
        """
        inspection, config = self.inspection, self._config
        figures, device = inspection.figures, inspection.device
        kernels = self._registry.kernel_table(config.kernels)
        caches = allocate_caches(
            inspection.hooks,
            self._claimed.layers,
            model_config=inspection.model_config,
            figures=figures,
            plan=plan,
            cache_dtype=inspection.cache_dtype,
            state_dtype=inspection.dtype,
            num_spec_tokens=config.num_spec_tokens,
            kernels=kernels,
            device=device,
        )
        states = {
            plugin: StateLayout(figures.slots_per_req[plugin], Rewind(figures.requirements[plugin].rewind))
            for plugin, num_bytes in figures.slot_bytes.items()
            if num_bytes
        }
        step_limits = StepLimits(
            max_num_seqs=limits.max_num_seqs,
            max_num_tokens=limits.max_num_batched_tokens,
            max_blocks_per_seq=-(-inspection.max_model_len // plan.block_size),
            block_size=plan.block_size,
        )
        buffers = StepBuffers(step_limits, device)
        runner = ModelRunner(
            self.model,
            self._claimed.layers,
            inspection.hooks,
            self._step,
            BatchBuilder(states, buffers, rows),
            buffers,
            StateMover(caches, states, plan.num_groups),
            vocab_size=inspection.model_config.vocab_size,
            device=device,
        )
        with LayerProbe(self._claimed), fusion.LinearCalls(self.model) as linear_calls:
            with self.probe_batch(rows, [min(2, limits.max_num_batched_tokens, limits.max_model_len)]) as batch:
                runner.run(batch)
        if not self._prepared and not config.eager:
            fusion.fuse_linears(linear_calls.groups(), kernels)
            fusion.prepare_linears(self.model, kernels)
            prepare_experts(self.model, kernels)
        self._prepared = True
        return runner

    @contextmanager
    def probe_batch(
        self, rows: RunningRows, lengths: Rows[int], params: SamplingParams | None = None
    ) -> Iterator[ScheduledBatch]:
        """Make prompts of these lengths in block 0 and group 0, for steps of which nobody reads what they leave.

        Args:
            rows: gives each of them a row, and takes it back.
            lengths: tokens of each.
            params: how to sample; greedily when `None`.
        """
        params = params or SamplingParams(temperature=0)
        batch = ScheduledBatch()
        for number, length in enumerate(lengths):
            seq = Sequence(-1 - number, [0] * length, params, max_num_tokens=length)
            seq.block_table = [0] * -(-length // self.inspection.block_size)
            if self.inspection.has_state:
                seq.per_req_cache_group = 0
            rows.add(seq)
            batch.seqs.append(seq)
            batch.num_new_tokens.append(length)
        batch.leased = batch.seqs[:1] if self.inspection.has_state else []
        try:
            yield batch
        finally:
            for seq in batch.seqs:
                rows.remove(seq)

    def step_shapes(self, limits: SchedulerLimits) -> list[StepShape]:
        """Shapes of decode steps to capture; none on the CPU, with `eager`, or where a plugin cannot be captured."""
        if self.inspection.device.type != "cuda" or self._config.eager:
            return []
        support = least_support(self.inspection.figures.requirements)
        return step_shapes(support, limits.max_num_seqs, limits.max_num_batched_tokens, self._config.num_spec_tokens)

    def capture(self, runner: ModelRunner, shapes: Rows[StepShape]) -> CaptureCost:
        """Capture these shapes, with what lies between the attention layers compiled unless the user said no."""
        inside: AbstractContextManager[Any] | None = None
        if self._config.compile and shapes:
            self._blocks = self._blocks or self._compiled_blocks()
            inside = self._blocks
        return runner.use_graphs(shapes, inside=inside)

    def capture_all(self, runner: ModelRunner, limits: SchedulerLimits) -> None:
        """Capture the whole ladder, and say in the log what it took, or who prevents it."""
        cost = self.capture(runner, self.step_shapes(limits))
        requirements = self.inspection.figures.requirements
        unable = [name for name, needs in requirements.items() if needs.graph_support is GraphSupport.NEVER]
        if cost.num_graphs:
            _log.info(
                "captured %d decode graphs of up to %d rows in %.1f s; they take %s",
                cost.num_graphs,
                limits.max_num_seqs,
                cost.seconds,
                format_bytes(cost.num_bytes),
            )
        elif unable and self.inspection.device.type == "cuda" and not self._config.eager:
            owners = ", ".join(self._registry.describe(name) for name in unable)
            _log.warning("decode steps run without graphs: %s cannot be captured", owners)

    def _compiled_blocks(self) -> CompiledBlocks:
        """The decoder layers, and what stands beside their list: final norm and rotary embedding."""
        layers = decoder_layers(self.model, self.inspection.model_config, self._claimed.modules)
        parents = dict.fromkeys(name.rpartition(".")[0].rpartition(".")[0] for name, _ in layers)
        beside = [child for name in parents for child in self.model.get_submodule(name).children()]
        large = (nn.ModuleList, nn.ModuleDict, nn.Embedding, nn.Linear)
        blocks = [module for _, module in layers] + [child for child in beside if not isinstance(child, large)]
        return CompiledBlocks(self._claimed, blocks)
