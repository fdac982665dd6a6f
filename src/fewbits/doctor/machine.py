"""Checks of the machine: processor, memory, temporary folder, shared memory, disk, limits of a process."""

from __future__ import annotations

import re

from fewbits.doctor.finding import Finding
from fewbits.doctor.host import Host
from fewbits.words import size
from fewjobs import read_budget
from fewjobs.errors import Unsupported

# The largest single compiler process that we measured in Transformer Engine's sources: ptxas, sm_100a.
LARGEST_UNIT_BYTES = 6_200_000_000
LOW_SHM_BYTES = 2**30
LOW_DISK_BYTES, FULL_DISK_BYTES = 10 * 2**30, 2**30


def architecture(host: Host) -> Finding:
    """The processor."""
    if host.machine in ("x86_64", "aarch64"):
        return Finding("architecture", "ok", host.machine)
    return Finding(
        "architecture",
        "problem",
        f"the processor is {host.machine}",
        "torch with CUDA is published for x86_64 and aarch64 only.",
        "Use a machine with one of these.",
    )


def memory(host: Host) -> Finding:
    """The memory that may be used, and who limits it."""
    try:
        budget = read_budget(root=host.root, environ=host.environ)
    except Unsupported as error:
        return Finding("memory", "warning", "unknown", str(error))
    tightest = budget.binding
    each = " for each process" if tightest.per_process else ""
    what = f"{size(budget.available_bytes)} may be used{each}; the limit is the {tightest.name}'s"
    what += f", {size(tightest.limit_bytes)} ({tightest.where})"
    if budget.available_bytes < LARGEST_UNIT_BYTES:
        return Finding(
            "memory",
            "warning",
            what,
            "One compiler process of a CUDA library can need more: 6.2 GB, measured in Transformer Engine.",
            "Look for a wheel (fewbits doctor PACKAGE), or build for your own GPU's architecture only, with "
            "one job and NVCC_APPEND_FLAGS='--threads 1'; or ask whoever set the limit for more.",
        )
    if tightest.name == "machine":
        return Finding("memory", "ok", what)
    return Finding(
        "memory",
        "note",
        what,
        "Tools that read the machine's free memory do not see this limit and are killed.",
    )


def temporary_folder(host: Host) -> Finding:
    """Whether temporary files live in memory."""
    folder = host.environ.get("TMPDIR") or "/tmp"
    if not host.at(folder).is_dir():
        why = "Compilers and pip then fail, or write elsewhere than you think."
        return Finding("TMPDIR", "warning", f"{folder} is no folder", why, f"Make it: mkdir -p {folder}")
    kind = _file_system(host, folder)
    if kind not in ("tmpfs", "ramfs"):
        return Finding("TMPDIR", "ok", f"{folder} is on {kind or 'an unknown file system'}")
    return Finding(
        "TMPDIR",
        "warning",
        f"{folder} is on {kind}, which is memory",
        "What compilers write there counts against the memory: 240 MB for one unit were measured.",
        "Put TMPDIR on a disk before building: export TMPDIR=/var/tmp",
    )


def _file_system(host: Host, folder: str) -> str:
    """The kind of the file system with the longest mount point above a folder; the last mount wins."""
    best, kind = "", ""
    for line in host.read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        mount = fields[4].rstrip("/") if len(fields) > 4 else "?"
        if f"{folder}/".startswith(f"{mount}/") and len(mount) >= len(best):
            best, kind = mount, (after.split() or [""])[0]
    return kind


def shared_memory(host: Host) -> Finding:
    """The size of /dev/shm."""
    space = host.space("/dev/shm")
    why = "Data loaders with several workers, and NCCL between GPUs, pass their data through it."
    if space is None:
        return Finding("/dev/shm", "warning", "there is no /dev/shm", why, "Mount a tmpfs there.")
    if space[0] >= LOW_SHM_BYTES:
        return Finding("/dev/shm", "ok", f"{size(space[0])}, {size(space[1])} free")
    return Finding(
        "/dev/shm",
        "warning",
        f"{size(space[0])} only",
        why,
        "Start the container with more (docker run --shm-size=8g, or --ipc=host), or use num_workers=0.",
    )


def disk(host: Host) -> Finding:
    """Free space where builds, caches and runs write."""
    places = {"TMPDIR": host.environ.get("TMPDIR") or "/tmp", "home": host.environ.get("HOME") or "/"}
    spaces = {name: space for name, path in places.items() if (space := host.space(path)) is not None}
    if not spaces:
        return Finding("disk", "note", "free space is unknown")
    name = min(spaces, key=lambda key: spaces[key][1])
    free = spaces[name][1]
    what = f"{size(free)} free in {places[name]} ({name})"
    if free >= LOW_DISK_BYTES:
        return Finding("disk", "ok", what)
    return Finding(
        "disk",
        "problem" if free < FULL_DISK_BYTES else "warning",
        what,
        "Wheels, build folders, compiled kernels and checkpoints take gigabytes.",
        "Remove what is not needed (pip cache purge), or put TMPDIR and HOME's caches on a larger disk.",
    )


def process_limits(host: Host) -> Finding:
    """Open files, processes, and memory of one process."""
    text = host.read("/proc/self/limits")
    found = {
        label: int(match[1])
        for label in ("Max open files", "Max processes", "Max address space", "Max data size")
        if (match := re.search(rf"^{label}\s+(\d+)", text, re.MULTILINE)) is not None
    }
    files, processes = found.get("Max open files", 2**20), found.get("Max processes", 2**20)
    if files < 1024:
        return Finding(
            "ulimit",
            "warning",
            f"a process may open {files} files only",
            "Data loaders and large safetensors checkpoints open many.",
            "Raise it in the shell: ulimit -n $(ulimit -Hn)",
        )
    if processes < 256:
        return Finding(
            "ulimit",
            "warning",
            f"you may run {processes} processes and threads only",
            "Parallel builds and data loaders start many.",
            "Raise it in the shell: ulimit -u $(ulimit -Hu)",
        )
    if "Max address space" in found:
        return Finding(
            "ulimit",
            "warning",
            f"a process may map {size(found['Max address space'])} of addresses only",
            "CUDA reserves far more addresses than it uses, and fails to start.",
            "Lift it: ulimit -v unlimited; to bound real memory use ulimit -d, or a cgroup.",
        )
    return Finding("ulimit", "ok", f"{files} open files, {processes} processes")
