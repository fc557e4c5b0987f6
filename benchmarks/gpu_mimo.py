"""Time atom_mimo's ring ops on a CUDA device at the shape of MiMo-V2-Flash's sliding-window layers.

    python benchmarks/gpu_mimo.py

64 query heads and 8 key heads of 192 and 128, a window of 128, bfloat16. Every line is the median of graph replays over
random inputs larger than the L2 cache; the output is compared with a float32 reference first. Floors: bytes over the
read bandwidth, or operations over the rate of a large matrix product, both measured in the same run; the peer is
torch's attention with a mask, over keys that lie in a row.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from bars import Bars
from gpu_mha import (
    L2_BYTES,
    flex,
    graph_seconds,
    interleaved_seconds,
    matrix_rate,
    read_bandwidth,
    show,
    torch_backends,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "atom_mimo" / "src")]

from atom_mimo.kernels import gluon_ring, reference, triton_ring  # noqa: E402
from atom_mimo.kernels.triton_ring_write import ring_write  # noqa: E402

CUDA = torch.device("cuda")
HEADS, KEY_HEADS, DIM, V_DIM, WINDOW, RING_ROWS = 64, 8, 192, 128, 128, 129
LEAST_CHUNK = 9
WRITE_ONLY = ("query", "out", "scaling", "window", "sinks")


def ring_case(rows: int, new: int, computed: int) -> dict[str, Any]:
    """Inputs of `mimo.ring_decode`: rows of `new` tokens after `computed`, each with its ring."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)

    starts = torch.arange(rows + 1, device=CUDA, dtype=torch.int32) * new
    before = torch.full((rows,), computed, device=CUDA, dtype=torch.int32)
    slots = torch.randperm(rows, device=CUDA)
    return {
        "query": normal(rows * new, HEADS, DIM),
        "key": normal(rows * new, KEY_HEADS, DIM),
        "value": normal(rows * new, KEY_HEADS, V_DIM),
        "ring_k": normal(rows, RING_ROWS, KEY_HEADS, DIM),
        "ring_v": normal(rows, RING_ROWS, KEY_HEADS, V_DIM),
        "out": torch.full((rows * new, HEADS, V_DIM), torch.nan, device=CUDA, dtype=torch.bfloat16),
        "query_start_loc": starts,
        "query_start_loc_host": starts.cpu().numpy(),
        "num_computed": before,
        "num_computed_host": before.cpu().numpy(),
        "slots": slots,
        "slots_host": slots.cpu().numpy(),
        "max_query_len": new,
        "scaling": DIM**-0.5,
        "window": WINDOW,
        "sinks": torch.randn(HEADS, device=CUDA),
        "scratch": {},
    }


def kernels_of(new: int) -> dict[str, Callable[..., None]]:
    """What attends rows of so many tokens: in decode steps Triton's kernel, in chunks Hopper's and Triton's."""
    if new < LEAST_CHUNK:
        return {"triton": triton_ring.ring_decode}
    return {"hopper": gluon_ring.ring_prefill, "triton": triton_ring.ring_prefill}


def relative_error(kernel: Callable[..., None], inputs: dict[str, Any]) -> float:
    """Error relative to the norm of the float32 reference; NaN where an element was not written."""
    wide = {name: inputs[name].float() for name in ("query", "key", "value", "ring_k", "ring_v")}
    wide["out"] = torch.zeros_like(inputs["out"], dtype=torch.float32)
    reference.ring_decode(**{**inputs, **wide})
    inputs["out"].fill_(torch.nan)
    kernel(**{**inputs, "scratch": {}})
    return float((inputs["out"].float() - wide["out"]).norm() / wide["out"].norm())


def masked_peer(rows: int, new: int) -> dict[str, float]:
    """Time torch's attention over the same queries and as many keys as they see, with the window as a mask."""
    keys = WINDOW - 1 + new
    q = torch.randn(rows, HEADS, new, DIM, device=CUDA, dtype=torch.bfloat16)
    k = torch.randn(rows, HEADS, keys, DIM, device=CUDA, dtype=torch.bfloat16)
    v = torch.randn(rows, HEADS, keys, V_DIM, device=CUDA, dtype=torch.bfloat16)
    distance = torch.arange(WINDOW - 1, keys, device=CUDA)[:, None] - torch.arange(keys, device=CUDA)[None]
    mask = (distance >= 0) & (distance < WINDOW)
    return interleaved_seconds(torch_backends(query=q, key=k, value=v, attn_mask=mask))


def flex_peer(rows: int, new: int, before: int) -> dict[str, float]:
    """Time torch's FlexAttention with the window over chunks and `before` keys, which lie in a row."""
    q = torch.randn(rows, HEADS, new, DIM, device=CUDA, dtype=torch.bfloat16)
    k = torch.randn(rows, KEY_HEADS, before + new, DIM, device=CUDA, dtype=torch.bfloat16)
    v = torch.randn(rows, KEY_HEADS, before + new, V_DIM, device=CUDA, dtype=torch.bfloat16)
    return interleaved_seconds({"flex": flex(q, k, v, window=WINDOW)})


def main() -> None:
    """Print a line per shape."""
    torch.manual_seed(torch.seed())
    warnings.filterwarnings("ignore", message="(?s).*(attention|kernel|Attention).*")  # backends that refuse
    bandwidth, rate = read_bandwidth(), matrix_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}: plain read "
        f"{bandwidth / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s"
    )
    bars = Bars("share of the limit")
    for rows, new, computed in (
        (256, 1, 5000),
        (64, 1, 5000),
        (8, 1, 5000),
        (64, 4, 5000),
        (1, 8192, 5000),
        (4, 2048, 0),
    ):
        seen = min(WINDOW - 1, computed)
        read = rows * seen * KEY_HEADS * (DIM + V_DIM) * 2 + rows * new * (HEADS + KEY_HEADS) * (DIM + V_DIM) * 2
        count = max(8, min(36, 1 + L2_BYTES // read))
        layers = [ring_case(rows, new, computed) for _ in range(count)]
        pairs = sum(min(WINDOW, computed + token + 1) for token in range(new))
        operations = rows * pairs * HEADS * 2 * (DIM + V_DIM)
        floor = max(read / bandwidth, operations / rate)
        peers = masked_peer(rows, new) if new < LEAST_CHUNK else flex_peer(rows, new, seen)
        for kernel_name, kernel in kernels_of(new).items():
            error = relative_error(kernel, layers[0])
            seconds = graph_seconds([lambda one=one, k=kernel: k(**one) for one in layers])
            rate_here = (read, "TB/s") if new < LEAST_CHUNK else (operations, "TFLOP/s")
            name = f"ring attention {rows} x {new} after {computed}, {kernel_name}"
            figure = f"{rate_here[0] / seconds / 1e12:.2f} {rate_here[1]}"
            bars.add(name, show(name, seconds, floor, peers, error, figure))
        arguments = [{name: value for name, value in one.items() if name not in WRITE_ONLY} for one in layers]
        seconds = graph_seconds([lambda one=one: ring_write(**one) for one in arguments])
        moved = 2 * rows * min(new, RING_ROWS) * KEY_HEADS * (DIM + V_DIM) * 2
        name = f"ring write {rows} x {new}"
        bars.add(name, show(name, seconds, moved / bandwidth, {}, 0.0, f"{moved / seconds / 1e12:.2f} TB/s"))
    print(bars)


if __name__ == "__main__":
    main()
