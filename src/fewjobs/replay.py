"""A measured build run again on paper: with so many jobs and nvcc threads, how long, and how much memory.

`replay` does what ninja does, with no eye on memory: it gives the MAX_JOBS and NVCC_THREADS that fit. `plan`
does what `fewbits build` does. Processors are shared evenly when more run than there are; a stage's memory
follows its measured curve, of which each eighth counts with its highest point.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fewjobs.schedule import admit
from fewjobs.stage import Stage, State

PARTS = 8
MOST_JOBS = 64
THREADS = (1, 2, 4)


class Outcome(NamedTuple):
    """What a replay gives."""

    seconds: float
    peak_bytes: int


class Advice(NamedTuple):
    """The settings that fit in a memory."""

    memory_bytes: int
    jobs: int
    threads: int
    seconds: float
    peak_bytes: int


@dataclass
class Item:
    """One measured stage: its length, and the highest memory in each eighth of it."""

    unit: str
    arch: str
    name: str
    seconds: float
    parts: tuple[int, ...]
    order: float

    @property
    def peak_bytes(self) -> int:
        """The highest of all."""
        return max(self.parts)


@dataclass
class Unit:
    """The stages of one unit: before, between (a chain for each architecture), after."""

    before: list[Item] = field(default_factory=list)
    chains: list[list[Item]] = field(default_factory=list)
    after: list[Item] = field(default_factory=list)


def items_of(profile: dict[str, Any]) -> list[Item]:
    """The stages that were measured to their end."""
    items = []
    for stage in profile["stages"]:
        if stage["code"] != 0 or stage["ended_s"] <= stage["started_s"]:
            continue
        seconds = max(0.001, stage["ended_s"] - stage["started_s"] - stage["paused_s"])
        peak = max(1, int(stage["peak_bytes"]))
        disturbed = stage["paused_s"] > 0 or stage["pageouts"] or stage["hibernations"]
        parts = _ramp(peak) if disturbed else _parts(stage, peak)
        items.append(Item(stage["unit"], stage["arch"], stage["stage"], seconds, parts, stage["queued_s"]))
    return sorted(items, key=lambda item: item.order)


def _ramp(peak: int) -> tuple[int, ...]:
    return tuple(peak * (i + 1) // PARTS for i in range(PARTS))


def _parts(stage: dict[str, Any], peak: int) -> tuple[int, ...]:
    length = stage["ended_s"] - stage["started_s"]
    highest = [0.0] * PARTS
    for at, held in stage["curve"]:
        part = min(PARTS - 1, max(0, int((at - stage["started_s"]) / length * PARTS)))
        highest[part] = max(highest[part], held)
    for i in range(1, PARTS):  # a part without a sample is as the one before
        highest[i] = highest[i] or highest[i - 1]
    top = max(highest)
    if top <= 0:
        return (peak,) * PARTS
    # The exact peak is known from the kernel; samples come every twentieth of a second.
    return tuple(max(1, int(h * max(1.0, peak / top))) for h in highest)


def units_of(items: Sequence[Item]) -> list[Unit]:
    """Stages by unit, in the order in which the units began."""
    units: dict[str, Unit] = {}
    for item in items:
        unit = units.setdefault(item.unit, Unit())
        if item.arch:
            chain = next((c for c in unit.chains if c[0].arch.rstrip("af") == item.arch.rstrip("af")), None)
            if chain is None:
                unit.chains.append([item])
            else:
                chain.append(item)
        elif unit.chains:
            unit.after.append(item)
        else:
            unit.before.append(item)
    return list(units.values())


class _Machine:
    """Work in progress: every running item advances at the rate that the processors allow."""

    def __init__(self, cpus: int) -> None:
        self.cpus = cpus
        self.now = self.done = 0.0  # time, and work that each running item has done since the beginning
        self.memory = self.peak = self.count = 0
        self.events: list[tuple[float, int, Item, int, Any]] = []
        self.serial = 0

    def start(self, item: Item, tag: Any) -> None:
        self.count += 1
        self.memory += item.parts[0]
        self._next(item, 1, tag)
        self.peak = max(self.peak, self.memory)

    def _next(self, item: Item, part: int, tag: Any) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.done + item.seconds / PARTS, self.serial, item, part, tag))

    def step(self) -> Any | None:
        """Go on to the next change; the tag of an item that has ended, or None."""
        at, _, item, part, tag = heapq.heappop(self.events)
        self.now += (at - self.done) / min(1.0, self.cpus / self.count)
        self.done = at
        self.memory -= item.parts[part - 1]
        if part == PARTS:
            self.count -= 1
            return tag
        self.memory += item.parts[part]
        self.peak = max(self.peak, self.memory)
        self._next(item, part + 1, tag)
        return None


@dataclass(eq=False)
class _Job:
    """A unit on its way through one of ninja's jobs."""

    unit: Unit
    threads: int
    phase: int = 0
    running: int = 0
    at: int = 0

    def ready(self) -> list[tuple[Item, list[Item]]]:
        """What may start now: an item, and what follows it in its own chain."""
        if self.running and self.phase != 1:
            return []
        if self.phase == 0:
            if self.at < len(self.unit.before):
                self.at += 1
                return [(self.unit.before[self.at - 1], [])]
            self.phase, self.at = 1, 0
        if self.phase == 1:
            room = self.threads - self.running
            chains = self.unit.chains[self.at : self.at + room]
            self.at += len(chains)
            if chains or self.running:
                return [(chain[0], chain[1:]) for chain in chains]
            self.phase, self.at = 2, 0
        if self.at < len(self.unit.after):
            self.at += 1
            return [(self.unit.after[self.at - 1], [])]
        return []


