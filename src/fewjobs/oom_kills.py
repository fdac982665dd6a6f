"""How many processes the kernel has killed because memory was full; the difference tells why one is gone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fewjobs.budget import cgroup_folders

_COUNTERS = {"v1": "memory.oom_control", "v2": "memory.events"}  # in both a line "oom_kill N"


@dataclass(frozen=True)
class OomKills:
    """Counts since the system's start, or between two moments; None: this system does not count.

    Attributes:
        groups: in our cgroups (a container's, a job's), which belong to us and what stands beside us there.
        machine: on the whole machine, in whatever group.
    """

    groups: int | None
    machine: int | None

    def since(self, before: OomKills) -> OomKills:
        """What was added."""
        return OomKills(_less(self.groups, before.groups), _less(self.machine, before.machine))

    def reason(self) -> str:
        """What a difference says of a process that SIGKILL has ended meanwhile, as part of a sentence."""
        if self.groups:
            return "as the memory of its job or container (its cgroup) was full: the kernel says so"
        if self.machine:
            return (
                "perhaps because the machine's memory was full: the kernel has killed"
                f" {'a process' if self.machine == 1 else f'{self.machine} processes'} for that meanwhile"
            )
        if self.machine is None and self.groups is None:
            return "by somebody, or for want of memory (this system does not tell which)"
        return "from outside: the kernel has killed nothing for want of memory"


UNKNOWN = OomKills(None, None)


def oom_kills(root: Path = Path("/")) -> OomKills:
    """Read the counters below ``root``."""
    groups = [_count(root / f.lstrip("/") / _COUNTERS[version]) for version, f in cgroup_folders(root)]
    counts = [count for count in groups if count is not None]
    return OomKills(sum(counts) if counts else None, _count(root / "proc/vmstat"))


def _count(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


__all__ = ["UNKNOWN", "OomKills", "oom_kills"]
