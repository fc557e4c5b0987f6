"""The ops of atom_gdn on a GPU at Qwen3-Next shapes: checked, timed, beside flash-linear-attention and the floor.

    python benchmarks/gpu_gdn.py                     # needs a checkout and torch, not an installation
    FLA=/path/of/unpacked/packages python benchmarks/gpu_gdn.py

Every output is compared with the recurrence in float32, token by token. The floor is the bytes that an op must read and
write over the copy bandwidth that is measured in the same run. Times are medians; short ones are replays of a graph, so
that the host does not count, and take turns between several states where one would fit into the cache. Chunks are timed
as they are called, and, on the last lines, as graphs too, which leaves out the host for both sides. What
flash-linear-attention computes is less than what the op does: its chunked function gets gates that are computed
already, its recurrent kernel neither convolves nor updates states in place.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import Bars
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "atom_gdn" / "src")]
if "FLA" in os.environ:
    sys.path.insert(0, os.environ["FLA"])

from atom_gdn.kernels import reference, triton_chunks, triton_conv, triton_decode  # noqa: E402

DEVICE = torch.device("cuda")
K_HEADS, V_HEADS, DIM, TAPS = 16, 32, 128, 4
KEY_DIM, VALUE_DIM = K_HEADS * DIM, V_HEADS * DIM
CHANNELS = 2 * KEY_DIM + VALUE_DIM
STATE_NUMBERS = V_HEADS * DIM * DIM
PREFILLS = ([16384], [4096] * 4, [1024] * 16)
RAGGED = [1, 4000, 63, 64, 65, 700, 2048, 129]
DECODES = ((1, 1, torch.float32), (16, 1, torch.float32), (64, 1, torch.float32), (256, 1, torch.float32),
           (256, 1, torch.bfloat16), (64, 4, torch.float32))  # fmt: skip


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Random numbers."""
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def tokens_and_gates(num_tokens: int) -> dict[str, Any]:
    """Inputs of both ops; gates are initialized as the released models are before training."""
    return {
        "qkv": normal(num_tokens, CHANNELS),
        "a": normal(num_tokens, V_HEADS),
        "b": normal(num_tokens, V_HEADS),
        "a_log": torch.empty(V_HEADS, device=DEVICE).uniform_(0.01, 16).log(),
        "dt_bias": torch.empty(V_HEADS, device=DEVICE).uniform_(-6.9, -2.3).exp().expm1().log(),
        "beta_scale": 1.0,
    }


def starts_of(lengths: list[int]) -> dict[str, Any]:
    """First tokens of rows."""
    host = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return {"query_start_loc": torch.from_numpy(host).to(DEVICE), "query_start_loc_host": host}


def chunk_case(lengths: list[int]) -> dict[str, Any]:
    """Inputs of `gdn.chunk_delta_rule`; rows update their states in place."""
    rows, num_tokens = len(lengths), sum(lengths)
    starts = starts_of(lengths)
    read = torch.randperm(rows + 1, device=DEVICE)[:rows]
    write = torch.full((num_tokens,), -1, device=DEVICE)
    write[starts["query_start_loc"][1:].long() - 1] = read
    inputs = tokens_and_gates(num_tokens)
    inputs["qkv"] = functional.silu(inputs["qkv"])
    return {
        **inputs,
        **starts,
        "recurrent_state": normal(rows + 1, V_HEADS, DIM, DIM, dtype=torch.float32, scale=0.3),
        "out": torch.full((num_tokens, V_HEADS, DIM), torch.nan, device=DEVICE, dtype=torch.bfloat16),
        "state_read": read,
        "state_write": write,
        "max_query_len": max(lengths),
    }


def conv_case(lengths: list[int]) -> dict[str, Any]:
    """Inputs of `gdn.causal_conv`."""
    case = chunk_case(lengths)
    own = {name: case[name] for name in ("query_start_loc", "query_start_loc_host", "state_read", "state_write")}
    return {
        **own,
        "x": case["qkv"],
        "weight": normal(CHANNELS, TAPS, scale=0.5),
        "conv_state": normal(len(lengths) + 1, TAPS - 1, CHANNELS),
        "out": torch.full_like(case["qkv"], torch.nan),
        "max_query_len": max(lengths),
    }


def decode_case(rows: int, tokens: int, state_dtype: torch.dtype) -> dict[str, Any]:
    """Inputs of `gdn.decode`; token i of a row writes slot base + i, and the row reads one of these."""
    base = torch.randperm(rows, device=DEVICE) * tokens
    num_slots = rows * tokens + 1
    starts = starts_of([tokens] * rows)
    return {
        **tokens_and_gates(rows * tokens),
        "weight": normal(CHANNELS, TAPS, scale=0.5),
        "conv_state": normal(num_slots, TAPS - 1, CHANNELS),
        "recurrent_state": normal(num_slots, V_HEADS, DIM, DIM, dtype=state_dtype, scale=0.3),
        "out": torch.full((rows * tokens, V_HEADS, DIM), torch.nan, device=DEVICE, dtype=torch.bfloat16),
        "query_start_loc": starts["query_start_loc"],
        "state_read": base + torch.randint(0, tokens, (rows,), device=DEVICE),
        "state_write": (base[:, None] + torch.arange(tokens, device=DEVICE)).flatten(),
        "max_query_len": tokens,
    }


