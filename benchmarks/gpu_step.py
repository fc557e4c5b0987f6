"""A whole decode step on a GPU, random weights, against the floor of reading weights and caches.

Runs where the checkout is not installed, if PYTHONPATH names it, its plugins and their metadata:

    python benchmarks/gpu_step.py qwen3-8b qwen3-0.6b --batches 1 64 --modes graph eager
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from itertools import pairwise
from typing import Any

import torch

CONTEXT = 1024
_NO_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


def configs() -> dict[str, Any]:
    """Shapes of the models, by name."""
    from transformers import AutoConfig

    small = {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "tie_word_embeddings": True, **_NO_TOKENS,
    }  # fmt: skip
    large = {
        **small, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    }  # fmt: skip
    hybrid = {
        "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "max_position_embeddings": 40960,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4, **_NO_TOKENS,
    }  # fmt: skip
    latent = {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1, "vocab_size": 102400,
        "max_position_embeddings": 40960, "topk_method": "greedy", **_NO_TOKENS,
    }  # fmt: skip
    return {
        "qwen3-0.6b": AutoConfig.for_model("qwen3", **small),
        "qwen3-8b": AutoConfig.for_model("qwen3", **large),
        "qwen3-next-like": AutoConfig.for_model("qwen3_next", **hybrid),
        "deepseek-v2-lite-like": AutoConfig.for_model("deepseek_v2", **latent),
    }


def make_llm(config: Any, **options: Any) -> Any:
    """An engine of this shape with random weights made on the device."""
    from atom_core import LLM

    chosen = {"dtype": "bfloat16", "device": "cuda", "max_model_len": 4096, "max_num_batched_tokens": 8192, **options}
    return LLM(config, random_weights=0, skip_tokenizer=True, enable_prefix_caching=False, **chosen)


def start(llm: Any, batch: int, num_tokens: int, seed: int) -> None:
    """Add requests of `CONTEXT` random tokens and run until all of them decode."""
    from atom_core import SamplingParams

    engine = llm.engine
    generator = torch.Generator().manual_seed(seed)
    vocab_size = engine.inspection.model_config.vocab_size
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    for prompt in torch.randint(0, vocab_size, (batch, CONTEXT), generator=generator).tolist():
        engine.add_request(prompt, params)
    while engine.scheduler.waiting or any(seq.is_prefilling for seq in engine.scheduler.running):
        engine.step()


def step_times(llm: Any, batch: int, steps: int, replays: int = 0) -> dict[str, float]:
    """Medians in milliseconds: the whole step, its parts by the engine's own figures, and its graph alone.

    The graph is replayed while all requests are there, so that it reads what it reads in a step.

    Raises:
        RuntimeError: the caches did not hold all requests at once.
    """
    engine = llm.engine
    start(llm, batch, steps + 16, seed=batch)
    for _ in range(6):
        engine.step()
    whole, parts = [], []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - started)
        parts.append([engine.stats.last_step[f"{part}_seconds"] for part in ("schedule", "run", "finish")])
    replay = replay_ms(llm, batch, replays) if replays else None
    while engine.has_work:
        engine.step()
    if llm.stats()["num_preemptions"]:
        raise RuntimeError(f"the caches do not hold {batch} requests; give more --cache-memory")
    names = ("schedule", "run", "finish")
    medians = {
        name: statistics.median(column) * 1e3 for name, column in zip(names, zip(*parts, strict=True), strict=True)
    }
    found = {"whole": statistics.median(whole) * 1e3, **medians}
    return found if replay is None else {**found, "replay": replay}


def floor_ms(llm: Any, batch: int, bandwidth: float) -> float:
    """Milliseconds to read the weights of a step and the caches of `batch` requests once.

    Of a mixture of experts, the weights of the experts that `batch` tokens hit on average if every one is as likely.
    """
    from atom_core.models.experts import is_experts

    model, engine = llm.engine.runner._model, llm.engine
    storages: dict[int, float] = {}
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight.data_ptr() != embedding.data_ptr():
        storages.pop(embedding.untyped_storage().data_ptr(), None)
    top_k = getattr(engine.inspection.model_config, "num_experts_per_tok", 0)
    for experts in filter(is_experts, model.modules()):
        hit = 1 - (1 - top_k / experts.num_experts) ** batch
        for parameter in experts.parameters():
            storages[parameter.untyped_storage().data_ptr()] *= hit
    figures = engine.inspection.figures
    blocks = -(-CONTEXT // engine.plan.block_size)
    cache = sum(figures.block_bytes.values()) * blocks + 2 * sum(figures.slot_bytes.values())
    return (sum(storages.values()) + batch * cache) / bandwidth * 1e3


def read_bandwidth() -> float:
    """Bytes a second that a large copy moves, read and written, measured now."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times)


