"""Checks of the machine: processor, memory, temporary folder, shared memory, disk, limits of a process."""

from __future__ import annotations

import re

from fewbits.doctor.host import Host
from fewbits.words import size
from fewjobs import doctor
from fewjobs.finding import Finding

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
    return doctor.memory(host.root, host.environ)


def temporary_folder(host: Host) -> Finding:
    """Whether temporary files live in memory."""
    return doctor.temporary_folder(host.root, host.environ)


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
    limits = {
        label: int(match[1])
        for label in ("Max open files", "Max processes", "Max address space", "Max data size")
        if (match := re.search(rf"^{label}\s+(\d+)", text, re.MULTILINE)) is not None
    }
    files, processes = limits.get("Max open files", 2**20), limits.get("Max processes", 2**20)
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
    if "Max address space" in limits:
        return Finding(
            "ulimit",
            "warning",
            f"a process may map {size(limits['Max address space'])} of addresses only",
            "CUDA reserves far more addresses than it uses, and fails to start.",
            "Lift it: ulimit -v unlimited; to bound real memory use ulimit -d, or a cgroup.",
        )
    return Finding("ulimit", "ok", f"{files} open files, {processes} processes")
