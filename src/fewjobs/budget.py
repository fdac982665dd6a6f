"""The memory that may really be used: the smallest of every limit that applies, minus what is charged to it.

The kernel kills at the first limit that is passed, whichever it is, so each one is read: what the machine has
available, every cgroup (v1 or v2) from ours up to the root, Slurm's allocation, the process limits, and the
figure that the user gave. Reading takes milliseconds and keeps nothing, so callers read again while they run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fewjobs.errors import BadInput, Unsupported

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as the largest multiple of a page below 2**63


@dataclass(frozen=True)
class Limit:
    """One bound on memory.

    Attributes:
        name: who sets it: "given", "machine", "cgroup v1", "cgroup v2", "Slurm", "RLIMIT_AS", "RLIMIT_DATA".
        where: the file, variable or flag that says so.
        limit_bytes: the bound itself; for the machine, all of its memory.
        used_bytes: what counts against it now and cannot be given back.
        per_process: each process may use this much, rather than all of them together.
    """

    name: str
    where: str
    limit_bytes: int
    used_bytes: int = 0
    per_process: bool = False

    @property
    def available_bytes(self) -> int:
        """What is left below the bound."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Budget:
    """What is left under all limits together; ``limits`` begins with the tightest."""

    limits: tuple[Limit, ...]

    @property
    def binding(self) -> Limit:
        """The limit that leaves the least."""
        return self.limits[0]

    @property
    def available_bytes(self) -> int:
        """The memory that may be used from now on."""
        return self.binding.available_bytes


def read_budget(
    *, given_bytes: int | None = None, root: Path = Path("/"), environ: Mapping[str, str] | None = None
) -> Budget:
    """Read every limit as it is now.

    Args:
        given_bytes: a bound of the user's own.
        root: where ``proc`` and ``sys`` are; another folder in tests.
        environ: where Slurm's variables are (default: this process's).
    """
    environ = os.environ if environ is None else environ
    limits = [
        *([] if given_bytes is None else [Limit("given", "--memory", given_bytes)]),
        *_machine(root),
        *_cgroups(root),
        *_slurm(root, environ),
        *_process_limits(root),
    ]
    if not limits:
        raise Unsupported(
            "this machine's memory cannot be read, as there is no /proc/meminfo; give a limit with --memory."
        )
    return Budget(tuple(sorted(limits, key=lambda limit: limit.available_bytes)))