def widened(case: dict[str, Any]) -> dict[str, Any]:
    """A copy in float32."""
    return {
        name: (value.float() if value.is_floating_point() else value).clone() if torch.is_tensor(value) else value
        for name, value in case.items()
    }


def expected_chunks(case: dict[str, Any]) -> dict[str, Any]:
    """The recurrence in float32, all rows of a length at once; slower than the op and independent of it."""
    own = widened(case)
    starts, state = own["query_start_loc_host"], own["recurrent_state"]
    lengths = np.diff(starts)
    decay, beta = reference._gates(own["a"], own["b"], own["a_log"], own["dt_bias"], own["beta_scale"])
    query, key, value = own["qkv"].split([KEY_DIM, KEY_DIM, VALUE_DIM], 1)
    query, key = (
        (part := x.view(-1, K_HEADS, DIM)) * (part.square().sum(-1, keepdim=True) + reference.L2_EPSILON).rsqrt()
        for x in (query, key)
    )
    query, key = (x.repeat_interleave(V_HEADS // K_HEADS, 1) for x in (query * DIM**-0.5, key))
    value = value.view(-1, V_HEADS, DIM)
    for length in np.unique(lengths[lengths > 0]).tolist():
        rows = torch.from_numpy(np.flatnonzero(lengths == length)).to(DEVICE)
        first = own["query_start_loc"][rows].long()
        own_state = state[own["state_read"][rows]]
        for index in range(length):
            token = first + index
            own_state = own_state * decay[token][..., None, None]
            remembered = (own_state @ key[token][..., None])[..., 0]
            update = beta[token][..., None] * (value[token] - remembered)
            own_state = own_state + update[..., None] * key[token][..., None, :]
            own["out"][token] = (own_state @ query[token][..., None])[..., 0]
        state[own["state_write"][first + length - 1]] = own_state
    return own


def error(found: dict[str, Any], expected: dict[str, Any], *names: str) -> float:
    """Largest relative error of the named tensors; NaN where one holds a NaN."""
    errors = [(found[n].float() - expected[n].float()).norm() / expected[n].float().norm() for n in names]
    return float(torch.stack(errors).max())


def checked(kernel: Callable[..., None], case: dict[str, Any], expected: dict[str, Any], *names: str) -> float:
    """Error of a kernel on a copy of the case."""
    found = {name: value.clone() if torch.is_tensor(value) else value for name, value in case.items()}
    kernel(**found)
    return error(found, expected, *names)


def eager_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=30, return_mode="median")) * 1e3


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of one of the calls, replayed as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return eager_us(graph.replay) / len(calls)


