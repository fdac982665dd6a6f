"""How much memory a stage will need: from its own history, else from its siblings, else from its kind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import sqrt
from pathlib import Path

from fewjobs.command import Command, normal
from fewjobs.stage import OTHER_PRIOR, PRIOR, Stage
from fewjobs.whole_files import write_whole

HEADROOM = 1.03  # what was measured once, and a little
FEW, LINE_HEADROOM, FEW_HEADROOM = 4, 1.04, 1.15  # what follows from the input's size; far from few siblings
MAX_LINES = 60_000
MOST_SIBLINGS, MOST_SHAPES = 64, 24
ALIKE, ENOUGH_ALIKE = 1.5, 4  # courses are of the nearest siblings: so much larger or smaller, so many
QUANTILE = 0.6
ROOMY = 0.95  # the build's other processes may grow a little
CORRELATED = 0.8  # share of the siblings' spread that the size of the input explains


@dataclass(frozen=True)
class Past:
    """How a stage went."""

    peak_bytes: int
    seconds: float
    cpu_s: float
    parts: tuple[int, ...] = ()


@dataclass
class Siblings:
    """Peaks of the last stages of one kind, each with the size of what it read, and sums of these."""

    last: deque[tuple[int, int]] = field(default_factory=deque)
    peaks: list[int] = field(default_factory=list)  # the same, in order
    sizes: list[int] = field(default_factory=list)
    _size: int = 0
    _peak: int = 0
    _size_size: int = 0
    _peak_peak: int = 0
    _size_peak: int = 0
    shapes: deque[tuple[int, float, tuple[float, ...]]] = field(
        default_factory=lambda: deque(maxlen=MOST_SHAPES)
    )  # peak, seconds for each byte of it, the course as shares of it

    def add(self, peak: int, size: int, *, seconds: float = 0.0, parts: Sequence[int] = ()) -> None:
        """One more; beyond `MOST_SIBLINGS` the oldest goes. ``parts``: its course, if it was undisturbed."""
        if parts:
            self.shapes.append((peak, seconds / peak, tuple(part / peak for part in parts)))
        self.last.append((peak, size))
        insort(self.peaks, peak)
        insort(self.sizes, size)
        self._count(peak, size, 1)
        if len(self.last) > MOST_SIBLINGS:
            peak, size = self.last.popleft()
            del self.peaks[bisect_left(self.peaks, peak)], self.sizes[bisect_left(self.sizes, size)]
            self._count(peak, size, -1)

    def _count(self, peak: int, size: int, sign: int) -> None:
        self._size += sign * size
        self._peak += sign * peak
        self._size_size += sign * size * size
        self._peak_peak += sign * peak * peak
        self._size_peak += sign * size * peak

    def course(self, peak_bytes: int) -> tuple[tuple[int, ...], float]:
        """The predicted memory of a stage with this peak: bytes in each part of its time, and its seconds.

        A part is the highest of that part in the siblings whose peaks are nearest, in proportion to the peak.
        Siblings whose peak differs by a factor of ``ALIKE`` or more are no guide: in all of them the first
        tens of megabytes come at once, which is another share of another peak. Fewer than two siblings that
        are near enough give no parts.
        """
        alike = [s for s in self.shapes if peak_bytes < ALIKE * s[0] and s[0] < ALIKE * peak_bytes]
        alike = sorted(alike, key=lambda s: abs(s[0] - peak_bytes))[:ENOUGH_ALIKE]
        if len(alike) < 2:
            return (), 0.0
        parts = tuple(int(peak_bytes * max(shares)) for shares in zip(*(s[2] for s in alike), strict=True))
        return parts, peak_bytes * sorted(s[1] for s in alike)[len(alike) // 2]

    def like(self, input_bytes: int) -> tuple[int, bool]:
        """By the size of what it reads, where that explains the siblings' needs; else as most of them.

        The second value says which.
        """
        count, peaks, sizes = len(self.peaks), self.peaks, self.sizes
        typical = peaks[int(count * QUANTILE)]
        if not input_bytes or count < 2 or sizes[0] <= 0 or sizes[0] == sizes[-1]:
            return typical, False
        together = count * self._size_peak - self._size * self._peak  # exact: these are whole numbers
        spread_size = count * self._size_size - self._size**2
        spread_peak = count * self._peak_peak - self._peak**2
        if together <= 0 or together**2 < CORRELATED * spread_size * spread_peak:
            return typical, False
        line = self._peak / count + together / spread_size * (input_bytes - self._size / count)
        missed = sqrt(max(0.0, spread_peak - together**2 / spread_size)) / count
        sure = LINE_HEADROOM if count >= FEW or input_bytes < 2 * sizes[-1] else FEW_HEADROOM
        return int(max(peaks[0] / 2, sure * line + 2 * missed)), True


@dataclass
class History:
    """What was measured before, in a file of one line for each stage."""

    file: Path
    learned: int = 0  # stages of this build
    _out: int = -1
    _unwritten: list[str] = field(default_factory=list)
    _past: dict[str, Past] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)  # of units; a row of an older version has none
    _nameless: bool = False
    _siblings: dict[str, Siblings] = field(default_factory=lambda: defaultdict(Siblings))

    def load(self) -> None:
        """Read the file; a line that a kill has cut short is passed over."""
        try:
            lines = self.file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        for line in lines[-MAX_LINES:]:
            try:
                row = json.loads(line)
                parts, cpu_s = tuple(map(int, row.get("parts", ()))), float(row.get("cpu", 0))
                past = Past(int(row["peak"]), float(row["s"]), cpu_s, parts)
                self._past.update(dict.fromkeys(row["keys"], past))
                self._nameless = self._nameless or "unit" not in row
                self._names.add(row.get("unit", ""))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue
        if len(lines) > 2 * MAX_LINES:
            with contextlib.suppress(OSError):  # a full disk: it stays as long as it is
                write_whole(self.file, ("\n".join(lines[-MAX_LINES:]) + "\n").encode())

    def may_know(self, unit: str) -> bool:
        """Whether a unit of that name was ever measured: else its keys need not be made."""
        return self._nameless or os.path.basename(unit) in self._names  # noqa: PTH119

    def predict(self, stage: Stage, *, room_bytes: int, slots: int) -> None:
        """Fill in what the stage is supposed to need; ``room_bytes``: what all stages may have together."""
        for key in stage.keys:
            past = self._past.get(key)
            if past is not None:
                stage.predicted.bytes, stage.predicted.source = int(past.peak_bytes * HEADROOM), "history"
                stage.predicted.seconds, stage.predicted.cpu_s = past.seconds, past.cpu_s
                stage.predicted.parts = tuple(int(part * HEADROOM) for part in past.parts)
                return
        siblings = self._siblings[stage.name]
        if stage.arch and self._siblings[f"{stage.name} {stage.arch}"].peaks:
            siblings = self._siblings[f"{stage.name} {stage.arch}"]
        if len(siblings.peaks) >= 2:
            stage.predicted.bytes, is_explained = siblings.like(stage.input_bytes)
            stage.predicted.source = "siblings"
            if is_explained:
                stage.predicted.parts, stage.predicted.seconds = siblings.course(stage.predicted.bytes)
                stage.predicted.cpu_s = stage.predicted.seconds
            return
        # Unknown: as its kind, but never so much that a small budget could not try two at once. Where that is
        # less than its kind needs, not all slots begin at once: small units outgrow it before a pause.
        prior, share = PRIOR.get(stage.name, OTHER_PRIOR), int(ROOMY * room_bytes / max(2.0, slots - 0.5))
        stage.predicted.bytes, stage.predicted.source = min(prior, share), "prior"

    def learn(self, stage: Stage, *, peak_bytes: int, seconds: float) -> None:
        """Keep what was measured, for siblings now and for the next build."""
        self.learned += 1
        before = next((self._past[key] for key in stage.keys if key in self._past), None)
        parts = stage.course() or (
            before.parts if before is not None and peak_bytes <= before.peak_bytes else ()
        )
        seconds = min(seconds, stage.times.cpu_s or seconds)  # a busy machine does not count
        self._past.update(dict.fromkeys(stage.keys, Past(peak_bytes, seconds, stage.times.cpu_s, parts)))
        for group in (f"{stage.name} {stage.arch}", stage.name) if stage.arch else (stage.name,):
            siblings = self._siblings[group]
            if len(siblings.peaks) < FEW or not (stage.was_paged):  # else it is not exact
                siblings.add(peak_bytes, stage.input_bytes, seconds=seconds, parts=stage.course())
        row = {
            "keys": list(stage.keys),
            "peak": peak_bytes,
            "s": round(seconds, 3),
            "cpu": round(stage.times.cpu_s, 3),
            "stage": stage.name,
            "unit": os.path.basename(stage.unit),  # noqa: PTH119
        }
        self._names.add(str(row["unit"]))
        if parts:
            row["parts"] = parts
        self._unwritten.append(json.dumps(row))

    def write(self) -> None:
        """Write what was learned since the last time."""
        if not self._unwritten:
            return
        text = "\n".join([*self._unwritten, ""]).encode()
        self._unwritten.clear()
        with contextlib.suppress(OSError):  # a full disk loses a figure, not the build
            if self._out < 0:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self._out = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(self._out, text)

    def close(self) -> None:
        """Write the rest, and close the file."""
        self.write()
        if self._out >= 0:
            os.close(self._out)
            self._out = -1


_realpath = cache(os.path.realpath)
_normal = lru_cache(4096)(normal)


@lru_cache(4096)
def _flags(words: tuple[str, ...]) -> str:
    return " ".join([normal(word) for word in words])


def keys_of(command: Command, unit: str, stage_name: str, arch: str, digest: str) -> tuple[str, ...]:
    """The keys of a stage: by content and flags, by name and flags, by name."""
    tool = _realpath(command.tool)
    flags = _flags(tuple([a for a in command.args if a.startswith("-")]))
    folder = _normal(command.cwd)
    wide = (stage_name, arch, unit)
    parts = [(*wide, folder), (*wide, folder, tool, flags)]
    if digest:
        parts.append((stage_name, arch, tool, flags, digest))
    return tuple(hashlib.sha256(os.fsencode("\0".join(p))).hexdigest()[:20] for p in reversed(parts))
