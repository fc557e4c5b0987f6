"""Gated delta net linear attention: its layers, its per-request state, its ops and kernels."""
