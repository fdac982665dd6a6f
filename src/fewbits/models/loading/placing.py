"""Where a model is loaded to, and in which dtype, from what the caller says."""

from __future__ import annotations

from typing import Any

import torch


def device_map_of(device_map: Any) -> Any:
    """One GPU if there is one; without any, the names that mean "spread over GPUs" mean the CPU."""
    if torch.cuda.is_available():
        return {"": torch.cuda.current_device()} if device_map is None else _as_map(device_map)
    return (
        {"": "cpu"}
        if device_map in (None, "auto", "sequential", "balanced", "balanced_low_0")
        else _as_map(device_map)
    )


def _as_map(device_map: Any) -> Any:
    spread = isinstance(device_map, dict) or device_map in (
        "auto",
        "sequential",
        "balanced",
        "balanced_low_0",
    )
    return device_map if spread else {"": device_map}


def dtype_of(dtype: Any, device_map: Any) -> Any:
    """The dtype of what is not packed: the one asked for; else "auto" on a CPU, 16 bits on a GPU."""
    if dtype is not None:
        return dtype
    places = set(device_map.values()) if isinstance(device_map, dict) else {"cuda"}
    if places <= {"cpu"}:
        return "auto"
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def one_gpu(device_map: Any) -> torch.device | None:
    """The GPU on which a device map places all of a model, if it does."""
    places = set(device_map.values()) if isinstance(device_map, dict) else set()
    if len(places) != 1 or not torch.cuda.is_available():
        return None
    (place,) = places
    if isinstance(place, str) and not place.startswith("cuda"):
        return None
    device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
