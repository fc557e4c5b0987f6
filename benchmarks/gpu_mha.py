"""Time atom_mha's ops on a CUDA device against their floors, torch's attention backends and FlexAttention.

    python benchmarks/gpu_mha.py [decode] [prefill] [write]

Every line is the median of graph replays over random inputs larger than the L2 cache. The output is compared with a
float32 reference before it is timed. Floors: bytes over the read bandwidth measured in the same run, operations over
the rate of a large matrix product measured in the same run.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from bars import Bars
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "atom_mha" / "src")]

from atom_mha.kernels import reference, torch_cudnn, triton_cache, triton_decode, triton_prefill  # noqa: E402
from atom_mha.kernels.float8 import quantize  # noqa: E402

CUDA = torch.device("cuda")
BLOCK_SIZE = 16
L2_BYTES = 2**28
"""Several times the second level cache: what the layers of one graph read between two uses of a tensor, at least."""
WARM_SECONDS = 0.1
LEAST_LAYERS = 4
"""Layers of a graph, at least: what a step does once for all of them is in the time of each by its share."""


def paged_case(
    rows: int,
    query_len: int,
    seq_len: int,
    *,
    heads: tuple[int, int] = (32, 8),
    dims: tuple[int, int] = (128, 128),
    float8: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Inputs of `mha.decode` for rows of equal length, in shuffled blocks, bfloat16."""
    per_row = -(-seq_len // BLOCK_SIZE)
    caches = [torch.randn(rows * per_row, BLOCK_SIZE, heads[1], dim, device=CUDA, dtype=torch.bfloat16) for dim in dims]
    scales: Sequence[torch.Tensor | None] = (None, None)
    if float8:
        caches, scales = zip(*(quantize(cache) for cache in caches), strict=True)  # type: ignore[assignment]
        scales = [scale.transpose(1, 2).contiguous() for scale in scales if scale is not None]
    num_tokens = rows * query_len
    return {
        "query": torch.randn(num_tokens, heads[0], dims[0], device=CUDA, dtype=torch.bfloat16),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "k_scale": scales[0],
        "v_scale": scales[1],
        "out": torch.full((num_tokens, heads[0], dims[1]), torch.nan, device=CUDA, dtype=torch.bfloat16),
        "query_start_loc": torch.arange(rows + 1, device=CUDA, dtype=torch.int32) * query_len,
        "seq_lens": torch.full((rows,), seq_len, device=CUDA, dtype=torch.int32),
        "block_tables": torch.randperm(rows * per_row, device=CUDA).to(torch.int32).view(rows, per_row),
        "max_query_len": query_len,
        "max_seq_len": seq_len,
        **_options(dims[0], options),
    }


def flat_case(rows: int, query_len: int, *, dims: tuple[int, int] = (128, 128), **options: Any) -> dict[str, Any]:
    """Inputs of `mha.prefill` for rows of equal length, 32 query heads and 8 key heads, bfloat16."""
    num_tokens = rows * query_len

    def normal(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(num_tokens, heads, dim, device=CUDA, dtype=torch.bfloat16)

    return {
        "query": normal(32, dims[0]),
        "key": normal(8, dims[0]),
        "value": normal(8, dims[1]),
        "out": torch.full((num_tokens, 32, dims[1]), torch.nan, device=CUDA, dtype=torch.bfloat16),
        "query_start_loc": torch.arange(rows + 1, device=CUDA, dtype=torch.int32) * query_len,
        "max_query_len": query_len,
        **_options(dims[0], options),
    }


def _options(head_dim: int, options: dict[str, Any]) -> dict[str, Any]:
    plain = {"window": None, "chunk": None, "soft_cap": None, "sinks": None}
    return {**plain, **options, "scaling": head_dim**-0.5, "scratch": {}}


def layers_of(make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Inputs of as many layers of one step as pass the L2 cache; they share lengths and blocks."""
    first = make()
    read = sum(first[name].nbytes for name in ("k_cache", "v_cache"))
    shared = {name: first[name] for name in ("block_tables", "seq_lens", "query_start_loc", "scratch")}
    count = max(LEAST_LAYERS, min(36, 1 + L2_BYTES // read))
    return [first, *(make() | shared for _ in range(count - 1))]


def graph_seconds(calls: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Median seconds of one call, of replays of a graph that holds them all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_seconds(graph.replay, replays) / len(calls)


def median_seconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of a call, by events, once it has run for a while: right after other work clocks are lower."""
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_SECONDS:
        call()
        torch.cuda.synchronize()
    spans = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in spans)[repeats // 2] / 1e3


def interleaved_seconds(calls: dict[str, Callable[[], object]], repeats: int = 20) -> dict[str, float]:
    """Median seconds of each call as a graph, replayed in turn, so that all find the device equally warm.

    Calls that raise are left out, and a line says why.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as problem:
            print(f"    {name}: {type(problem).__name__} {str(problem).splitlines()[0][:100]}", flush=True)
            continue
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            call()
    if not graphs:
        return {}
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_SECONDS or len(next(iter(spans.values()))) < repeats:
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            spans[name].append((start, end))
        torch.cuda.synchronize()
    last = {name: sorted(start.elapsed_time(end) for start, end in pairs[-repeats:]) for name, pairs in spans.items()}
    return {name: times[len(times) // 2] / 1e3 for name, times in last.items()}


def relative_error(kernel: Callable[..., None], expected: Callable[..., None], inputs: dict[str, Any]) -> float:
    """Error of `kernel` relative to the norm of a float32 reference; NaN where an element was not written."""
    wide = {
        name: value.float() if torch.is_tensor(value) and value.dtype == torch.bfloat16 else value
        for name, value in inputs.items()
    }
    wide["out"] = torch.zeros_like(inputs["out"], dtype=torch.float32)
    expected(**{**wide, "scratch": {}})
    inputs["out"].fill_(torch.nan)
    kernel(**{**inputs, "scratch": {}})
    return float((inputs["out"].float() - wide["out"]).norm() / wide["out"].norm())


@triton.jit
def _sum_rows(numbers: tl.tensor, sums: tl.tensor, WIDTH: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    tl.store(sums + row, tl.sum(tl.load(numbers + row * WIDTH + tl.arange(0, WIDTH)), axis=0))


def read_bandwidth() -> float:
    """Bytes per second of a plain read: the best of sums over rows of several widths."""
    numbers, best = torch.randn(2**29, device=CUDA), 0.0
    for width in (2048, 4096, 8192):
        sums = torch.empty(numbers.numel() // width, device=CUDA)
        seconds = median_seconds(lambda w=width, s=sums: _sum_rows[(s.numel(),)](numbers, s, WIDTH=w, num_warps=4))
        best = max(best, numbers.nbytes / seconds)
    return best


def matrix_rate() -> float:
    """Operations per second of a large bfloat16 matrix product."""
    a, b = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_seconds(lambda: a @ b)


def torch_backends(**tensors: Any) -> dict[str, Callable[[], object]]:
    """Torch's attention by backend; those that refuse the case raise RuntimeError."""

    def call(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(**tensors, enable_gqa=True)

    return {
        "cudnn": lambda: call(SDPBackend.CUDNN_ATTENTION),
        "flash": lambda: call(SDPBackend.FLASH_ATTENTION),
        "efficient": lambda: call(SDPBackend.EFFICIENT_ATTENTION),
    }


def flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = True, window: int | None = None
) -> Callable[[], torch.Tensor]:
    """A call of torch's FlexAttention, compiled as it comes; its block mask is made here.

    Args:
        query: [rows, heads, query_len, dim], the last tokens of each row.
        key: [rows, key_heads, seq_len, dim].
        value: [rows, key_heads, seq_len, value_dim].
        causal: whether a query sees only keys up to itself; without, all of them.
        window: how many keys a query sees, itself among them; all if `None`.
    """
    query_len, seq_len = query.shape[2], key.shape[2]
    prefix = seq_len - query_len

    def seen(row: Any, head: Any, token: Any, position: Any) -> Any:
        distance = token + prefix - position
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    mask = create_block_mask(seen, None, None, query_len, seq_len, device=query.device) if causal else None
    torch._dynamo.reset()  # so many shapes pass the limit of compilations of one function
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True)


def show(name: str, seconds: float, floor: float, peers: dict[str, float], error: float, rate: str) -> float:
    """Print one line: ours, its share of the limit, peers with their time over ours, the error; returns the share."""
    others = "  ".join(f"{peer} {time * 1e6:.1f} us ({time / seconds:.2f}x ours)" for peer, time in peers.items())
    print(
        f"{name:44s} {seconds * 1e6:9.1f} us  {rate:14s} floor {floor * 1e6:8.1f} us, {floor / seconds:5.1%} of limit  "
        f"error {error:.1e}  {others or 'no peer'}",
        flush=True,
    )
    return floor / seconds


def decode(bandwidth: float) -> None:
    """Rows of one token, and of four, over the paged cache; peers read keys that are not paged."""
    bars = Bars("decode: share of the limit")
    for rows, query_len, seq_len, shape in (
        (64, 1, 8192, {}), (256, 1, 2048, {}), (1, 1, 131072, {}), (8, 1, 16384, {}), (64, 1, 1024, {}),
        (8, 1, 1024, {}), (1, 1, 1024, {}), (64, 4, 4096, {}), (64, 1, 8192, {"window": 1024}),
        (64, 1, 8192, {"heads": (64, 8), "dims": (64, 64)}), (64, 1, 4096, {"heads": (32, 32), "dims": (96, 96)}),
        (64, 1, 8192, {"heads": (64, 4), "dims": (192, 128)}), (64, 1, 4096, {"heads": (16, 8), "dims": (256, 256)}),
        (64, 1, 8192, {"float8": True}), (256, 1, 2048, {"float8": True}), (1, 1, 131072, {"float8": True}),
        (64, 1, 1024, {"float8": True}),
    ):  # fmt: skip
        layers = layers_of(lambda r=rows, q=query_len, n=seq_len, s=shape: paged_case(r, q, n, **s))
        first = layers[0]
        error = relative_error(triton_decode.decode, reference.decode, first)
        seconds = graph_seconds([lambda one=one: triton_decode.decode(**one) for one in layers])
        read = [first[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale") if first[name] is not None]
        share = min(1.0, shape.get("window", seq_len) / seq_len)
        moved = sum(tensor.nbytes for tensor in read) * share
        peers = {}
        if query_len == 1 and (not shape or "window" in shape):
            q = torch.randn(rows, 32, 1, 128, device=CUDA, dtype=torch.bfloat16)
            k, v = (torch.randn(rows, seq_len, 8, 128, device=CUDA, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
            calls = {} if shape else torch_backends(query=q, key=k, value=v)
            window = shape.get("window")
            calls["flex"] = flex(q, k, v, causal=window is not None, window=window)
            peers = interleaved_seconds(calls)
        name = f"decode {rows} x {query_len} of {seq_len} {shape or ''}"
        bars.add(name, show(name, seconds, moved / bandwidth, peers, error, f"{moved / seconds / 1e12:.2f} TB/s"))
    print(bars, flush=True)


def prefill(rate: float) -> None:
    """Chunks without and with a cached prefix."""
    bars = Bars("prefill: share of the limit")
    for rows, new, dims in (
        (1, 8192, (128, 128)), (4, 2048, (128, 128)), (16, 512, (128, 128)), (1, 8300, (128, 128)),
        (1, 8192, (192, 128)), (1, 8192, (64, 64)),
    ):  # fmt: skip
        inputs = flat_case(rows, new, dims=dims)
        operations = rows * 2 * sum(dims) * 32 * new * (new + 1) / 2
        q, k, v = (inputs[name].view(rows, new, -1, dim).transpose(1, 2) for name, dim in _named(dims))
        kernels = {"cudnn op": torch_cudnn.prefill, "triton op": triton_prefill.prefill}
        errors = {name: relative_error(kernel, reference.prefill, inputs) for name, kernel in kernels.items()}
        ours = {name: lambda f=kernel, i=inputs: f(**i) for name, kernel in kernels.items()}
        others = torch_backends(query=q, key=k, value=v, is_causal=True)
        if dims == (128, 128):
            others["flex"] = flex(q, k, v)
        found = interleaved_seconds(ours | others)
        peers = {name: seconds for name, seconds in found.items() if name not in kernels}
        for name, error in errors.items():
            seconds = found[name]
            line = f"prefill, {name}, {rows} x {new} {dims}"
            share = show(line, seconds, operations / rate, peers, error, f"{operations / seconds / 1e12:.0f} TFLOP/s")
            bars.add(line, share)
    for rows, new, prefix, shape in (
        (1, 8192, 4096, {}), (4, 512, 3584, {}), (64, 32, 1024, {}), (1, 4096, 4096, {"dims": (192, 128)}),
        (1, 4096, 4096, {"dims": (64, 64)}), (1, 4096, 4096, {"dims": (256, 256)}),
        (1, 8192, 4096, {"window": 1024}), (1, 8192, 4096, {"float8": True}),
    ):  # fmt: skip
        inputs = paged_case(rows, new, prefix + new, **shape)
        dims, window = shape.get("dims", (128, 128)), shape.get("window", prefix + new)
        pairs = sum(min(position + 1, window) for position in range(prefix, prefix + new))
        operations = rows * 2 * sum(dims) * 32 * pairs
        error = relative_error(triton_prefill.prefill_paged, reference.decode, inputs)
        calls = {"ours": lambda i=inputs: triton_prefill.prefill_paged(**i)}
        if not shape or "window" in shape:
            q = inputs["query"].view(rows, new, 32, 128).transpose(1, 2)
            keys = inputs["k_cache"].view(rows, -1, 8, 128).transpose(1, 2)
            calls["flex, keys not paged"] = flex(q, keys, keys, window=shape.get("window"))
        if not shape:
            mask = causal_lower_right(new, prefix + new)
            # torch's lower-right mask takes as many key heads as query heads
            keys = keys.repeat_interleave(4, dim=1)
            calls["flash, keys not paged"] = lambda q=q, k=keys, m=mask: scaled_dot_product_attention(
                q, k, k, attn_mask=m
            )
        found = interleaved_seconds(calls)
        seconds = found.pop("ours")
        name = f"prefill_paged {rows} x {new} after {prefix} {shape or ''}"
        share = show(name, seconds, operations / rate, found, error, f"{operations / seconds / 1e12:.0f} TFLOP/s")
        bars.add(name, share)
    print(bars, flush=True)


def _named(dims: tuple[int, int]) -> tuple[tuple[str, int], ...]:
    return ("query", dims[0]), ("key", dims[0]), ("value", dims[1])


def write(bandwidth: float) -> None:
    """New keys and values into the cache; the floor counts reading and writing them once."""
    bars = Bars("write: share of the limit")
    for num_tokens, float8 in ((64, False), (8192, False), (64, True), (8192, True)):
        inputs = paged_case(1, 1, 65536, float8=float8)
        key, value = (torch.randn(num_tokens, 8, 128, device=CUDA, dtype=torch.bfloat16) for _ in "kv")
        caches = [inputs[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale")]
        slots = torch.randperm(65536, device=CUDA)[:num_tokens]
        seconds = graph_seconds([lambda k=key, v=value, c=caches, s=slots: triton_cache.write_kv(k, v, *c, s, {})] * 20)
        peers = {}
        if not float8:

            def index(k: Any = key, v: Any = value, c: Any = caches, s: Any = slots) -> None:
                c[0].flatten(0, 1).index_copy_(0, s, k)
                c[1].flatten(0, 1).index_copy_(0, s, v)

            peers["torch index_copy_"] = graph_seconds([index] * 20)
        moved = 2 * key.nbytes + sum(c.nbytes for c in caches if c is not None) / 65536 * num_tokens
        name = f"write_kv {num_tokens} tokens{' float8' if float8 else ''}"
        bars.add(name, show(name, seconds, moved / bandwidth, peers, 0.0, f"{moved / seconds / 1e12:.2f} TB/s"))
    print(bars, flush=True)


def main() -> None:
    """Print every part that was asked for."""
    wanted = sys.argv[1:] or ["decode", "prefill", "write"]
    torch.manual_seed(torch.seed())
    warnings.filterwarnings("ignore", message="(?s).*(attention|kernel|Attention).*")  # backends that refuse
    bandwidth, rate = read_bandwidth(), matrix_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}: plain read "
        f"{bandwidth / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s"
    )
    if "decode" in wanted:
        decode(bandwidth)
    if "prefill" in wanted:
        prefill(rate)
    if "write" in wanted:
        write(bandwidth)


if __name__ == "__main__":
    main()