def parse_bytes(text: str) -> int:
    """The bytes that "12G", "800 MiB" or "1073741824" mean; units are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None or float(match[1]) == 0:
        raise BadInput(f"{text!r} is not an amount of memory; write it as 12G, 800M or a number of bytes.")
    return int(float(match[1]) * _UNITS[match[2]])


def _machine(root: Path) -> Iterator[Limit]:
    text = _read(root / "proc/meminfo")
    kib = {m[1]: int(m[2]) for m in re.finditer(r"^([^:\n]+):\s+(\d+)", text, re.MULTILINE)}
    if "MemTotal" not in kib:
        return
    total = kib["MemTotal"]
    # Linux before 3.14 has no MemAvailable; tmpfs files count as Cached there, but cannot be given back.
    older = kib.get("MemFree", 0) + kib.get("Buffers", 0) + kib.get("Cached", 0) - kib.get("Shmem", 0)
    available = kib.get("MemAvailable", older)
    yield Limit("machine", "/proc/meminfo", total * 1024, (total - available) * 1024)


def _cgroups(root: Path) -> Iterator[Limit]:
    for version, folder in cgroup_folders(root):
        limit = _cgroup_limit(root, folder, version)
        if limit is not None:
            yield limit


def cgroup_folders(root: Path = Path("/")) -> Iterator[tuple[str, str]]:
    """Version ("v1", "v2") and folder of every cgroup that counts our memory, from ours to the top."""
    ours = dict(_our_cgroups(_read(root / "proc/self/cgroup")))
    for version, mounted_root, mount in _cgroup_mounts(_read(root / "proc/self/mountinfo")):
        if version not in ours:
            continue
        # In a container the path may be the host's: then the mount point is our own group.
        path = ours[version]
        inside = mounted_root == "/" or path == mounted_root or path.startswith(f"{mounted_root}/")
        steps = path[len(mounted_root.rstrip("/")) :].split("/") if inside else []
        names = [step for step in steps if step not in ("", "..")]
        for depth in range(len(names), -1, -1):
            yield version, "/".join((mount.rstrip("/"), *names[:depth]))


def _our_cgroups(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "v2", path
        elif "memory" in controllers.split(","):
            yield "v1", path


def _cgroup_mounts(text: str) -> Iterator[tuple[str, str, str]]:
    """(version, the cgroup that is mounted, where) for each hierarchy that can limit memory."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        mounted_root, mount = (_unescape(field) for field in fields[3:5])
        if kinds[0] == "cgroup2":
            yield "v2", mounted_root, mount
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            yield "v1", mounted_root, mount


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _cgroup_limit(root: Path, folder: str, version: str) -> Limit | None:
    here = root / folder.lstrip("/")
    bound_names = ("memory.limit_in_bytes",) if version == "v1" else ("memory.max", "memory.high")
    bounds = {name: _number(here / name) for name in bound_names}
    finite = {name: bound for name, bound in bounds.items() if bound is not None and bound < _UNLIMITED}
    if not finite:
        return None
    name = min(finite, key=lambda key: finite[key])
    used = _number(here / ("memory.usage_in_bytes" if version == "v1" else "memory.current")) or 0
    stat = dict(
        line.split()[:2] for line in _read(here / "memory.stat").splitlines() if len(line.split()) > 1
    )
    prefix = "total_" if version == "v1" else ""
    # File pages are dropped before anything is killed. Of those in use only half is counted on: a compiler
    # whose own code and headers are dropped reads them again and again.
    reclaimable = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0)) // 2
    return Limit(f"cgroup {version}", f"{folder}/{name}", finite[name], max(0, used - reclaimable))


def _slurm(root: Path, environ: Mapping[str, str]) -> Iterator[Limit]:
    """Slurm's allocation on this node; its variables are in MiB, and 0 means all of the node."""
    cpus = environ.get("SLURM_CPUS_ON_NODE", "1")
    gpus = environ.get("SLURM_GPUS_ON_NODE", "1")
    for variable, times in (
        ("SLURM_MEM_PER_NODE", "1"),
        ("SLURM_MEM_PER_CPU", cpus),
        ("SLURM_MEM_PER_GPU", gpus),
    ):
        mib, count = environ.get(variable, ""), times if times.isdigit() else "1"
        if mib.isdigit() and int(mib) > 0:
            used = _job_bytes(root, environ.get("SLURM_JOB_ID", ""))
            yield Limit("Slurm", variable, int(mib) * int(count) * 2**20, used)
            return


def _job_bytes(root: Path, job: str) -> int:
    """Resident memory of the processes of a Slurm job, which is what Slurm's own accounting sums."""
    if not job:
        return 0
    mark, pages = f"SLURM_JOB_ID={job}", 0
    for folder in (root / "proc").glob("[0-9]*"):
        if mark in _read(folder / "environ").split("\0"):
            sizes = _read(folder / "statm").split()
            pages += int(sizes[1]) if len(sizes) > 1 else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _process_limits(root: Path) -> Iterator[Limit]:
    text = _read(root / "proc/self/limits")
    for name, label in (("RLIMIT_AS", "Max address space"), ("RLIMIT_DATA", "Max data size")):
        match = re.search(rf"^{label}\s+(\d+)", text, re.MULTILINE)
        if match is not None:
            flag = "-v" if name == "RLIMIT_AS" else "-d"
            yield Limit(name, f"ulimit {flag}", int(match[1]), per_process=True)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """A file's text, or nothing where it is missing, forbidden, or goes while it is read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
