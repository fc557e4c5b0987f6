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
from atom_core.config import MTP, NGRAM, EngineConfig
from atom_core.engine.bound_model import BoundModel
from atom_core.engine.draft_model import DraftModel
from atom_core.engine.io_processor import InputOutputProcessor, Request
from atom_core.engine.memory import available_bytes
from atom_core.engine.model_runner import StepOutput
from atom_core.engine.mtp import MtpDrafter, MtpRole
from atom_core.engine.ngram import NgramDrafter
from atom_core.engine.outputs import RequestOutput
from atom_core.engine.pipeline import StepPipeline
from atom_core.engine.profiling import measure_memory
from atom_core.engine.sampler import Sampler
from atom_core.engine.scheduled_batch import ScheduledBatch
from atom_core.engine.scheduler import Scheduler, SchedulerLimits
from atom_core.engine.sequence import Sequence, SequenceStatus
from atom_core.engine.speculation import Speculator, make_proposer_speculator
from atom_core.engine.startup import inspect_model, make_registry
from atom_core.engine.stats import EngineStats
from atom_core.errors import ConfigError, RequestError
from atom_core.models.loader import load_model, load_tokenizer
from atom_core.models.mtp import load_mtp

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

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
        free_bytes = available_bytes(inspection.device)
        model = load_model(config, inspection.model_config, inspection.dtype, inspection.device, progress)
        drafting = self._load_drafting(model, progress)
        bound = BoundModel(model, config, self.registry, inspection)
        role = self._measure(bound, model, drafting, free_bytes)
        tokenizer = None if config.skip_tokenizer else load_tokenizer(config)
        self.io = InputOutputProcessor(
            tokenizer,
            vocab_size=inspection.model_config.vocab_size,
            max_model_len=inspection.max_model_len,
            eos_token_ids=_eos_token_ids(model, tokenizer),
            stateful=inspection.is_stateful,
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
            prefix_cacheable=self.inspection.all_figures.prefix_cacheable,
        )
        limits = self._limits()
        self.scheduler = Scheduler(limits, BlockManager(self.cache_config))
        self.runner = bound.make_runner(self.plan.of_role(draft=False), limits, self.scheduler.rows)
        if config.speculation == MTP:
            self.runner.keep_hidden()
        bound.capture_all(self.runner, limits)
        self.speculator = self._make_speculator(role or self._bind_drafting(model, drafting), limits)
        overlaps = inspection.device.type == "cuda" and not config.eager and self.speculator is None
        self._pipeline = StepPipeline(self.runner, self.scheduler, overlaps=overlaps)
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
        self.scheduler.add(request.seqs[0])
        for index, seq in enumerate(request.seqs):
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
        batch, launched = self._pipeline.next()
        if not batch.seqs:
            return []
        scheduled = time.perf_counter()
        if self.speculator is not None:
            self.speculator.draft(batch)
        result = self._pipeline.run(batch, launched)
        if self.speculator is not None:
            self.speculator.follow(batch, result)
        ran = time.perf_counter()
        seqs = [*batch.seqs, *(fork for row in result.forked for fork in batch.seqs[row].forks)]
        known = [seq.num_tokens for seq in seqs]
        finished = self._take(batch, result, seqs, known)
        self.stats.count_step(
            batch,
            result,
            self.scheduler,
            num_generated=sum(seq.num_tokens for seq in seqs) - sum(known),
            seconds=(scheduled - started, ran - scheduled, time.perf_counter() - ran),
        )
        self.runner.step_finished(self.stats.last_step)
        return finished

    def snapshot(self) -> dict[str, Any]:
        """Return the engine's figures: requests, tokens, times, cache occupancy and hits."""
        return self.stats.snapshot(self.scheduler)

    def _load_drafting(self, model: nn.Module, progress: Callable[[str], None] | None) -> nn.Module | None:
        """Load what the second role runs, if there is one, before the model is changed in place."""
        draft = self.inspection.draft
        if draft is None:
            return None
        if self.config.speculation == MTP:
            layers: nn.Module = load_mtp(model, self.inspection.model_config, self.config.random_weights)
            return layers
        return load_model(draft.config, draft.model_config, draft.dtype, draft.device, progress)

    def _bind_drafting(self, model: nn.Module, drafting: nn.Module | None) -> BoundModel | None:
        """Claim the layers of the second role, once the model has its final form: its first runner is made."""
        draft = self.inspection.draft
        if draft is None or drafting is None:
            return None
        role = MtpRole(drafting, model) if self.config.speculation == MTP else drafting
        return BoundModel(role, draft.config, self.registry, draft)

    def _make_speculator(self, role: BoundModel | None, limits: SchedulerLimits) -> Speculator | None:
        config, draft = self.config, self.inspection.draft
        if config.speculation is None:
            return None
        if config.speculation == NGRAM:
            return NgramDrafter(config.num_spec_tokens, self.scheduler.rows)
        if draft is None or role is None:
            return make_proposer_speculator(self.inspection)
        rows = self.scheduler.rows
        runner = role.make_runner(self.plan.of_role(draft=True), limits, rows)
        if isinstance(role.model, MtpRole):
            return MtpDrafter(
                runner,
                role.model,
                self.runner,
                rows,
                num_spec_tokens=config.num_spec_tokens,
                sampler=Sampler(draft.model_config.vocab_size, draft.device),
            )
        role.capture_all(runner, limits)
        return DraftModel(runner, rows, config.num_spec_tokens)

    def _measure(
        self, bound: BoundModel, model: nn.Module, drafting: nn.Module | None, free_bytes: int
    ) -> BoundModel | None:
        """Plan again with the memory that all roles really leave, where a GPU's memory is the limit.

        Args:
            bound: the model's layers claimed.
            model: the model.
            drafting: what the second role runs.
            free_bytes: free before anything was loaded.

        Returns:
            The second role with its layers claimed, if it was measured.
        """
        inspection, limits = self.inspection, self._limits()
        if inspection.device.type != "cuda" or self.config.cache_memory is not None:
            return None
        use = measure_memory(bound, self.plan.of_role(draft=False), limits, free_bytes)
        role = self._bind_drafting(model, drafting)
        if role is not None:
            captured = self.config.speculation != MTP
            draft_plan = self.plan.of_role(draft=True)
            use = use.with_draft(measure_memory(role, draft_plan, limits, free_bytes, captured=captured))
        workspace_bytes = inspection.all_figures.workspace_bytes
        self.plan = inspection.plan(use.cache_bytes(self.config, inspection.device, free_bytes, workspace_bytes))
        return role

    def _limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            max_num_seqs=min(self.config.max_num_seqs, self.plan.num_groups)
            if self.inspection.has_state
            else self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.inspection.max_model_len,
            prefill_chunk_tokens=self.config.prefill_chunk_tokens,
            policy=self.config.scheduling_policy,
        )

    def _num_groups(self) -> int:
        """Groups of the plan; of a registered model type without state, one that costs nothing for each request."""
        if self.inspection.has_state:
            return self.plan.num_groups
        return self.config.max_num_seqs if self.inspection.is_stateful else 0

    def _num_checkpoints(self) -> int:
        """Checkpoints of the plan; where there is no state, one for each block costs nothing."""
        return self.plan.num_checkpoints if self.inspection.has_state else self.plan.num_blocks

    def _take(
        self, batch: ScheduledBatch, result: StepOutput, seqs: TokenIds[Sequence], known: TokenIds[int]
    ) -> list[RequestOutput]:
        """Give a step's tokens to scheduler, text and requests.

        Args:
            batch: the step.
            result: its tokens.
            seqs: the sequences of its rows, and those that part from them.
            known: how many tokens each of them had before.
        """
        _take_logprobs(batch, result)
        self.scheduler.postprocess(batch, result.token_ids, result.forked)
        for role in (self.runner, self.speculator):
            if role is not None:
                role.save_states(batch.saves)
                role.copy_forks(batch.forks)
        self.scheduler.states_saved(batch)
        for seq in seqs:
            if seq.output_logprobs:
                del seq.output_logprobs[seq.num_output_tokens :]
        now = time.monotonic()
        ended: dict[str, Request] = {}
        for seq, before in zip(seqs, known, strict=True):
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
        stop = self.io.take_tokens(request, index, before)
        if stop is not None and (seq.finish_reason != "stop" or stop.num_tokens < seq.num_output_tokens):
            seq.truncate(seq.num_prompt_tokens + stop.num_tokens)
            self.scheduler.stop(seq, stop.text)

    def _forget(self, request: Request) -> None:
        del self._requests[request.id]
        for seq in request.seqs:
            self._owners.pop(seq.id, None)
            if self.speculator is not None:
                self.speculator.release(seq)


def _take_logprobs(batch: ScheduledBatch, result: StepOutput) -> None:
    """Give a step's logprobs to the sequences that asked, before they know its tokens."""
    for seq, prompt_logprobs in zip(batch.seqs, result.prompt_logprobs, strict=True):
        if prompt_logprobs:
            del seq.prompt_logprobs[seq.num_computed_tokens :]
            seq.prompt_logprobs.extend(prompt_logprobs)
    for row, seq in enumerate(batch.seqs):
        if seq.params.logprobs is not None:
            seq.output_logprobs.extend(result.logprobs[row])
            for fork, logprobs in zip(seq.forks, result.forked_logprobs.get(row, ()), strict=False):
                fork.output_logprobs.append(logprobs)


def _eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """End-of-sequence tokens of the model's generation config and of its tokenizer."""
    generation_config: Any = model.generation_config
    found = generation_config.eos_token_id
    token_ids: set[int] = set() if found is None else {found} if isinstance(found, int) else set(found)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        token_ids.add(tokenizer.eos_token_id)
    return frozenset(token_ids)
