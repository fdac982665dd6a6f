"""Memory that is free on a device."""

from __future__ import annotations

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """What new tensors may take: on a GPU what nobody has and what torch has in store; else main memory."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    in_store = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + in_store
