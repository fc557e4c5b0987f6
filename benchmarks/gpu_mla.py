"""Latent attention kernels on a GPU: ours, torch's ways, floors from bytes and operations, in one run.

    python benchmarks/gpu_mla.py [decode] [prefill] [sparse] [sweep[=HEADS,..]] [sweepcheck[=HEADS,..]]

Runs from a checkout: put it and `plugins/atom_mla/src` on PYTHONPATH. Every output is compared with float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import Bars
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "atom_mla" / "src")]

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
SCALING = (128 + 64) ** -0.5
DEVICE = torch.device("cuda")


def captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture one call, after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def median_ms(function: Callable[[], Any], repeats: int = 15, capture: bool = True) -> float:
    """Median device time of a call, from graph replays unless the call cannot be captured."""
    if capture:
        graph = captured(function)
        function = graph.replay
    for _ in range(3):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error in the 2-norm; NaN if any value is."""
    difference = (found.float() - expected).norm() / expected.norm()
    return float(difference)


def matrix_rate() -> float:
    """FLOP/s of an 8192^3 bfloat16 product of random matrices."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (median_ms(lambda: a @ b) * 1e-3)


def read_rate() -> float:
    """Bytes per second of a read of 4 GB: a sum over rows."""
    values = torch.randn(1 << 30, device=DEVICE, dtype=torch.float32)
    return values.nbytes / (median_ms(lambda: values.view(1024, -1).amax(1)) * 1e-3)


class Rows:
    """Paged latents of some rows, shuffled blocks, and decode queries."""

    def __init__(
        self,
        lens: list[int],
        heads: int,
        block_size: int = 64,
        query_len: int = 1,
        width: int = WIDTH,
        float8: bool = False,
    ) -> None:
        self.block_size = block_size
        blocks = [-(-length // block_size) for length in lens]
        order = torch.randperm(sum(blocks)).to(torch.int32)
        table = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
        first = 0
        for row, count in enumerate(blocks):
            table[row, :count] = order[first : first + count]
            first += count
        self.cache = torch.randn(first, block_size, width, device=DEVICE, dtype=torch.bfloat16)
        self.scale = None
        if float8:
            self.scale = torch.rand(first, block_size, device=DEVICE) * 0.02 + 0.01
            self.cache = (self.cache.float() * 50).to(torch.float8_e4m3fn)
        self.block_tables = table.to(DEVICE)
        self.lens = lens
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        self.starts_host = np.arange(len(lens) + 1, dtype=np.int32) * query_len
        self.query_start_loc = torch.from_numpy(self.starts_host).to(DEVICE)
        self.query = torch.randn(len(lens) * query_len, heads, width, device=DEVICE, dtype=torch.bfloat16)
        self.query_len = query_len

    def decode_arguments(self) -> dict[str, Any]:
        """Arguments of `triton_latent.attend_all`."""
        return {
            "query": self.query,
            "cache": self.cache,
            "scale": self.scale,
            "block_tables": self.block_tables,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "max_query_len": self.query_len,
            "max_seq_len": max(self.lens),
            "scaling": SCALING,
            "value_dim": LATENT,
        }

    def hosts(self) -> dict[str, Any]:
        """What of an op's arguments only the host reads."""
        return {"query_start_loc_host": self.starts_host, "seq_lens_host": np.array(self.lens, dtype=np.int32)}

    def latents(self, row: int) -> Tensor:
        """One row's latents."""
        blocks = self.block_tables[row, : -(-self.lens[row] // self.block_size)].long()
        tokens = self.cache[blocks].flatten(0, 1)
        if self.scale is not None:
            tokens = tokens.float() * self.scale[blocks].flatten(0, 1)[:, None]
        return tokens[: self.lens[row]]

    def expected(self, row: int) -> Tensor:
        """float32 output of one row's one-token decode."""
        keys = self.latents(row).float()
        scores = self.query[row].float() @ keys.T * SCALING
        return scores.softmax(-1) @ keys[:, :LATENT]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rows' latents and scales."""
        return sum(self.lens) * (self.cache.shape[-1] * self.cache.element_size() + 4 * (self.scale is not None))

    def flops(self, heads: int) -> float:
        """Of one-token decode: scores and values."""
        return sum(self.lens) * heads * 2 * (WIDTH + LATENT)


def worst(rows: Rows, output: Tensor, count: int = 4) -> float:
    """Largest relative error over some rows."""
    picks = {0, len(rows.lens) - 1, *np.random.default_rng(0).integers(0, len(rows.lens), count).tolist()}
    return max(error(output[row], rows.expected(row)) for row in sorted(picks))


SHAPES = [
    (128, 64, 8192, 64),
    (128, 64, 8192, 16),
    (64, 64, 8192, 16),
    (16, 64, 8192, 64),
    (16, 64, 8192, 16),
    (16, 256, 2048, 16),
    (128, 1, 131072, 16),
    (16, 1, 131072, 16),
]
"""Heads, rows, tokens of each, tokens per block."""


def chosen(op: str, heads: int, block_size: int, cache: torch.dtype = torch.bfloat16) -> Any:
    """The kernel that the registry picks."""
    from atom_core.plugin import KernelTable
    from atom_mla.ops import KERNELS, OPS

    table = KernelTable.build([(one, "mla") for one in OPS], [(one, "mla") for one in KERNELS])
    facts = {
        "num_heads": heads,
        "latent_dim": LATENT,
        "rope_dim": ROPE,
        "nope_dim": 128,
        "value_dim": 128,
        "block_size": block_size,
    }
    return table.select(op, device=DEVICE, dtypes={"query": torch.bfloat16, "cache": cache}, facts=facts)


def decode() -> None:
    """Absorbed decode against torch's products, the matrix rate and the read rate."""
    matrix, read = matrix_rate(), read_rate()
    print(f"matrix rate {matrix / 1e12:.0f} TFLOP/s, read rate {read / 1e12:.2f} TB/s")
    bars = Bars("decode: share of the limit")
    print("heads  batch  context  block  kernel    ours ms  torch ms  floor ms  of matrix  of read  error")
    for heads, batch, context, block_size in SHAPES:
        rows = Rows([context] * batch, heads, block_size)
        kernel = chosen("mla.decode", heads, block_size)
        call = partial(kernel, **rows.decode_arguments(), **rows.hosts())
        ms = median_ms(call)
        found = call()
        flops, size = rows.flops(heads), rows.cache_bytes
        keys = torch.stack([rows.latents(row) for row in range(batch)])

        def products(rows: Rows = rows, keys: Tensor = keys) -> Tensor:
            scores = (rows.query @ keys.transpose(1, 2)).mul_(SCALING)
            return scores.softmax(-1) @ keys[..., :LATENT]

        torch_ms = median_ms(products)
        floor = max(flops / matrix, size / read) * 1e3
        print(
            f"{heads:5} {batch:6} {context:8} {block_size:6}  {kernel.name:8} {ms:8.3f} {torch_ms:9.3f} {floor:9.3f} "
            f"{flops / ms * 1e3 / matrix:10.1%} {size / ms * 1e3 / read:8.1%}  {worst(rows, found):.1e}",
            flush=True,
        )
        bars.add(f"{heads} heads, {batch} x {context}, blocks of {block_size}, {kernel.name}", floor / ms)
    print(bars, flush=True)


def write() -> None:
    """The cache write of 16,384 tokens, against a copy of as many bytes."""
    tokens = 16384
    rows = Rows([tokens], 16)
    latent = torch.randn(tokens, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.randperm(tokens, device=DEVICE)
    size = 2 * latent.nbytes
    target = torch.empty_like(latent)
    copy_ms = median_ms(lambda: target.copy_(latent))
    for float8 in (False, True):
        cache = torch.zeros_like(rows.cache, dtype=torch.float8_e4m3fn) if float8 else rows.cache
        scale = torch.zeros(cache.shape[:2], device=DEVICE) if float8 else None
        kernel = chosen("mla.write_latent", 16, rows.block_size, cache.dtype)
        call = partial(kernel, latent, cache, scale, slots)
        ms = median_ms(call)
        found = cache.view(-1, WIDTH)[slots].float()
        found = found if scale is None else found * scale.view(-1)[slots, None]
        print(
            f"write {tokens} tokens, {cache.dtype}: {ms:.4f} ms, torch's copy of as many {copy_ms:.4f} ms, "
            f"{size / ms / 1e9:.2f} TB/s, error {error(found, latent.float()):.1e}",
            flush=True,
        )


VARIANTS = {
    128: ["gluon", "64,64,8,2"],
    64: ["gluon", "64,64,8,2"],
    16: ["16,32,4,3,2", "16,64,8,3"],
}


def variant_of(variant: str, rows: Rows) -> Callable[[], Tensor]:
    """A call of the decode kernel with tiles as `LatentTiles` has them, or of the one in Gluon."""
    from atom_mla.kernels import gluon_latent, triton_latent

    if variant == "gluon":
        if rows.scale is not None:
            raise ValueError("takes no float8")
        return partial(gluon_latent.decode, **rows.decode_arguments(), **rows.hosts())
    numbers = [int(part) for part in variant.split(",")]
    tiles = triton_latent.LatentTiles(*numbers)
    return partial(triton_latent.attend_all, **rows.decode_arguments(), tiles=tiles)


def sweep(heads_wanted: list[int], check_only: bool) -> None:
    """Variants of the decode kernel, block sizes, cache dtypes."""
    from atom_mla.kernels import triton_latent

    matrix, read = (1.0, 1.0) if check_only else (matrix_rate(), read_rate())
    print(f"matrix rate {matrix / 1e12:.0f} TFLOP/s, read rate {read / 1e12:.2f} TB/s")
    for heads in heads_wanted:
        for block_size, float8 in ((64, False), (16, False), (64, True)):
            rows = Rows([8192] * 64, heads, block_size, float8=float8)
            for variant in VARIANTS[heads]:
                what = f"{heads} block {block_size} {'float8' if float8 else 'bf16'} {variant:14}"
                try:
                    call = variant_of(variant, rows)
                    wrong = worst(rows, call(), 2)
                    if check_only:
                        print(f"{what}: error {wrong:.1e} {resources(triton_latent)}", flush=True)
                        continue
                    ms = median_ms(call)
                    print(
                        f"{what} {ms:.3f} ms, {rows.flops(heads) / ms * 1e3 / matrix:.1%} of matrix, "
                        f"{rows.cache_bytes / ms * 1e3 / read:.1%} of read, error {wrong:.1e}",
                        flush=True,
                    )
                except Exception as problem:  # a variant that does not fit is a line of the table
                    print(f"{what}: {type(problem).__name__} {str(problem)[:100]}", flush=True)


def prefill() -> None:
    """Chunks with and without a cached prefix, 128 heads of 192/128, against torch's attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from atom_mla.kernels import torch_cudnn, triton_prefill, triton_prefix

    heads, tokens, matrix = 128, 8192, matrix_rate()
    bars = Bars("prefill: share of the matrix rate")
    query, key = (torch.randn(tokens, heads, 192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    value = torch.randn(tokens, heads, 128, device=DEVICE, dtype=torch.bfloat16)
    starts_host = np.array([0, tokens], dtype=np.int32)
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "query_start_loc": torch.from_numpy(starts_host).to(DEVICE),
        "query_start_loc_host": starts_host,
        "max_query_len": tokens,
        "scaling": SCALING,
    }
    flops = heads * tokens * tokens * (192 + 128)
    picks = torch.tensor([0, 1, 4095, tokens - 1], device=DEVICE)

    def expected(head: int) -> Tensor:
        scores = query[picks, head].float() @ key[:, head].float().T * SCALING
        future = torch.arange(tokens, device=DEVICE) > picks[:, None]
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ value[:, head].float()

    def torch_way() -> Tensor:
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALING)[0].transpose(0, 1)

    ways = {
        "triton": lambda: triton_prefill.prefill(**arguments),
        "cudnn kernel": lambda: torch_cudnn.prefill(**arguments),
        "torch cuDNN": torch_way,
    }
    for name, way in ways.items():
        wrong = error(way()[picks, 77], expected(77))
        ms = median_ms(way, 7, capture=False)
        rate = flops / ms / 1e9
        print(f"prefill 1 x {tokens}, {name}: {ms:.3f} ms, {rate:.0f} TFLOP/s, error {wrong:.1e}", flush=True)
        bars.add(f"1 x {tokens}, {name}", rate * 1e12 / matrix)
    for heads, chunk, prefix in ((128, 4096, 4096), (128, 4096, 28672), (16, 4096, 28672)):
        rows = Rows([chunk + prefix], heads)
        query = torch.randn(chunk, heads, 192, device=DEVICE, dtype=torch.bfloat16)
        expansion = torch.randn(heads, 256, LATENT, device=DEVICE, dtype=torch.bfloat16) * LATENT**-0.5
        starts_host = np.array([0, chunk], dtype=np.int32)
        paged = {
            "query": query,
            "expansion": expansion,
            "cache": rows.cache,
            "scale": None,
            "block_tables": rows.block_tables,
            "query_start_loc": torch.from_numpy(starts_host).to(DEVICE),
            "seq_lens": rows.seq_lens,
            "query_start_loc_host": starts_host,
            "seq_lens_host": np.array(rows.lens, dtype=np.int32),
            "max_query_len": chunk,
            "max_seq_len": chunk + prefix,
            "scaling": SCALING,
        }
        found = triton_prefix.prefill_paged(**paged)
        latents = rows.latents(0).float()
        head, token = heads - 1, chunk - 1
        expanded = latents[:, :LATENT] @ expansion[head].float().T
        keys = torch.cat((expanded[:, :128], latents[:, LATENT:]), 1)
        weights = (query[token, head].float() @ keys.T * SCALING).softmax(-1)
        wrong = error(found[token, head], weights @ expanded[:, 128:])
        ms = median_ms(partial(triton_prefix.prefill_paged, **paged), 5, capture=False)
        pairs = chunk * prefix + chunk * (chunk + 1) / 2
        flops = heads * (2 * pairs * 320 + 2 * (chunk + prefix) * 256 * LATENT)
        print(
            f"prefill {chunk} over {prefix}, {heads} heads: {ms:.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s, "
            f"error {wrong:.1e}",
            flush=True,
        )
        bars.add(f"{chunk} over {prefix}, {heads} heads", flops / ms * 1e3 / matrix)
    print(bars, flush=True)


def sparse() -> None:
    """DeepSeek-V3.2: indexer of 64 heads of 128, top 2,048; attention of 128 heads to the selected."""
    from atom_mla.kernels import triton_select

    top_k = 2048
    for rows_count, query_len, context in ((64, 1, 8192), (64, 1, 65536), (1, 4096, 65536), (1, 1024, 131072)):
        index = Rows([context] * rows_count, 64, query_len=query_len, width=128)
        weights = torch.randn(rows_count * query_len, 64, device=DEVICE)
        common = {
            "scale": None,
            "block_tables": index.block_tables,
            "query_start_loc": index.query_start_loc,
            "seq_lens": index.seq_lens,
            "query_start_loc_host": index.starts_host,
            "seq_lens_host": np.array(index.lens, dtype=np.int32),
            "max_query_len": query_len,
            "max_seq_len": context,
        }
        select = partial(
            triton_select.select_tokens,
            query=index.query,
            head_weights=weights,
            cache=index.cache,
            scaling=128**-0.5,
            top_k=top_k,
            **common,
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        selected = select()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        token = query_len - 1
        keys = index.latents(0).float()
        scores = (index.query[token].float() @ keys.T * 128**-0.5).relu().T @ weights[token]
        best = set(scores.topk(top_k).indices.tolist())
        missed = len(best - set(selected[token].tolist()))
        ms = median_ms(select, 5, capture=query_len == 1)
        rows = Rows([context] * rows_count, 128, query_len=query_len)
        attend = partial(
            chosen("mla.attend_selected", 128, rows.block_size),
            query=rows.query,
            selected=selected,
            cache=rows.cache,
            scaling=SCALING,
            value_dim=LATENT,
            **{**common, "block_tables": rows.block_tables},
        )
        latents = rows.latents(0)[selected[token].long()].float()
        weight = (rows.query[token].float() @ latents.T * SCALING).softmax(-1)
        wrong = error(attend()[token], weight @ latents[:, :LATENT])
        attend_ms = median_ms(attend, 5, capture=query_len == 1)
        flops = rows_count * query_len * top_k * 128 * 2 * (WIDTH + LATENT)
        index_flops = rows_count * 64 * 256 * (query_len * context - query_len * (query_len - 1) / 2)
        print(
            f"sparse {rows_count} x {query_len} of {context}: "
            f"select {ms:.3f} ms ({index_flops / ms / 1e9:.0f} TFLOP/s, {peak:.0f} MiB, "
            f"{missed} of {top_k} differ from float32), "
            f"attend {attend_ms:.3f} ms ({flops / attend_ms / 1e9:.0f} TFLOP/s, error {wrong:.1e})",
            flush=True,
        )


def resources(module: Any) -> str:
    """Registers and spills of the kernels compiled last."""
    found = []
    for caches in module._attend.device_caches.values():
        for kernel in list(caches[0].values())[-1:]:
            found.append(f"regs {kernel.n_regs} spills {kernel.n_spills} smem {kernel.metadata.shared}")
    return "; ".join(found)


def main() -> None:
    """Run the named parts."""
    torch.manual_seed(torch.seed())
    for part in sys.argv[1:] or ["decode"]:
        name, _, option = part.partition("=")
        print(f"== {part}: {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
        if name == "decode":
            decode()
            write()
        elif name in ("prefill", "sparse"):
            {"prefill": prefill, "sparse": sparse}[name]()
        elif name in ("sweep", "sweepcheck"):
            sweep([int(heads) for heads in (option or "128,16").split(",")], name == "sweepcheck")


if __name__ == "__main__":
    main()
