"""LLMEngine: startup in the right order, then add, step, abort."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from typing import TYPE_CHECKING, Any

from atom_core.cache.block_manager import BlockManager
from atom_core.cache.config import CacheConfig
from atom_core.cache.tensors import allocate_caches
from atom_core.config import EngineConfig
from atom_core.engine.batch_builder import BatchBuilder, StateLayout
from atom_core.engine.io_processor import InputOutputProcessor, Request
from atom_core.engine.memory import available_bytes
from atom_core.engine.model_runner import ModelRunner, StepOutput
from atom_core.engine.outputs import RequestOutput
from atom_core.engine.scheduled_batch import ScheduledBatch
from atom_core.engine.scheduler import Scheduler, SchedulerLimits
from atom_core.engine.sequence import Sequence, SequenceStatus
from atom_core.engine.speculation import make_speculator
from atom_core.engine.startup import Inspection, inspect_model, make_registry
from atom_core.engine.state_mover import StateMover
from atom_core.engine.stats import EngineStats
from atom_core.errors import ConfigError, RequestError
from atom_core.models.binding import LayerProbe, bind_layers, claim_layers
from atom_core.models.cpu_linear import prepare_linears
from atom_core.models.loader import load_model, load_tokenizer
from atom_core.models.rotary import fix_rotary_scaling
from atom_core.plugin import Rewind, Step, StepBuffers, StepLimits

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from atom_core.cache.plan import CachePlan
    from atom_core.engine.sampling import SamplingParams
    from atom_core.plugin.registry import PluginRegistry

__all__ = ["LLMEngine"]

_log = logging.getLogger("atom_core")


class LLMEngine:
    """Serves one model; single-threaded: the caller adds requests and drives the steps.

    Attributes:
        config: what the user set.
        inspection: what was known before weights loaded.
        plan: how the memory is divided.
        scheduler: waiting and running sequences.
        runner: the model.
        io: tokenization both ways.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: PluginRegistry | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if config.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size is {config.tensor_parallel_size}; this version runs on one rank and only "
                "plans for more"
            )
        self.config = config
        self.registry = registry or make_registry(config)
        self.inspection = inspect_model(config, self.registry)
        self.plan = self.inspection.plan()
        for warning in (*self.inspection.warnings, *self.plan.warnings):
            _log.warning(warning)
        inspection = self.inspection
        model = load_model(config, inspection.model_config, inspection.dtype, inspection.device, progress)
        tokenizer = None if config.skip_tokenizer else load_tokenizer(config)
        self.io = InputOutputProcessor(
            tokenizer,
            vocab_size=inspection.model_config.vocab_size,
            max_model_len=inspection.max_model_len,
            eos_token_ids=_eos_token_ids(model, tokenizer),
            stateful=self.registry.is_stateful(inspection.model_config.model_type),
            seed=config.seed,
        )
        self.cache_config = CacheConfig(
            block_size=self.plan.block_size,
            num_blocks=self.plan.num_blocks,
            max_model_len=self.inspection.max_model_len,
            num_per_req_cache_groups=self._num_groups(),
            per_req_cache_equiv_blocks=config.per_req_cache_equiv_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            num_checkpoints=self._num_checkpoints(),
            checkpoint_interval=self.inspection.checkpoint_interval,
            prefix_cacheable=self.inspection.figures.prefix_cacheable,
        )
        limits = SchedulerLimits(
            max_num_seqs=min(config.max_num_seqs, self.plan.num_groups)
            if self.inspection.has_state
            else config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.inspection.max_model_len,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            policy=config.scheduling_policy,
        )
        self.scheduler = Scheduler(limits, BlockManager(self.cache_config))
        self.runner = _make_runner(model, config, self.registry, self.inspection, self.plan, limits)
        self.speculator = make_speculator(self.inspection)
        self.stats = EngineStats()
        self._requests: dict[str, Request] = {}
        self._owners: dict[int, tuple[Request, int]] = {}
        self._numbers = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def add_request(
        self,
        prompt: str | TokenIds[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request.

        Args:
            prompt: text, or token ids.
            params: how to sample.
            request_id: unique among unfinished requests; made up when `None`.
            cache_salt: only requests with the same salt share cached prefixes.

        Returns:
            The request's id.

        Raises:
            RequestError: the request cannot be served; nothing was queued.
        """
        request_id = request_id if request_id is not None else f"request-{next(self._numbers)}"
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request")
        request = self.io.make_request(request_id, prompt, params, cache_salt)
        self.scheduler.check(request.seqs[0])
        num_held = len(request.seqs) - 1 if self.config.enable_prefix_caching else 0
        request.held = request.seqs[len(request.seqs) - num_held :]
        for index, seq in enumerate(request.seqs):
            if index + num_held < len(request.seqs):
                self.scheduler.add(seq)
            self._owners[seq.id] = (request, index)
        self._requests[request_id] = request
        self.stats.count_request(len(request.prompt_token_ids))
        return request_id

    def abort(self, request_id: str) -> RequestOutput:
        """Cancel an unfinished request; what it held is free at once.

        Returns:
            What it had generated.

        Raises:
            RequestError: there is no such unfinished request.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"no unfinished request has the id {request_id!r}")
        for seq in request.held:
            seq.finish("abort")
        for seq in request.seqs:
            if seq.status is not SequenceStatus.FINISHED:
                self.scheduler.cancel(seq)
        self._forget(request)
        return self.io.output(request)

    def output(self, request_id: str) -> RequestOutput:
        """Return what an unfinished request has generated so far."""
        return self.io.output(self._requests[request_id])

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns:
            The requests that finished in it.
        """
        started = time.perf_counter()
        if self.speculator is not None:
            self.speculator.set_drafts(self.scheduler.running)
        batch = self.scheduler.schedule()
        if not batch.seqs:
            return []
        scheduled = time.perf_counter()
        result = self.runner.run(batch)
        ran = time.perf_counter()
        num_known = sum(seq.num_tokens for seq in batch.seqs)
        finished = self._take(batch, result)
        self.stats.count_step(
            batch,
            result,
            self.scheduler,
            num_generated=sum(seq.num_tokens for seq in batch.seqs) - num_known,
            seconds=(scheduled - started, ran - scheduled, time.perf_counter() - ran),
        )
        self.runner.step_finished(self.stats.last_step)
        return finished

    def snapshot(self) -> dict[str, Any]:
        """Return the engine's figures: requests, tokens, times, cache occupancy and hits."""
        return self.stats.snapshot(self.scheduler)

    def _num_groups(self) -> int:
        """Groups of the plan; of a registered model type without state, one that costs nothing for each request."""
        if self.inspection.has_state:
            return self.plan.num_groups
        registered = self.registry.is_stateful(self.inspection.model_config.model_type)
        return self.config.max_num_seqs if registered else 0

    def _num_checkpoints(self) -> int:
        """Checkpoints of the plan; where there is no state, one for each block costs nothing."""
        return self.plan.num_checkpoints if self.inspection.has_state else self.plan.num_blocks

    def _take(self, batch: ScheduledBatch, result: StepOutput) -> list[RequestOutput]:
        """Give a step's tokens to scheduler, text and requests."""
        for row, (seq, prompt_logprobs) in enumerate(zip(batch.seqs, result.prompt_logprobs, strict=True)):
            if prompt_logprobs:
                del seq.prompt_logprobs[seq.num_computed_tokens :]
                seq.prompt_logprobs.extend(prompt_logprobs)
            if seq.params.logprobs is not None:
                seq.output_logprobs.extend(result.logprobs[row])
        known = [seq.num_tokens for seq in batch.seqs]
        self.scheduler.postprocess(batch, result.token_ids)
        self.runner.save_states(batch.saves)
        self.scheduler.states_saved(batch)
        for seq in batch.seqs:
            del seq.output_logprobs[seq.num_output_tokens :]
        now = time.monotonic()
        ended: dict[str, Request] = {}
        for seq, before in zip(batch.seqs, known, strict=True):
            if seq.num_tokens == before:
                continue
            request, index = self._owners[seq.id]
            self._take_text(request, index, seq, before, now)
            if seq.status is SequenceStatus.FINISHED and request.finished:
                ended[request.id] = request
        for request in ended.values():
            request.metrics.finished_time = now
            self._forget(request)
        return [self.io.output(request) for request in ended.values()]

    def _take_text(self, request: Request, index: int, seq: Sequence, before: int, now: float) -> None:
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
            request.metrics.num_cached_tokens = seq.num_cached_tokens
            for other in request.held:
                self.scheduler.add(other)
            request.held = []
        request.metrics.num_preemptions = seq.num_preemptions
        stop = self.io.take_tokens(request, index, seq.token_ids[before:].tolist())
        if stop is not None and (seq.finish_reason != "stop" or stop.num_tokens < seq.num_output_tokens):
            seq.truncate(seq.num_prompt_tokens + stop.num_tokens)
            self.scheduler.stop(seq, stop.text)

    def _forget(self, request: Request) -> None:
        del self._requests[request.id]
        for seq in request.seqs:
            self._owners.pop(seq.id, None)
            if self.speculator is not None:
                self.speculator.release(seq)


def _make_runner(
    model: nn.Module,
    config: EngineConfig,
    registry: PluginRegistry,
    inspection: Inspection,
    plan: CachePlan,
    limits: SchedulerLimits,
) -> ModelRunner:
    """Bind the model's layers to caches, and prove with a first step that every layer runs."""
    model_config, device, dtype = inspection.model_config, inspection.device, inspection.dtype
    fix_rotary_scaling(model, inspection.max_model_len)
    claimed = claim_layers(model, registry, model_config, config.tensor_parallel_size)
    step = Step()
    bind_layers(model, claimed, step)
    if device.type == "cpu":
        prepare_linears(model, claimed.replaced, available_bytes(device) // 4)
    caches = allocate_caches(
        inspection.hooks,
        claimed.layers,
        model_config=model_config,
        figures=inspection.figures,
        plan=plan,
        cache_dtype=dtype,
        num_spec_tokens=config.num_spec_tokens,
        kernels=registry.kernel_table(config.kernels),
        device=device,
    )
    states = {
        plugin: StateLayout(
            inspection.figures.slots_per_req[plugin], Rewind(inspection.figures.requirements[plugin].rewind)
        )
        for plugin, num_bytes in inspection.figures.slot_bytes.items()
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
        model,
        claimed.layers,
        inspection.hooks,
        step,
        BatchBuilder(states, buffers),
        buffers,
        StateMover(caches, states, plan.num_groups),
        vocab_size=model_config.vocab_size,
        device=device,
    )
    with LayerProbe(claimed):
        runner.run(_probe_batch(limits, inspection.has_state))
    return runner


def _probe_batch(limits: SchedulerLimits, has_state: bool) -> ScheduledBatch:
    """One row of up to two tokens in block 0 and group 0; nobody reads what it leaves there."""
    from atom_core.engine.sampling import SamplingParams

    seq = Sequence(-1, [0] * min(2, limits.max_num_batched_tokens), SamplingParams(temperature=0), max_num_tokens=8)
    seq.block_table = [0]
    seq.row = 0
    if has_state:
        seq.per_req_cache_group = 0
    return ScheduledBatch([seq], [seq.num_tokens], 0, [seq] if has_state else [])


def _eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """End-of-sequence tokens of the model's generation config and of its tokenizer."""
    generation_config: Any = model.generation_config
    found = generation_config.eos_token_id
    token_ids: set[int] = set() if found is None else {found} if isinstance(found, int) else set(found)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        token_ids.add(tokenizer.eos_token_id)
    return frozenset(token_ids)
