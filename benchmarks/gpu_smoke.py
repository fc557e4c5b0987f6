"""The whole engine on a GPU: greedy tokens against transformers' generate, decode step times, host synchronizations.

Runs from a checkout that is not installed, on a machine where nothing can be installed:

    python benchmarks/gpu_smoke.py [check] [time] [syncs] [profile]
"""

from __future__ import annotations

import collections
import copy
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ("mha",)


def make_site() -> None:
    """Put the checkout on the path, with the metadata that discovery looks for where it is not installed."""
    from importlib.metadata import PackageNotFoundError, distribution

    site = Path(tempfile.mkdtemp(prefix="atom-site-"))
    for name in PLUGINS:
        sys.path.insert(0, str(ROOT / "plugins" / f"atom_{name}" / "src"))
        try:
            distribution(f"atom-{name}")
        except PackageNotFoundError:
            info = site / f"atom_{name}-0.1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: atom-{name}\nVersion: 0.1.0\n")
            (info / "entry_points.txt").write_text(f"[atom_core]\n{name} = atom_{name}.plugin:plugin\n")
    try:
        import importlib_metadata  # noqa: F401
    except ImportError:  # the standard library's has the same interface from Python 3.12 on
        (site / "importlib_metadata.py").write_text(
            "from importlib.metadata import *\nfrom importlib.metadata import EntryPoint, EntryPoints\n"
        )
    sys.path[:0] = [str(ROOT), str(site)]


def small_config(layers: int = 28) -> Any:
    """The shape of Qwen3-0.6B."""
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


def make_model(dtype: torch.dtype, device: torch.device, layers: int = 28) -> Any:
    """Random weights, lively enough for tokens to differ."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(small_config(layers), dtype=dtype, attn_implementation="sdpa").eval()
    return model


def make_llm(model: Any, dtype: str, device: torch.device, **options: Any) -> Any:
    """Atom around a copy of the model."""
    from atom_core import LLM

    chosen = {"cache_memory": "8GiB", "max_model_len": 4096, "enable_prefix_caching": False, **options}
    return LLM(copy.deepcopy(model), dtype=dtype, device=str(device), skip_tokenizer=True, **chosen)


def generate(llm: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens."""
    from atom_core import SamplingParams

    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for output in outputs:
        if getattr(output, "error", None):
            raise RuntimeError(output.error)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Random token ids."""
    return [torch.randint(0, 151936, (length,)).tolist() for length in lengths]


def check(device: torch.device, layers: int) -> None:
    """Compare greedy tokens in float32, prompts in chunks and decodes mixed."""
    model = make_model(torch.float32, device, layers)
    prompts = prompts_of([50, 700, 17, 300, 1, 129])
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            tokens = model.generate(ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids))
        expected.append(tokens[0, len(prompt) :].tolist())
    for options in ({"max_num_batched_tokens": 256}, {"max_num_batched_tokens": 4096}):
        llm = make_llm(model, "float32", device, **options)
        found = generate(llm, prompts, 24)
        equal = sum(one == other for one, other in zip(found, expected, strict=True))
        kernels = {op: sorted(names) for op, names in selected_kernels(llm).items()}
        print(f"check {options}: {equal} of {len(prompts)} equal to transformers; kernels {kernels}", flush=True)
        for one, other in zip(found, expected, strict=True):
            if one != other:
                print("   differs at", next(i for i in range(24) if one[i] != other[i]), one[:6], other[:6])


def selected_kernels(llm: Any) -> dict[str, set[str]]:
    """The op table's choices, found on a layer."""
    layer = llm.engine.runner._layers[0]
    chosen = {"mha.write_kv": {layer._write_kv.name}}
    return chosen | {f"mha.{kind}": {kernel.name} for kind, kernel in layer._kernels.items()}


def times(device: torch.device) -> None:
    """Median decode step, eager, at 1,024 tokens of context, and transformers' generate at batch 1."""
    model = make_model(torch.bfloat16, device)
    llm = make_llm(model, "bfloat16", device, cache_memory="40GiB", max_num_batched_tokens=8192)
    for batch in (1, 64, 256):
        seconds = step_times(llm, batch)
        print(
            f"decode step, batch {batch}: whole {seconds[0] * 1e3:.2f} ms, schedule {seconds[1] * 1e3:.2f}, "
            f"run {seconds[2] * 1e3:.2f}, take {seconds[3] * 1e3:.2f}",
            flush=True,
        )
    ids = torch.tensor(prompts_of([1024]), device=device)
    spans = []
    for num_tokens in (8, 40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=num_tokens, do_sample=False, attention_mask=torch.ones_like(ids))
        torch.cuda.synchronize()
        spans.append(time.perf_counter() - start)
    print(f"transformers generate, batch 1: {(spans[1] - spans[0]) / 32 * 1e3:.2f} ms a token")


def step_times(llm: Any, batch: int, steps: int = 24) -> list[float]:
    """Medians of a decode step: whole, scheduling, running, taking the tokens."""
    from atom_core import SamplingParams

    params = SamplingParams(max_tokens=steps + 8 + batch // 4, temperature=0, ignore_eos=True)
    for prompt in prompts_of([1024] * batch):
        llm.engine.add_request(prompt, params)
    while llm.engine.scheduler.waiting or any(s.num_computed_tokens < 1024 for s in llm.engine.scheduler.running):
        llm.engine.step()
    for _ in range(4):
        llm.engine.step()
    spans = []
    for _ in range(steps):
        start = time.perf_counter()
        llm.engine.step()
        whole = time.perf_counter() - start
        last = llm.engine.stats.last_step
        spans.append([whole, *(last[f"{part}_seconds"] for part in ("schedule", "run", "finish"))])
    while llm.engine.has_work:
        llm.engine.step()
    return [sorted(column)[len(column) // 2] for column in zip(*spans, strict=True)]


def syncs(device: torch.device) -> None:
    """Where steps wait for the device."""
    llm = make_llm(make_model(torch.bfloat16, device), "bfloat16", device)
    generate(llm, prompts_of([600, 100]), 4)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generate(llm, prompts_of([600, 100]), 8)
    torch.cuda.set_sync_debug_mode("default")
    places = collections.Counter(f"{Path(one.filename).name}:{one.lineno}" for one in caught)
    print("synchronizing calls in 8 steps:", dict(places.most_common(12)), flush=True)


def profile(device: torch.device) -> None:
    """Where the device's time of a decode step goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    from atom_core import SamplingParams

    llm = make_llm(make_model(torch.bfloat16, device), "bfloat16", device, cache_memory="20GiB")
    for prompt in prompts_of([1024] * 64):
        llm.engine.add_request(prompt, SamplingParams(max_tokens=80, temperature=0, ignore_eos=True))
    while llm.engine.scheduler.waiting or any(s.num_computed_tokens < 1024 for s in llm.engine.scheduler.running):
        llm.engine.step()
    for _ in range(5):
        llm.engine.step()
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(5):
            llm.engine.step()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)[:12]
    total = sum(row.self_device_time_total for row in recorded.key_averages())
    print(f"device time of a step at batch 64: {total / 5e3:.2f} ms")
    for row in rows:
        print(f"   {row.self_device_time_total / 5:9.1f} us {row.count / 5:7.1f} x {row.key[:90]}")


if __name__ == "__main__":
    make_site()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = sys.argv[1:] or ["check", "time", "syncs", "profile"]
    if "check" in wanted:
        check(where, 28 if where.type == "cuda" else 2)
    if "time" in wanted:
        times(where)
    if "syncs" in wanted:
        syncs(where)
    if "profile" in wanted:
        profile(where)
