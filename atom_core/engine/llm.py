"""LLM: the offline interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atom_core.config import EngineConfig
from atom_core.engine.llm_engine import LLMEngine
from atom_core.engine.outputs import RequestMetrics, RequestOutput
from atom_core.engine.sampling import SamplingParams
from atom_core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from atom_core.plugin.registry import PluginRegistry

__all__ = ["LLM", "Prompt"]

Prompt = str | Sequence[int]


class LLM:
    """A model, ready to generate.

    Args:
        model: what `EngineConfig.model` takes.
        registry: the plugins; discovered when `None`.
        progress: told what happens during the startup.
        config: further fields of `EngineConfig`.

    Raises:
        AtomError: the model cannot be served; the message says why and what to do.
    """

    def __init__(
        self,
        model: Any,
        *,
        registry: PluginRegistry | None = None,
        progress: Callable[[str], None] | None = None,
        **config: Any,
    ) -> None:
        unknown = sorted(config.keys() - EngineConfig.__dataclass_fields__.keys())
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ConfigError(f"there is no option {', '.join(unknown)}; options: {known}")
        self.engine = LLMEngine(EngineConfig(model=model, **config), registry, progress)

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Callable[[str], None] | None = None) -> LLM:
        """Make an LLM from a config that is already there."""
        llm = cls.__new__(cls)
        llm.engine = LLMEngine(config, None, progress)
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt.

        A request that cannot be served yields a result with `error` set; the others are not affected.

        Args:
            prompts: one prompt or many; a prompt is text or a list of token ids.
            params: one for all, or one each; defaults when `None`.
            cache_salt: only requests with the same salt share cached prefixes.
            on_progress: told `(finished, all)` after each step.

        Returns:
            One result per prompt, in order.

        Raises:
            RequestError: the numbers of prompts and params differ.
        """
        prompt_list = _prompt_list(prompts)
        params_list = _params_list(params, len(prompt_list))
        results: dict[str, RequestOutput] = {}
        ids = []
        for prompt, one in zip(prompt_list, params_list, strict=True):
            try:
                ids.append(self.engine.add_request(prompt, one, cache_salt=cache_salt))
            except RequestError as error:
                failed = _failed(f"rejected-{len(ids)}", prompt, error)
                results[failed.request_id] = failed
                ids.append(failed.request_id)
        try:
            while len(results) < len(ids):
                for output in self.engine.step():
                    results[output.request_id] = output
                if on_progress is not None:
                    on_progress(len(results), len(ids))
        except BaseException:
            self._abandon(ids, results)
            raise
        return [results[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt, yielding the result so far after each step that changed it.

        Leaving the iteration early cancels the request.

        Raises:
            RequestError: the request cannot be served.
        """
        request_id = self.engine.add_request(prompt, params or SamplingParams(), cache_salt=cache_salt)
        num_tokens = 0
        finished = False
        try:
            while not finished:
                done = [output for output in self.engine.step() if output.request_id == request_id]
                finished = bool(done)
                output = done[0] if done else self.engine.output(request_id)
                found = sum(len(completion.token_ids) for completion in output.outputs)
                if finished or found > num_tokens:
                    num_tokens = found
                    yield output
        finally:
            if not finished:
                self.engine.abort(request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or many.

        Args:
            messages: a conversation is a list of `{"role": ..., "content": ...}`.
            params: one for all, or one each.
            options: further arguments of `generate`.

        Raises:
            RequestError: there is no chat template.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if many else [messages]
        return self.generate([self.chat_prompt(conversation) for conversation in conversations], params, **options)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Apply the tokenizer's chat template.

        Returns:
            The prompt's tokens, up to where the model answers.

        Raises:
            RequestError: there is no tokenizer or no chat template.
        """
        tokenizer = self.engine.io.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise RequestError("this model has no chat template; write the prompt yourself and call generate")
        tokens = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return [int(token) for token in tokens]

    def stats(self) -> dict[str, Any]:
        """Return the engine's figures since it started."""
        return self.engine.snapshot()

    def _abandon(self, ids: Sequence[str], results: Mapping[str, RequestOutput]) -> None:
        for request_id in ids:
            if request_id not in results:
                self.engine.abort(request_id)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(f"there are {num_prompts} prompts but {len(params)} sampling params; give one, or one each")
    return params


def _failed(request_id: str, prompt: Prompt, error: RequestError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[] if isinstance(prompt, str) else list(prompt),
        prompt_logprobs=None,
        outputs=[],
        finished=True,
        error=str(error),
        metrics=RequestMetrics(arrival_time=time.monotonic()),
    )
