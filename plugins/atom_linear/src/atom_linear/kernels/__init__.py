"""Kernels of `core.linear_row` and `core.expert_rows`."""
