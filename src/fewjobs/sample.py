"""Memory of processes, read cheaply from /proc: a few microseconds each, twenty times a second."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
SIGURG_BIT = 1 << (23 - 1)


class Memory(NamedTuple):
    """What one process holds, in bytes."""

    rss: int
    anon: int
    data: int  # private writable addresses, touched or not, in memory or not


class Sampler:
    """Reads statm of many processes again and again, through files that stay open."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._clocks: dict[int, int] = {}

    def memory(self, pid: int) -> Memory | None:
        """The memory of a process, or None once it has gone."""
        try:
            file = self._files.get(pid)
            if file is None:
                file = self._files[pid] = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
            fields = os.pread(file, 128, 0).split()
        except OSError:
            self.forget(pid)
            return None
        if len(fields) < 6:
            self.forget(pid)
            return None
        resident, shared = int(fields[1]), int(fields[2])
        return Memory(
            resident * PAGE_BYTES, max(0, resident - shared) * PAGE_BYTES, int(fields[5]) * PAGE_BYTES
        )

    def forget(self, pid: int) -> None:
        """Close what was opened for a process."""
        for files in (self._files, self._clocks):
            file = files.pop(pid, None)
            if file is not None:
                os.close(file)

    def cpu_seconds(self, pids: Iterable[int]) -> float:
        """Processor time of processes, and of their children that have ended."""
        ticks = 0
        for pid in pids:
            try:
                file = self._clocks.get(pid)
                if file is None:
                    file = self._clocks[pid] = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
                text = os.pread(file, 512, 0)
            except OSError:
                self.forget(pid)
                continue
            ticks += sum(map(int, text[text.rfind(b")") + 2 :].split()[11:15]))
        return ticks / CLOCK_TICKS

    def keep_only(self, pids: Iterable[int]) -> None:
        """Close the files of all others."""
        for pid in (self._files.keys() | self._clocks.keys()) - set(pids):
            self.forget(pid)


def children(pid: int) -> list[int]:
    """The processes that a process has started, and that have not ended."""
    pids: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - the quicker one, twenty times a second
    except OSError:
        return pids
    for task in tasks:
        try:
            file = os.open(f"/proc/{pid}/task/{task}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            pids += map(int, os.read(file, 1 << 16).split())
        except OSError:
            pass
        finally:
            os.close(file)
    return pids


def descendants(pid: int) -> Iterator[int]:
    """All processes below one, the nearest first."""
    if not has_children_files():
        yield from _by_parents(pid)
        return
    waiting = children(pid)
    while waiting:
        child = waiting.pop(0)
        yield child
        waiting += children(child)


@cache
def has_children_files() -> bool:
    """Whether this kernel lists children (CONFIG_PROC_CHILDREN)."""
    return Path(f"/proc/self/task/{os.getpid()}/children").exists()


def _by_parents(pid: int) -> Iterator[int]:
    below: dict[int, list[int]] = {}
    for name in (entry.name for entry in Path("/proc").iterdir()):
        if name.isdigit():
            below.setdefault(parent(int(name)), []).append(int(name))
    waiting = list(below.get(pid, ()))
    while waiting:
        child = waiting.pop(0)
        yield child
        waiting += below.get(child, ())


def _stat(pid: int) -> list[bytes]:
    try:
        text = _read(f"/proc/{pid}/stat")
    except OSError:
        return []
    return text[text.rfind(b")") + 2 :].split()


def _read(path: str) -> bytes:
    """A small file of /proc: pathlib takes as long as the rest of a sample."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 1 << 14)
    finally:
        os.close(file)


def parent(pid: int) -> int:
    """The parent of a process, or 0."""
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def state(pid: int) -> str:
    """The state letter of a process: R, S, D, T, Z; "" once it has gone."""
    fields = _stat(pid)
    return fields[0].decode() if fields else ""


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of its children that have ended."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) / CLOCK_TICKS if len(fields) > 15 else 0.0


def name_of(pid: int) -> str:
    """The short name of a process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def own_peak_bytes() -> int:
    """The most that this process has held; getrusage would count the program that we were started from."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(text.partition("\nVmHWM:")[2].split(maxsplit=1)[0] or 0) * 1024


def has_pager(pid: int) -> bool:
    """Whether a process handles SIGURG, as one does that has loaded our pager."""
    try:
        text = _read(f"/proc/{pid}/status")
    except OSError:
        return False
    caught = text.partition(b"\nSigCgt:")[2].split(b"\n", 1)[0].strip()
    return bool(caught) and bool(int(caught, 16) & SIGURG_BIT)
