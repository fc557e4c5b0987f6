"""Kernels of the `mla.*` ops: `reference` defines each op, `torch_cpu` is fast, `samples` makes test inputs."""

__all__: list[str] = []
