"""What has become of another process of this machine, without asking it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

_BOOT_ID, _NUMBERS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Place:
    """Where a process is to be found.

    Attributes:
        pid: its number.
        began: when it began, in seconds since 1970: numbers come again.
        machine: what tells one running kernel, and one space of process numbers in it, from all others;
            empty where the system does not say.
    """

    pid: int
    began: float
    machine: str

    @classmethod
    def here(cls) -> Place:
        """Of this process."""
        machine = ""
        with suppress(OSError):
            machine = f"{_BOOT_ID.read_text().strip()} {_NUMBERS.readlink()}"
        return cls(os.getpid(), psutil.Process().create_time(), machine)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def fate(self) -> str:
        """``gone``, ``stopped``, or nothing, which a process on another machine always gives."""
        if not self.machine or self.machine != self.here().machine:
            return ""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.began) > 1 or process.status() == psutil.STATUS_ZOMBIE:
                return "gone"
            return "stopped" if process.status() == psutil.STATUS_STOPPED else ""
        except psutil.NoSuchProcess:
            return "gone"
        except psutil.Error:
            return ""


__all__ = ["Place"]
