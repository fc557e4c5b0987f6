"""Run every kernel for CUDA of some plugins once on the small sample inputs of their ops, for compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/gpu_sanitize.py mha mimo
    compute-sanitizer --tool racecheck python benchmarks/gpu_sanitize.py mha mimo

The last line of compute-sanitizer's output counts what it found; this script's own counts the calls.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(path) for path in sorted((ROOT / "plugins").glob("*/src")))]

from atom_core.plugin.ops import load_function  # noqa: E402


def main(names: list[str]) -> None:
    """Call the kernels of the plugins `atom_NAME`, in bfloat16.

    Raises:
        SystemExit: a plugin has no kernel for CUDA, so that nothing would be checked.
    """
    device = torch.device("cuda")
    for name in names:
        ops = import_module(f"atom_{name}.ops")
        kernels = [kernel for kernel in ops.KERNELS if kernel.name not in ("torch_cpu", "reference")]
        if not kernels:
            raise SystemExit(f"atom-{name} has no kernels for CUDA here; is triton installed?")
        samples = {op.name: op.sample_inputs for op in ops.OPS}
        for kernel in kernels:
            inputs = load_function(samples[kernel.op])(device, torch.bfloat16, 1)
            for sample in inputs:
                load_function(kernel.function)(**sample)
            torch.cuda.synchronize()
            print(f"{kernel.op} {kernel.name}: {len(inputs)} calls", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["mha", "mimo"])
