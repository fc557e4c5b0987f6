"""Run every kernel for CUDA of some plugins or ops once on the small sample inputs of the ops, for compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/gpu_sanitize.py mha mimo
    compute-sanitizer --tool racecheck python benchmarks/gpu_sanitize.py mla.decode gdn

Needs the plugins installed, or their metadata on PYTHONPATH. The last line of compute-sanitizer's output counts what it
found; this script's own counts the calls.
"""

from __future__ import annotations

import sys
from typing import Any

import gpu_gdn
import torch
from gpu_mla import LATENT, SCALING, Rows

from atom_core.plugin import Kernel, Op
from atom_core.plugin.ops import load_function
from atom_core.plugin.registry import PluginRegistry
from atom_mimo.kernels import samples as mimo_samples

CUDA = torch.device("cuda")
NOT_OURS = ("reference", "torch", "torch_cpu", "sdpa", "cudnn")
"""Kernels that call torch's alone."""


def inputs_of(op: Op, kernel: Kernel) -> list[dict[str, Any]]:
    """Sample inputs in bfloat16, made anew for each kernel; of real sizes for what runs with no others."""
    samples = list(load_function(op.sample_inputs)(CUDA, torch.bfloat16, 1))
    if op.name == "gdn.chunk_delta_rule":
        return [*samples, gpu_gdn.chunk_case([300, 70])]
    if kernel.name != "hopper":
        return samples
    if op.name == "mimo.ring_prefill":
        case = mimo_samples.Case(
            [200, 3, 0, 70, 16], [21, 0, 5, 1000, 127], window=128, spare=1, before=3, after=5, num_heads=8,
            num_kv_heads=1, head_dim=192, v_head_dim=128,
        )  # fmt: skip
        return [mimo_samples.attention_case(case, CUDA, torch.bfloat16, seed=1)]
    rows = Rows([700, 300], heads=64, block_size=16)
    decode = {**rows.decode_arguments(), **rows.hosts(), "scaling": SCALING, "value_dim": LATENT}
    if op.name == "mla.decode":
        return [decode]
    chosen = torch.stack([torch.randperm(300, device=CUDA)[:128] for _ in rows.lens]).to(torch.int32)
    return [{**decode, "selected": chosen}]


def main(names: list[str]) -> None:
    """Call the kernels of plugins, or of single ops.

    Raises:
        SystemExit: there is no kernel for CUDA, so that nothing would be checked.
    """
    table = PluginRegistry.discover(only=None).kernel_table()
    for name in names:
        found = [
            (op, kernel)
            for op_name, (op, _) in table.ops.items()
            for kernel, _ in table.kernels[op_name]
            if name in (op_name, op_name.partition(".")[0]) and kernel.name not in NOT_OURS
        ]
        if not found:
            raise SystemExit(f"{name} has no kernels for CUDA here; is triton installed?")
        for op, kernel in found:
            samples = inputs_of(op, kernel)
            for sample in samples:
                load_function(kernel.function)(**sample)
            torch.cuda.synchronize()
            print(f"{op.name} {kernel.name}: {len(samples)} calls", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["mha", "mimo"])
