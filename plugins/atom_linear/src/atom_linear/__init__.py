"""Kernels for the core's linear layers: `plugin` brings them, `kernels` holds them."""
