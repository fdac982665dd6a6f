"""What the controller looks at: the budget as it is now, the stages' memory, the build's other processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fewjobs.budget import read_budget
from fewjobs.client import Client
from fewjobs.sample import Sampler, children, descendants, has_pager, name_of
from fewjobs.stage import Stage

COMPILERS = {
    "cc1",
    "cc1plus",
    "cicc",
    "ptxas",
    "cudafe++",
    "lto1",
    "nvlink",
    "clang",
    "clang++",
    "rustc",
    "ld",
}
UNCAUGHT_BYTES = 128 * 2**20  # preprocessors, which are let through, stay below
RESERVE_SHARE, RESERVE_BYTES = 0.05, 256 * 2**20  # of the machine, left to everybody else


class BudgetWatch:
    """The memory that the whole build may have: what is left now, and what it has already.

    Args:
        given_bytes: the user's own limit.
        root: where ``proc`` and ``sys`` are.
        environ: where Slurm's variables are.
    """

    def __init__(
        self, given_bytes: int | None = None, root: Path = Path("/"), environ: Mapping[str, str] | None = None
    ) -> None:
        self.given_bytes, self.root, self.environ = given_bytes, root, environ
        self.why = "--memory"
        self.fixed = given_bytes is not None

    def now(self, ours_bytes: int) -> int:
        """The budget at this moment; ``ours_bytes`` is what the build holds and could give back."""
        budget = read_budget(root=self.root, environ=self.environ)
        shared = [limit for limit in budget.limits if not limit.per_process]
        if not shared:
            return self.given_bytes or 2**62
        tightest = shared[0]
        reserve = min(RESERVE_BYTES, int(tightest.limit_bytes * RESERVE_SHARE))
        left = max(0, tightest.available_bytes + ours_bytes - reserve)
        if self.given_bytes is not None and self.given_bytes <= left:
            self.why, self.fixed = "--memory", True
            return self.given_bytes
        # What a limit leaves when nobody else is there does not change; what others leave may.
        self.why = f"{tightest.name} ({tightest.where})"
        self.fixed = self.given_bytes is not None and left >= 0.9 * tightest.limit_bytes
        return left


class Others:
    """The processes of the build that are no stage: build tools, Python, compilers that were not caught."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = Sampler()
        self.rss_bytes = 0
        self.uncaught: set[str] = set()

    def scan(self, launchers: set[int], groups: Mapping[int, Client]) -> None:
        """Add up everybody below us who is neither launcher nor stage."""
        total, alive = 0, set()
        for pid in [os.getpid(), *descendants(os.getpid())]:
            if pid in launchers:
                continue
            group = _group(pid)
            client = groups.get(group)
            if client is not None and client.stage is not None:
                continue
            memory = self._sampler.memory(pid)
            if memory is None:
                continue
            alive.add(pid)
            total += memory.anon
            if memory.anon > UNCAUGHT_BYTES and (name := name_of(pid)) in COMPILERS:
                self.uncaught.add(name)
                total += memory.rss - memory.anon
        self._sampler.keep_only(alive)
        self.rss_bytes = total

    def forget(self, pid: int) -> None:
        """A process has become part of a stage."""
        self._sampler.forget(pid)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def members(pid: int) -> list[int]:
    """A stage's processes."""
    return [pid, *descendants(pid)] if children(pid) else [pid]


def sample_stage(sampler: Sampler, stage: Stage, now_s: float, *, look: bool) -> None:
    """Read the memory of a stage's processes; ``look`` for new ones among them."""
    if not stage.pid:
        return
    held = stage.memory
    fresh_look = look or not held.members or now_s - stage.times.started_s < 0.3 or held.rss_bytes < 8 * 2**20
    if fresh_look:
        fresh = members(stage.pid)
        for gone in set(held.members) - set(fresh):
            sampler.forget(gone)
        held.members = fresh
    rss = anon = largest = data = 0
    leaf = held.leaf
    for pid in held.members:
        memory = sampler.memory(pid)
        if memory is None:
            continue
        rss, anon = rss + memory.rss, anon + memory.anon
        if memory.data > largest:
            largest, leaf, data = memory.data, pid, memory.data
    if leaf != held.leaf or (not stage.paging.can_page and fresh_look and rss > 4 * 2**20):
        held.leaf, stage.paging.can_page = leaf, has_pager(leaf)
    held.rss_bytes, held.anon_bytes = rss, anon
    if stage.predicted.cpu_s and stage.predicted.parts:
        stage.times.used_cpu_s = max(stage.times.used_cpu_s, sampler.cpu_seconds(held.members))
    stage.paging.lowest_bytes = min(stage.paging.lowest_bytes, anon)
    size = rss
    if stage.was_paged:
        # Once something was paged out, resident memory says little: then the private addresses count.
        size = max(rss, data + held.file_bytes)
    else:
        held.file_bytes = max(held.file_bytes, rss - anon)
    held.sized(now_s, size)
    held.peak_bytes = max(held.peak_bytes, rss)
    held.note(now_s, rss)
