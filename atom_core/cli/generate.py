"""`atom generate`: prompts in, text out."""

from __future__ import annotations

import sys
import time
from pathlib import Path
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
    MaxModelLen,
    MaxNumSeqs,
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
from atom_core.engine.sampling import SamplingParams
from atom_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from atom_core.engine.llm import LLM, Prompt
    from atom_core.engine.outputs import RequestOutput

__all__ = ["generate"]


def generate(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeatable.")] = None,
    chat: Annotated[str | None, typer.Option(help="One user message, put into the model's chat template.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with one prompt per line.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of output.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the output; repeatable.")] = None,
    dtype: Dtype = "auto",
    cache_dtype: CacheDtype = "auto",
    device: Device = "auto",
    memory: Memory = None,
    cache_memory: CacheMemory = None,
    memory_fraction: MemoryFraction = None,
    eager: Eager = False,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    random_weights: RandomWeights = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    num_spec_tokens: NumSpecTokens = 0,
    no_plugin: NoPlugins = None,
    kernel: KernelChoices = None,
    show_plan: Annotated[bool, typer.Option("--show-plan", help="Show the memory plan at the end.")] = False,
    as_json: Json = False,
) -> None:
    """Generate from MODEL; a single prompt streams, several show a progress bar."""
    started = time.perf_counter()
    prompts = _prompts(prompt, prompt_file)
    if bool(prompts) == bool(chat):
        raise ConfigError("give either prompts (--prompt, --prompt-file) or one message (--chat)")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=tuple(stop or ())
    )
    config = engine_config(
        model=model,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
        memory=memory,
        cache_memory=cache_memory,
        memory_fraction=memory_fraction,
        eager=eager,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        random_weights=random_weights,
        speculation=speculation,
        draft_model=draft_model,
        num_spec_tokens=num_spec_tokens,
        no_plugins=no_plugin,
        kernels=kernel,
        seed=seed,
    )
    from rich.console import Console

    console = Console(stderr=True)
    llm = _load(config, console)
    requests: list[Prompt] = [llm.chat_prompt([{"role": "user", "content": chat}])] if chat else list(prompts)
    if as_json:
        print_json([_as_dict(output) for output in llm.generate(requests, params)])
        return
    if len(requests) == 1:
        _stream(llm, requests[0], params, console, started)
    else:
        _batch(llm, requests, params, console)
    if show_plan:
        from atom_core.cli.plan import plan_table

        Console().print(plan_table(llm.engine.inspection, llm.engine.plan))


def _prompts(prompt: list[str] | None, prompt_file: Path | None) -> list[str]:
    prompts = list(prompt or ())
    if prompt_file is not None:
        if not prompt_file.is_file():
            raise ConfigError(f"--prompt-file: there is no file {prompt_file}")
        prompts += [line for line in prompt_file.read_text().splitlines() if line.strip()]
    return prompts


def _load(config: Any, console: Console) -> LLM:
    from atom_core.engine.llm import LLM

    with console.status("starting") as status:
        return LLM.from_config(config, progress=status.update)


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams, console: Console, started: float) -> None:
    begun = time.perf_counter()
    first = None
    shown = 0
    output: RequestOutput | None = None
    for output in llm.stream(prompt, params):
        first = first or time.perf_counter()
        completion = output.outputs[0]
        text = completion.text if llm.engine.io.tokenizer is not None else " ".join(map(str, completion.token_ids))
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    sys.stdout.write("\n")
    if output is None or first is None:
        return
    num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    decode_seconds = time.perf_counter() - first
    rate = (num_output - 1) / decode_seconds if num_output > 1 else 0.0
    console.print(
        f"first token {first - started:.1f} s after the start; prompt {num_prompt} tokens at "
        f"{num_prompt / (first - begun):.0f} tokens/s; generation {num_output} tokens at {rate:.1f} tokens/s"
    )


def _batch(llm: LLM, prompts: list[Prompt], params: SamplingParams, console: Console) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    begun = time.perf_counter()
    with Progress("generating", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("generate", total=len(prompts))
        outputs = llm.generate(prompts, params, on_progress=lambda done, _: progress.update(task, completed=done))
    seconds = time.perf_counter() - begun
    for index, output in enumerate(outputs):
        typer.echo(f"[{index}] {output.error if output.error is not None else output.outputs[0].text}")
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    console.print(f"{num_output} tokens in {seconds:.1f} s, {num_output / seconds:.1f} tokens/s")


def _as_dict(output: RequestOutput) -> dict[str, Any]:
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "error": output.error,
        "outputs": [
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
            for completion in output.outputs
        ],
    }
