"""Nothing but a kernel for another plugin's op: `mha.prefill` by torch's fused attention."""