def replay_ms(llm: Any, batch: int, steps: int) -> float | None:
    """Median milliseconds of replaying the graph of this batch alone, one after another; `None` without graphs."""
    graphs = llm.engine.runner._graphs
    if graphs is None or not graphs._captured:
        return None
    shape = next(shape for shape in reversed(graphs.shapes) if shape.num_seqs >= batch and shape.tokens_per_seq == 1)
    graph = graphs._captured[shape].graph
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in pairwise(marks))


def profile_steps(llm: Any, batch: int, steps: int) -> list[str]:
    """Where the device's time between the first and the last of some decode steps goes; one line each.

    A step begins with the upload of its arrays. Kernels of one graph follow each other within 2 us, so that every
    longer time in which the device does nothing, not even a copy, is counted as idle between steps.
    """
    from torch.profiler import ProfilerActivity, profile

    engine = llm.engine
    start(llm, batch, steps + 16, seed=batch + 1)
    for _ in range(6):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_work:
        engine.step()
    events = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    gaps, end, idle, begins = [], events[0].time_range.start, [], []
    for event in events:
        gap = max(0.0, event.time_range.start - end)
        gaps.append(gap)
        if "Memcpy HtoD" in event.name:
            begins.append(event.time_range.start)
            idle.append(0.0)
        if gap >= 2 and idle:
            idle[-1] += gap
        end = max(end, event.time_range.end)
    span = end - events[0].time_range.start
    length = statistics.median(last - first for first, last in pairwise(begins))
    sizes = ((0, 2), (2, 5), (5, 20), (20, 1e9))
    by_size = ", ".join(
        f"{sum(low <= gap < high for gap in gaps) / steps:.0f} of {low:g} to {high:g} us: "
        f"{sum(gap for gap in gaps if low <= gap < high) / steps:.0f} us"
        for low, high in sizes
    )
    totals: dict[str, list[float]] = {}
    for event in events:
        totals.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = sorted(totals.items(), key=lambda item: -sum(item[1]))[:18]
    return [
        f"idle between steps: median {statistics.median(idle):.0f} us, {statistics.median(idle) / length:.1%} of the "
        f"median step of {length / 1e3:.2f} ms while profiled; mean {sum(idle) / span:.1%}; {len(begins)} steps",
        f"gaps of a step: {by_size}",
        *(f"{sum(us) / steps:9.1f} us {len(us) / steps:7.1f} x  {name[:90]}" for name, us in rows),
    ]


def main() -> None:
    """Measure every model, mode and batch asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--modes", nargs="+", default=["compiled"], choices=["compiled", "graph", "eager"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--cache-memory", default="16GiB")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batches to profile")
    options = parser.parse_args()
    import logging

    from bars import Bars

    logging.basicConfig(level=logging.INFO, format="   %(message)s")
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    bars = Bars("step: share of the floor")
    for name in options.models:
        config = configs()[name]
        if options.layers:
            config.num_hidden_layers = options.layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: options.layers]
        for mode in options.modes:
            began = time.perf_counter()
            llm = make_llm(
                config,
                eager=mode == "eager",
                compile=mode == "compiled",
                max_num_seqs=max(options.batches),
                cache_memory=options.cache_memory,
                max_model_len=options.max_model_len,
            )
            print(f"{name}, {mode}: started in {time.perf_counter() - began:.1f} s", flush=True)
            for batch in options.batches:
                times = step_times(llm, batch, options.steps, replays=20)
                floor = floor_ms(llm, batch, bandwidth)
                bars.add(f"{name}, {mode}, batch {batch}", floor / times["whole"])
                parts = ", ".join(f"{part} {ms:.2f}" for part, ms in times.items() if part != "whole")
                print(
                    f"{name}, {mode}, batch {batch}: {times['whole']:.2f} ms ({parts}); floor {floor:.2f}, "
                    f"ratio {times['whole'] / floor:.2f}",
                    flush=True,
                )
            for batch in options.profile:
                lines = profile_steps(llm, batch, 8)
                print(f"{name}, {mode}, batch {batch}:", *lines, sep="\n   ", flush=True)
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    print(bars)


if __name__ == "__main__":
    main()
