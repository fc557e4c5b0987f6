"""Kernels of the `mha.*` ops: `reference` defines them, `torch_cpu` is fast on the CPU, `samples` makes inputs."""
