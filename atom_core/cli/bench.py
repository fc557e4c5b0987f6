"""`atom bench`: throughput of a batch, and latency of one request."""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atom_core.cli.options import (
    CacheDtype,
    CacheMemory,
    Device,
    DraftModel,
    Dtype,
    Eager,
    Json,
    KernelChoices,
    Memory,
    MemoryFraction,
    Model,
    NoPlugins,
    NumSpecTokens,
    RandomWeights,
    Speculation,
    engine_config,
    print_json,
)

if TYPE_CHECKING:
    from atom_core.engine.llm import LLM

__all__ = ["bench_app"]

bench_app = typer.Typer(help="Measure throughput or latency.", no_args_is_help=True)

InputTokens = Annotated[int, typer.Option(help="Tokens of a prompt.")]
OutputTokens = Annotated[int, typer.Option(help="Tokens to generate for each.")]
Seed = Annotated[int, typer.Option(help="Seed of the random prompts.")]


@bench_app.command()
def throughput(
    model: Model,
    num_prompts: Annotated[int, typer.Option(help="Prompts, all given at once.")] = 16,
    input_tokens: InputTokens = 128,
    output_tokens: OutputTokens = 128,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    cache_dtype: CacheDtype = "auto",
    device: Device = "auto",
    memory: Memory = None,
    cache_memory: CacheMemory = None,
    memory_fraction: MemoryFraction = None,
    eager: Eager = False,
    random_weights: RandomWeights = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    num_spec_tokens: NumSpecTokens = 0,
    no_plugin: NoPlugins = None,
    kernel: KernelChoices = None,
    as_json: Json = False,
) -> None:
    """Generate from random prompts, all at once; print tokens per second."""
    spec = (speculation, draft_model, num_spec_tokens)
    room = (memory, cache_memory, memory_fraction)
    llm = _load(model, dtype, cache_dtype, device, *room, eager, random_weights, *spec, no_plugin, kernel)
    prompts = _random_prompts(llm, num_prompts, input_tokens, seed)
    _generate(llm, prompts[:1], 4)
    begun = time.perf_counter()
    _generate(llm, prompts, output_tokens)
    seconds = time.perf_counter() - begun
    _report(
        {
            "prompts": num_prompts,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "seconds": seconds,
            "output_tokens_per_second": num_prompts * output_tokens / seconds,
            "total_tokens_per_second": num_prompts * (input_tokens + output_tokens) / seconds,
            "stats": llm.stats(),
        },
        as_json,
    )


@bench_app.command()
def latency(
    model: Model,
    repeats: Annotated[int, typer.Option(help="Requests, one after another.")] = 5,
    input_tokens: InputTokens = 128,
    output_tokens: OutputTokens = 128,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    cache_dtype: CacheDtype = "auto",
    device: Device = "auto",
    memory: Memory = None,
    cache_memory: CacheMemory = None,
    memory_fraction: MemoryFraction = None,
    eager: Eager = False,
    random_weights: RandomWeights = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    num_spec_tokens: NumSpecTokens = 0,
    no_plugin: NoPlugins = None,
    kernel: KernelChoices = None,
    as_json: Json = False,
) -> None:
    """Generate from one random prompt at a time; print time to first token and between tokens, medians."""
    from atom_core.engine.sampling import SamplingParams

    spec = (speculation, draft_model, num_spec_tokens)
    room = (memory, cache_memory, memory_fraction)
    llm = _load(model, dtype, cache_dtype, device, *room, eager, random_weights, *spec, no_plugin, kernel)
    prompts = _random_prompts(llm, repeats + 1, input_tokens, seed)
    _generate(llm, prompts[:1], 4)
    params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    firsts, betweens = [], []
    for prompt in prompts[1:]:
        begun = time.perf_counter()
        times = [time.perf_counter() for _ in llm.stream(prompt, params)]
        firsts.append(times[0] - begun)
        if len(times) > 1:
            betweens.append((times[-1] - times[0]) / (len(times) - 1))
    between = statistics.median(betweens) if betweens else 0.0
    _report(
        {
            "repeats": repeats,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "seconds_to_first_token": statistics.median(firsts),
            "seconds_between_tokens": between,
            "output_tokens_per_second": 1 / between if between else 0.0,
            "stats": llm.stats(),
        },
        as_json,
    )


def _load(
    model: str,
    dtype: str,
    cache_dtype: str,
    device: str,
    memory: str | None,
    cache_memory: str | None,
    memory_fraction: float | None,
    eager: bool,
    random_weights: int | None,
    speculation: str | None,
    draft_model: str | None,
    num_spec_tokens: int,
    no_plugin: list[str] | None,
    kernel: list[str] | None,
) -> LLM:
    from atom_core.engine.llm import LLM

    config = engine_config(
        model=model,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
        memory=memory,
        cache_memory=cache_memory,
        memory_fraction=memory_fraction,
        eager=eager,
        random_weights=random_weights,
        speculation=speculation,
        draft_model=draft_model,
        num_spec_tokens=num_spec_tokens,
        no_plugins=no_plugin,
        kernels=kernel,
        skip_tokenizer=True,
    )
    return LLM.from_config(config)


def _random_prompts(llm: LLM, count: int, num_tokens: int, seed: int) -> list[list[int]]:
    vocab_size = llm.engine.inspection.model_config.vocab_size
    numbers = random.Random(seed)
    return [[numbers.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def _generate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> None:
    from atom_core.engine.sampling import SamplingParams

    llm.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))


def _report(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(figures)
        return
    for name, value in figures.items():
        if name != "stats":
            typer.echo(f"{name.replace('_', ' ')}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    for name, value in figures["stats"]["cache"].items():
        typer.echo(f"cache {name.replace('_', ' ')}: {value}")
