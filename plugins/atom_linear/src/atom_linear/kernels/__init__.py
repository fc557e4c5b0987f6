"""Kernels of `core.linear_row`."""
