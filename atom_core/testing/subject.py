"""Subject: one tiny model of a plugin, with everything that properties need of it, made once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from atom_core.config import EngineConfig
from atom_core.engine.llm_engine import LLMEngine
from atom_core.engine.sampling import SamplingParams
from atom_core.engine.startup import Inspection, inspect_model
from atom_core.plugin.registry import PluginRegistry
from atom_core.testing.driver import StepDriver, least_block_size
from atom_core.testing.models import stock_logits
from atom_core.testing.poison import Poisoner
from atom_core.testing.report import Trace
from atom_core.testing.strategies import Arrival, text

if TYPE_CHECKING:
    from torch import nn

    from atom_core.engine.outputs import RequestOutput
    from atom_core.testing.profile import Profile

__all__ = ["Subject", "serve"]

_CACHE_BYTES = 512 * 1024**2


@dataclass
class Subject:
    """One model under test.

    Attributes:
        name: of its config.
        plugin: the name of the plugin under test.
        plugins: this plugin and those that the model needs, by name.
        model: with random weights, on the CPU.
        make_oracle: makes what gives the right logits.
        wrap: takes every part of the core that the kit makes; a test of the kit changes it there.
        tolerance: largest error of logits.
        max_tokens: longest text that properties try.
        profile: how much they try.
    """

    name: str
    plugin: str
    plugins: Mapping[str, object]
    model: Any
    make_oracle: Callable[[Any], nn.Module]
    wrap: Callable[[Any], None]
    tolerance: float
    max_tokens: int
    profile: Profile

    @cached_property
    def registry(self) -> PluginRegistry:
        """The plugins alone."""
        return PluginRegistry.of(self.plugins)

    @cached_property
    def poisoned_registry(self) -> PluginRegistry:
        """The plugins, and one that fills new caches with NaN."""
        return PluginRegistry.of({**self.plugins, "poisoner": Poisoner()})

    @cached_property
    def oracle(self) -> nn.Module:
        """What gives the right logits."""
        return self.make_oracle(self.model)

    @cached_property
    def block_size(self) -> int:
        """The least block size from 4 on that the plugins accept."""
        return least_block_size(self.model, self.registry)

    @cached_property
    def inspection(self) -> Inspection:
        """What the core learns before it loads weights."""
        return self.inspect()

    @property
    def vocab_size(self) -> int:
        """Tokens are below it."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    @property
    def owns_state(self) -> bool:
        """Whether requests of this model have state."""
        return self.inspection.has_state

    def inspect(self, **options: Any) -> Inspection:
        """What the core learns with these options before it loads weights."""
        fields = {"skip_tokenizer": True, "device": "cpu", "block_size": self.block_size, **options}
        return inspect_model(EngineConfig(model=self.model, **fields), self.registry)

    def text(self, length: int, seed: int = 0) -> list[int]:
        """Random tokens."""
        return text(length, seed, self.vocab_size)

    def driver(self, block_size: int | None = None, num_spec_tokens: int = 0) -> StepDriver:
        """A driver without requests; one is kept for each pair of arguments."""
        key = block_size or self.block_size, num_spec_tokens
        if key not in self._drivers:
            self._drivers[key] = StepDriver(
                self.model, self.registry, block_size=key[0], num_spec_tokens=num_spec_tokens
            )
        driver = self._drivers[key]
        driver.reset()
        return driver

    @cached_property
    def _drivers(self) -> dict[tuple[int, int], StepDriver]:
        return {}

    def engine(self, **options: Any) -> LLMEngine:
        """An engine on a copy of the model, whose caches are full of NaN at first."""
        fields = {
            "skip_tokenizer": True,
            "device": "cpu",
            "block_size": self.block_size,
            "cache_memory": _CACHE_BYTES,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "max_model_len": self.max_tokens + 2 * self.block_size,
            "enable_prefix_caching": False,
            **options,
        }
        engine = LLMEngine(EngineConfig(model=copy.deepcopy(self.model), **fields), self.poisoned_registry)
        self.wrap(engine)
        return engine

    def expected(self, tokens: list[int]) -> Tensor:
        """The oracle's logits of a text, [num_tokens, vocab_size]."""
        return stock_logits(self.oracle, tokens)

    def generated(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Trace]:
        """What the plugin generates for a prompt alone in fresh caches; remembered."""
        key = tuple(prompt)
        known = self._generated.get(key)
        if known is None or len(known[0]) < num_tokens:
            known = self._generated[key] = self.driver().generate(list(prompt), num_tokens)
        tokens, trace = known
        return tokens[:num_tokens], trace.between(0, len(prompt) + num_tokens - 1)

    @cached_property
    def _generated(self) -> dict[tuple[int, ...], tuple[list[int], Trace]]:
        return {}

    def prompt(self, arrival: Arrival, number: int) -> list[int]:
        """The prompt of a request of a schedule."""
        shared = self.text(arrival.shared, 1000)
        return [*shared, *self.text(arrival.own, 2000 + number)]


def serve(engine: LLMEngine, prompts: Sequence[list[int]], schedule: Sequence[Arrival]) -> list[RequestOutput]:
    """Run a schedule of requests to its end.

    Returns:
        Per request, what it generated; a cancelled one, what it had until then.
    """
    outputs: dict[str, RequestOutput] = {}
    waiting = sorted(range(len(schedule)), key=lambda number: schedule[number].step)
    deadlines: dict[str, int] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and schedule[waiting[0]].step <= step:
            number = waiting.pop(0)
            arrival = schedule[number]
            params = SamplingParams(max_tokens=arrival.num_tokens, temperature=0, logprobs=0, ignore_eos=True)
            request_id = engine.add_request(prompts[number], params, request_id=str(number))
            if arrival.cancelled_after is not None:
                deadlines[request_id] = step + arrival.cancelled_after
        for request_id in [name for name, deadline in deadlines.items() if deadline <= step]:
            del deadlines[request_id]
            if request_id not in outputs:
                outputs[request_id] = engine.abort(request_id)
        for output in engine.step():
            outputs[output.request_id] = output
        step += 1
    return [outputs[str(number)] for number in range(len(schedule))]
