"""MiMo-V2 attention: its layers, its paged blocks and per-request rings, its ops and kernels."""