def replay(units: Sequence[Unit], *, jobs: int, threads: int = 1, cpus: int = 1) -> Outcome:
    """What ``ninja -j`` would do with these units, ``nvcc --threads`` included."""
    machine, waiting = _Machine(cpus), list(reversed(units))
    for _ in range(jobs):
        _next_job(machine, waiting, threads)
    while machine.events:
        ended = machine.step()
        if ended is None:
            continue
        job, rest = ended
        if rest:
            machine.start(rest[0], (job, rest[1:]))
            continue
        job.running -= 1
        if not _feed(machine, job):
            _next_job(machine, waiting, threads)
    return Outcome(machine.now, machine.peak)


def _feed(machine: _Machine, job: _Job) -> bool:
    for item, rest in job.ready():
        job.running += 1
        machine.start(item, (job, rest))
    return job.running > 0


def _next_job(machine: _Machine, waiting: list[Unit], threads: int) -> None:
    while waiting:
        if _feed(machine, _Job(waiting.pop(), threads)):
            return


def recommend_each(units: Sequence[Unit], memories: Iterable[int], *, cpus: int) -> list[Advice | None]:
    """`recommend` for several sizes of memory; each setting is replayed once for all of them."""
    replayed: dict[tuple[int, int], Outcome] = {}

    def outcome_of(jobs: int, threads: int) -> Outcome:
        if (jobs, threads) not in replayed:
            replayed[jobs, threads] = replay(units, jobs=jobs, threads=threads, cpus=cpus)
        return replayed[jobs, threads]

    return [_fastest(units, memory_bytes, outcome_of) for memory_bytes in memories]


def recommend(units: Sequence[Unit], memory_bytes: int, *, cpus: int) -> Advice | None:
    """The fastest settings whose replay fits, where one job more does not; None: nothing fits."""
    return recommend_each(units, [memory_bytes], cpus=cpus)[0]


def _fastest(
    units: Sequence[Unit], memory_bytes: int, outcome_of: Callable[[int, int], Outcome]
) -> Advice | None:
    best: Advice | None = None
    several = any(len(unit.chains) > 1 for unit in units)
    for threads in THREADS if several else THREADS[:1]:
        last: Outcome | None = None
        jobs = 0
        while jobs < min(MOST_JOBS, len(units)):
            outcome = outcome_of(jobs + 1, threads)
            if outcome.peak_bytes > memory_bytes:
                break
            last, jobs = outcome, jobs + 1
        if last is not None and (best is None or last.seconds < best.seconds * 0.999):
            best = Advice(memory_bytes, jobs, threads, last.seconds, last.peak_bytes)
    return best


def plan(items: Sequence[Item], *, budget_bytes: int, slots: int) -> Outcome:
    """What ``fewbits build`` would do, knowing the peaks."""
    machine = _Machine(slots)
    waiting: list[tuple[Stage, list[Item]]] = []
    present: list[Stage] = []
    chains: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        chains.setdefault((item.unit, ""), []).append(item)

    def offer(chain: list[Item]) -> None:
        if chain:
            stage = Stage(chain[0].unit, chain[0].arch, chain[0].name)
            stage.predicted.bytes = chain[0].peak_bytes
            waiting.append((stage, chain))

    for chain in chains.values():
        offer(chain)
    while waiting or machine.events:
        chosen = admit(
            [stage for stage, _ in waiting],
            present,
            budget_bytes=budget_bytes,
            other_bytes=0,
            slots=slots,
            now_s=0.0,
        )
        for entry in [e for e in waiting if e[0] in chosen]:
            waiting.remove(entry)
            entry[0].state = State.RUNNING
            present.append(entry[0])
            machine.start(entry[1][0], entry)
        ended = machine.step()
        if ended is not None:
            present.remove(ended[0])
            offer(ended[1][1:])
    return Outcome(machine.now, machine.peak)


def lower_bound(items: Sequence[Item], *, budget_bytes: int, slots: int) -> float:
    """Seconds that no schedule can beat: by processors, by the longest chain, by memory times time."""
    chains: dict[str, float] = {}
    for item in items:
        chains[item.unit] = chains.get(item.unit, 0.0) + item.seconds
    work = sum(item.seconds for item in items) / slots
    area = sum(item.seconds * sum(item.parts) / PARTS for item in items) / budget_bytes
    return max(work, area, max(chains.values(), default=0.0))