def launches(call: Callable[[], object]) -> str:
    """Names of the kernels that a call runs on the device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return ", ".join(dict.fromkeys(name[:40] for name in names)) or "unknown"


def copy_bandwidth() -> float:
    """Bytes per second, read plus written."""
    big = torch.randn(2**28, device=DEVICE)
    return 2 * big.nbytes / (eager_us(big.clone) * 1e-6)


def peer_chunks(case: dict[str, Any]) -> Callable[[], Any]:
    """flash-linear-attention's chunked gated delta rule on the same inputs, as a batch of equal rows."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rows = len(case["query_start_loc_host"]) - 1
    query, key, value = (
        part.reshape(rows, -1, heads, DIM).contiguous()
        for part, heads in zip(
            case["qkv"].split([KEY_DIM, KEY_DIM, VALUE_DIM], 1), (K_HEADS, K_HEADS, V_HEADS), strict=True
        )
    )
    softplus = functional.softplus(case["a"].float() + case["dt_bias"])
    gate = (-case["a_log"].exp() * softplus).view(rows, -1, V_HEADS)
    beta = case["b"].float().sigmoid().to(torch.bfloat16).view(rows, -1, V_HEADS)
    state = case["recurrent_state"][case["state_read"]].transpose(-1, -2).contiguous()

    def call() -> Any:
        return chunk_gated_delta_rule(
            query, key, value, gate, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return call


def peer_recurrence(rows: int) -> Callable[[], Any]:
    """flash-linear-attention's recurrent kernel alone, one token a row."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    query, key, value = (normal(rows, 1, heads, DIM) for heads in (K_HEADS, K_HEADS, V_HEADS))
    gate, beta = -torch.rand(rows, 1, V_HEADS, device=DEVICE), torch.rand(rows, 1, V_HEADS, device=DEVICE).bfloat16()
    state = normal(rows, V_HEADS, DIM, DIM, dtype=torch.float32, scale=0.3)

    def call() -> Any:
        return fused_recurrent_gated_delta_rule(
            query, key, value, g=gate, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return call


def has_peer() -> bool:
    """Whether flash-linear-attention can be imported."""
    try:
        import fla.ops.gated_delta_rule  # noqa: F401
    except ImportError as reason:
        print(f"without flash-linear-attention: {reason}")
        return False
    return True


def report(bars: Bars, name: str, ours: float, floor: float, wrong: float, note: str = "") -> None:
    """Print a row, and add its share of the floor."""
    bars.add(name, floor / ours)
    print(
        f"{name:34s} {ours:8.1f} us  floor {floor:7.1f}  {floor / ours:4.0%} of it  error {wrong:.1e}{note}", flush=True
    )


def prefill(bandwidth: float, peer: bool) -> None:
    """Convolution and chunks."""
    bars = Bars("bytes read and written once, share of copy")
    for lengths in (*PREFILLS, RAGGED):
        shape = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else "ragged"
        case = chunk_case(lengths)
        expected = expected_chunks(case)
        wrong = checked(triton_chunks.chunk_delta_rule, case, expected, "out", "recurrent_state")
        moved = case["qkv"].nbytes + case["out"].nbytes + 2 * len(lengths) * STATE_NUMBERS * 4
        call, note = None, ""
        if peer and shape != "ragged":
            call = peer_chunks(case)  # before ours is timed, which updates the states of the case
            out, state = call()
            theirs = {"out": out.view_as(expected["out"]), "recurrent_state": expected["recurrent_state"].clone()}
            theirs["recurrent_state"][case["state_read"]] = state.transpose(-1, -2)
            note = f", error {error(theirs, expected, 'out', 'recurrent_state'):.1e}"
        us = eager_us(lambda case=case: triton_chunks.chunk_delta_rule(**case))
        if call is not None:
            peer_us = eager_us(call)
            note = f"  fla {peer_us:.1f} us{note}: ours is {peer_us / us:.2f}x faster"
        report(bars, f"chunk_delta_rule {shape}", us, moved / bandwidth * 1e6, wrong, note)
    for lengths in ([4096] * 4, RAGGED):
        case = conv_case(lengths)
        small = conv_case([67, 2, 130])
        expected = widened(small)
        reference.causal_conv(**expected)
        wrong = checked(triton_conv.causal_conv, small, expected, "out", "conv_state")
        us = eager_us(lambda case=case: triton_conv.causal_conv(**case))
        report(bars, f"causal_conv of {sum(lengths)} tokens", us, 2 * case["x"].nbytes / bandwidth * 1e6, wrong)
    print(bars, flush=True)
    for lengths in PREFILLS:
        case = chunk_case(lengths)
        ours = launches(lambda case=case: triton_chunks.chunk_delta_rule(**case))
        print(f"kernels of {len(lengths)} x {lengths[0]}: {ours}", flush=True)


def prefill_graphs() -> None:
    """Chunks of both sides as replays of a graph."""
    for lengths in PREFILLS:
        case = chunk_case(lengths)
        us, peer_us = (
            graph_us([lambda case=case: triton_chunks.chunk_delta_rule(**case)]),
            graph_us([peer_chunks(case)]),
        )
        name = f"chunk_delta_rule {len(lengths)} x {lengths[0]}, graphs"
        print(f"{name:42s} {us:8.1f} us  fla {peer_us:.1f} us: ours is {peer_us / us:.2f}x faster", flush=True)


def decode(bandwidth: float, peer: bool) -> None:
    """The whole decode update."""
    bars = Bars("bytes read and written once, share of copy")
    for rows, tokens, state_dtype in DECODES:
        name = str(state_dtype).removeprefix("torch.")
        small = decode_case(min(rows, 8), tokens, state_dtype)
        expected = widened(small)
        reference.decode(**expected)
        wrong = checked(triton_decode.decode, small, expected, "out", "conv_state", "recurrent_state")
        state_bytes = rows * STATE_NUMBERS * state_dtype.itemsize * (1 + tokens)
        cases = [decode_case(rows, tokens, state_dtype) for _ in range(max(1, 2**28 // state_bytes))]
        us = graph_us([lambda case=case: triton_decode.decode(**case) for case in cases])
        rest = rows * CHANNELS * 2 * ((TAPS - 1) * (1 + tokens) + tokens) + rows * tokens * VALUE_DIM * 2
        note = f"  state traffic {state_bytes / us * 1e-6:.2f} TB/s = {state_bytes / us * 1e6 / bandwidth:.0%}"
        if peer and tokens == 1 and state_dtype == torch.float32:
            call = peer_recurrence(rows)
            graph, eager = graph_us([call]), eager_us(call)
            note += f"  fla's kernel alone {graph:.1f} us, called eagerly {eager:.1f}: {graph / us:.2f}x"
        report(bars, f"decode {rows} x {tokens}, {name} state", us, (state_bytes + rest) / bandwidth * 1e6, wrong, note)
    print(bars, flush=True)


if __name__ == "__main__":
    seed = int(time.time())
    torch.manual_seed(seed)
    device_bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {seed}, "
          f"copy {device_bandwidth / 1e12:.2f} TB/s")  # fmt: skip
    with_peer = has_peer()
    decode(device_bandwidth, with_peer)
    prefill(device_bandwidth, with_peer)
    if with_peer:
        prefill_graphs()
