"""What happened in a build: stages, memory over time, every measure. Written as a profile, in JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fewjobs.request import Request
from fewjobs.stage import Stage
from fewjobs.whole_files import write_whole
from fewjobs.words import size

FORMAT = 1
MAX_EVENTS = 20_000
CURVE_POINTS = 120


@dataclass
class Trace:
    """The record of one build.

    Attributes:
        command: what was built.
        slots: stages at once, at most.
        toolkit: CUDA release, or "".
        epoch: the clock when it began.
    """

    command: Sequence[str]
    slots: int
    toolkit: str = ""
    log: Path | None = None
    epoch: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.time)
    stages: list[Stage] = field(default_factory=list)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    _memory: array[float] = field(default_factory=lambda: array("d"))
    _budget: array[float] = field(default_factory=lambda: array("d"))
    counts: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    _out: int = -1

    def add(self, stage: Stage) -> None:
        """A stage has asked to start."""
        self.stages.append(stage)

    def event(self, now_s: float, what: str, stage: Stage | None = None, note: str = "") -> None:
        """Something was done to a stage."""
        label = stage.label if stage is not None else note
        self.counts[what] = self.counts.get(what, 0) + 1
        if len(self.events) < MAX_EVENTS:
            self.events.append((round(now_s, 3), what, label))
        held = f" at {size(stage.memory.rss_bytes)}" if stage is not None and stage.memory.rss_bytes else ""
        self._write(f"{now_s:9.2f} s  {what}: {label}{held}")

    def from_cache(self, request: Request, now_s: float) -> None:
        """A result was found among those that are kept."""
        label = request.unit if request.is_driver else request.stage.label
        self.cached.append(label)
        self.event(now_s, "kept result", None, label)

    def ended(self, stage: Stage, now_s: float, why: str = "") -> None:
        """A stage is over."""
        if self.log is None:
            return
        how = why or ("done" if stage.code == 0 else f"failed with {stage.code}")
        self._write(
            f"{now_s:9.2f} s  {how}: {stage.label}, {stage.ran_s:.2f} s, peak "
            f"{size(stage.memory.peak_bytes)} (supposed {size(stage.predicted.bytes)}, "
            f"{stage.predicted.source})"
        )

    def say(self, text: str) -> None:
        """A line of the log that is about no stage."""
        self._write(f"{time.monotonic() - self.epoch:9.2f} s  {text}")

    def budget(self, now_s: float, budget_bytes: int, why: str) -> None:
        """The budget has changed."""
        self._write(f"{now_s:9.2f} s  budget: {size(budget_bytes)}, {why}")

    def note(self, now_s: float, used_bytes: int, budget_bytes: int, running: int) -> None:
        """A point of the whole build's memory."""
        self.peak_bytes = max(self.peak_bytes, used_bytes)
        if len(self._memory) >= 3:
            last_s, last = self._memory[-3], self._memory[-2]
            if now_s - last_s < 1.0 and abs(used_bytes - last) < 0.03 * max(used_bytes, last):
                return
        self._memory.extend((now_s, float(used_bytes), float(running)))
        if len(self._budget) < 2 or abs(self._budget[-1] - budget_bytes) > 0.01 * budget_bytes:
            self._budget.extend((now_s, float(budget_bytes)))

    def _write(self, line: str) -> None:
        if self.log is None:
            return
        try:
            if self._out < 0:
                self._out = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.write(self._out, f"{line}\n".encode(errors="replace"))
        except OSError:
            self.log = None

    def close(self) -> None:
        """Close the log."""
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def profile(self, *, code: int, budget_bytes: int, verdicts: Sequence[Any] = ()) -> dict[str, Any]:
        """Everything, for JSON."""
        now = time.monotonic() - self.epoch
        memory = list(self._memory)
        budget = list(self._budget)
        return {
            "format": FORMAT,
            "command": list(self.command),
            "folder": str(Path.cwd()),
            "began": round(self.began, 3),
            "seconds": round(now, 3),
            "exit_code": code,
            "machine": {
                "name": platform.node(),
                "architecture": platform.machine(),
                "cpus": len(os.sched_getaffinity(0)),
                "toolkit": self.toolkit,
            },
            "slots": self.slots,
            "budget_bytes": budget_bytes,
            "peak_bytes": self.peak_bytes,
            "facts": self.facts,
            "budget": [[round(t, 2), int(b)] for t, b in zip(budget[::2], budget[1::2], strict=True)],
            "memory": thin(
                [[round(t, 2), int(b)] for t, b in zip(memory[::3], memory[1::3], strict=True)], 4000
            ),
            "stages": [_stage(stage) for stage in self.stages],
            "kept": self.cached,
            "events": self.events,
            "counts": self.counts,
            "verdicts": [verdict.as_dict() for verdict in verdicts],
        }


def _stage(stage: Stage) -> dict[str, Any]:
    curve = [
        [round(t, 2), int(b)] for t, b in zip(stage.memory.curve[::2], stage.memory.curve[1::2], strict=True)
    ]
    return {
        "unit": stage.unit,
        "arch": stage.arch,
        "stage": stage.name,
        "predicted_bytes": stage.predicted.bytes,
        "predicted_from": stage.predicted.source,
        "peak_bytes": max(stage.memory.peak_bytes, stage.memory.most_bytes if stage.was_paged else 0),
        "resident_bytes": stage.memory.peak_bytes,
        "cpu_s": round(stage.times.cpu_s, 3),
        "queued_s": round(stage.times.queued_s, 3),
        "started_s": round(stage.times.started_s, 3),
        "ended_s": round(stage.times.ended_s, 3),
        "waited_s": round(stage.times.waited_s, 3),
        "paused_s": round(stage.times.paused_s, 3),
        "attempts": stage.counts.attempts,
        "pauses": stage.counts.pauses,
        "hibernations": stage.counts.hibernations,
        "pageouts": stage.counts.pageouts,
        "requeues": stage.counts.requeues,
        "kills": stage.counts.kills,
        "code": stage.code,
        "curve": thin(curve, CURVE_POINTS),
    }


def thin(points: list[list[float]], most: int) -> list[list[float]]:
    """Fewer points of a curve: of each stretch the highest, so that no peak is lost."""
    if len(points) <= most:
        return points
    step = len(points) / most
    chosen = [max(points[int(i * step) : int((i + 1) * step)], key=lambda p: p[1]) for i in range(most)]
    return [points[0], *chosen, points[-1]]


def write_profile(profile: dict[str, Any], path: Path) -> None:
    """Write a profile; a kill leaves the old file or the new one."""
    write_whole(path, (json.dumps(profile) + "\n").encode())
