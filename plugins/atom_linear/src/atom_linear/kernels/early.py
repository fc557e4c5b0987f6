"""Whether a launch can begin while the one in front of it still runs (programmatic dependent launch).

A kernel that begins early waits for the launch in front of it before it reads what other kernels wrote, and lets the
next launch begin only after that: what begins then finds everything before the launch in front of it done.
"""

from __future__ import annotations

import torch

__all__ = ["can_start_early"]


def can_start_early(device: torch.device) -> bool:
    """Say whether a launch may begin early: in a captured step, on NVIDIA's devices from Hopper on."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and torch.cuda.is_current_stream_capturing()
    )
