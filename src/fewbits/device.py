"""What a device can do, asked once and passed on as a value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import psutil
import torch

from fewbits.errors import BadInput, Unsupported

_NEEDS = {
    "bfloat16": (8, 0),
    "float8": (8, 9),
    "float4": (10, 0),
}  # lowest capability whose units multiply these


@dataclass(frozen=True, kw_only=True)
class Device:
    """Facts about one device.

    Attributes:
        type: "cpu" or "cuda".
        name: as the driver or the machine calls it.
        memory_bytes: all of its memory.
        capability: CUDA compute capability, (9, 0) for Hopper; None for a CPU.
        multiprocessors: 0 for a CPU.
        shared_memory_bytes: what one program may take; 0 for a CPU.
    """

    type: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    shared_memory_bytes: int = 0

    def runs(self, dtype: str) -> bool:
        """Whether products in "bfloat16", "float8" or "float4" run here; a CPU runs every reference."""
        return self.capability is None or self.capability >= _NEEDS[dtype]

    def require(self, dtype: str, what: str) -> None:
        """Refuse ``what`` if it multiplies in a ``dtype`` that this device does not run.

        Raises:
            Unsupported: it does not; the message names what is needed and the way out.
        """
        if not self.runs(dtype) and self.capability is not None:
            (need_major, need_minor), (major, minor) = _NEEDS[dtype], self.capability
            raise Unsupported(
                f"{what} needs compute capability {need_major}.{need_minor} or later for its {dtype} "
                f"products; this GPU ({self.name}) has {major}.{minor}: choose another recipe, or "
                'device="cpu" for the reference.'
            )


def lowest_capability(dtype: str) -> tuple[int, int]:
    """The first compute capability whose units multiply "bfloat16", "float8" or "float4"."""
    return _NEEDS[dtype]


def pick(device: str | torch.device | None = None) -> torch.device:
    """A device by name; None or "auto" takes the current CUDA device where there is one, else the CPU.

    Raises:
        BadInput: there is no such kind of device.
        Unsupported: there is no CUDA device, or none with this index.
    """
    if device is None or device == "auto":
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise BadInput(f'{device!r} is no device: write "auto", "cpu", "cuda" or "cuda:1".') from None
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count <= (chosen.index or 0):
            raise Unsupported(
                f'device {str(chosen)!r} was asked for, but {count} CUDA devices are here: use "cpu".'
            )
    return chosen


def describe(device: str | torch.device | None = None) -> Device:
    """The facts about a device that `pick` accepts.

    Raises:
        Unsupported: fewbits knows nothing about devices of this kind.
    """
    return _describe(pick(device))


@lru_cache(maxsize=64)
def _describe(device: torch.device) -> Device:
    if device.type == "cpu":
        return Device(type="cpu", name="CPU", memory_bytes=psutil.virtual_memory().total)
    if device.type != "cuda":
        raise Unsupported(f'fewbits runs on CUDA devices and CPUs, not on {device.type!r}: use device="cpu".')
    facts = torch.cuda.get_device_properties(device)
    return Device(
        type="cuda",
        name=facts.name,
        memory_bytes=facts.total_memory,
        capability=(facts.major, facts.minor),
        multiprocessors=facts.multi_processor_count,
        shared_memory_bytes=facts.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )
