"""Milliseconds a step of transformers' own ways of generating, at the shapes and the context of `gpu_step.py`.

    python benchmarks/gpu_generate.py qwen3-8b qwen3-0.6b --ways plain static continuous --batches 1 64

plain: `generate` with sdpa and a cache that grows. static: `generate` with a static cache, for which transformers
compiles the model and replays it as a CUDA graph. continuous: `generate_batch` with its paged cache; attention is
flash_attn's where that is installed, sdpa otherwise, as printed. Random weights, greedy, bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from gpu_step import CONTEXT, configs


def make_model(config: Any, device: str) -> Any:
    """The model with random weights made on the device."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def random_prompts(model: Any, batch: int) -> torch.Tensor:
    """[batch, CONTEXT] random tokens."""
    return torch.randint(0, model.config.vocab_size, (batch, CONTEXT), device=model.device)


class Marks:
    """A logits processor that changes nothing and leaves a mark on the device in every step."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mark the end of a forward pass."""
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()
        return scores

    def median_ms(self) -> float:
        """Milliseconds between two marks; the first few, which warm up, are left out."""
        torch.cuda.synchronize()
        return statistics.median(first.elapsed_time(last) for first, last in pairwise(self._events[4:]))


def generate_ms(model: Any, batch: int, steps: int, **options: Any) -> float:
    """Median milliseconds between two forward passes of `generate`."""
    ids, marks = random_prompts(model, batch), Marks()
    model.generate(
        ids, max_new_tokens=5 + steps, min_new_tokens=5 + steps, do_sample=False, attention_mask=torch.ones_like(ids),
        pad_token_id=0, logits_processor=[marks], **options,
    )  # fmt: skip
    return marks.median_ms()


def static_ms(model: Any, batch: int, steps: int) -> float:
    """Median milliseconds between two forward passes of `generate` with a static cache, compiled.

    Raises:
        RuntimeError: transformers did not compile.
    """
    from transformers import StaticCache
    from transformers.generation import GenerationConfig

    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 5 + steps)
    if not model._valid_auto_compile_criteria({"past_key_values": cache}, GenerationConfig()):
        raise RuntimeError("transformers does not compile this model's generate")
    generate_ms(model, batch, steps, past_key_values=cache)  # compiles, captures and warms up
    cache.reset()
    return generate_ms(model, batch, steps, past_key_values=cache)


def continuous_ms(model: Any, batch: int, steps: int) -> float:
    """Median milliseconds between two tokens of `generate_batch` while all requests decode.

    Raises:
        RuntimeError: requests failed, or there was no time when all of them decoded.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    per_step = 8  # prompts that are prefilled at a time; the first ones decode meanwhile
    num_tokens = steps + batch // per_step + 8
    outputs = model.generate_batch(
        random_prompts(model, batch).tolist(),
        generation_config=GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            allow_block_sharing=False, max_memory_percent=0.6, max_batch_tokens=per_step * CONTEXT
        ),
        record_timestamps=True,
    )
    times = [output.timestamps for output in outputs.values()]
    if len(times) != batch or any(len(one) != num_tokens for one in times):
        raise RuntimeError(f"{len(times)} of {batch} requests, tokens {[len(one) for one in times][:4]}")
    all_decode, first_ends = max(one[0] for one in times), min(one[-1] for one in times)
    together = [moment for moment in times[0] if all_decode <= moment <= first_ends]
    if len(together) < 8:
        raise RuntimeError(f"all requests decode in {len(together)} steps only")
    return statistics.median(last - first for first, last in pairwise(together)) * 1e3


WAYS: dict[str, Callable[[Any, int, int], float]] = {
    "plain": generate_ms,
    "static": static_ms,
    "continuous": continuous_ms,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every model, way and batch asked for; what cannot run is a line that says why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args(arguments)
    import transformers

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for name in options.models:
        model = make_model(configs()[name], "cuda")
        for way in options.ways:
            for batch in options.batches:
                began = time.perf_counter()
                try:
                    found = f"{WAYS[way](model, batch, options.steps):.2f} ms a step"
                except Exception as problem:
                    found = f"cannot run: {type(problem).__name__} {str(problem)[:200]}"
                spent = time.perf_counter() - began
                attention = model.config._attn_implementation
                print(f"{name}, {way}, batch {batch}, {attention}: {found} (took {spent:.0f} s)", flush=True)
                gc.collect()
                torch.cuda.empty_cache()
        del model


if __name__ == "__main__":
    main()
