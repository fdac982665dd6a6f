"""How much memory a stage will need: from its own history, else from its siblings, else from its kind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fewbits.build.command import Command, normal
from fewbits.build.stage import OTHER_PRIOR, PRIOR, Stage

HEADROOM = 1.05  # what was measured once, and a little
MAX_LINES = 60_000
_SIBLINGS = 64
QUANTILE = 0.6
CORRELATED = 0.8  # share of the siblings' spread that the size of the input explains


@dataclass(frozen=True)
class Past:
    """How a stage went."""

    peak_bytes: int
    seconds: float
    parts: tuple[int, ...] = ()


@dataclass
class History:
    """What was measured before, in a file of one line for each stage."""

    file: Path
    _out: int = -1
    _past: dict[str, Past] = field(default_factory=dict)
    _siblings: dict[str, deque] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_SIBLINGS)))

    def load(self) -> None:
        """Read the file; a line that a kill has cut short is passed over."""
        try:
            lines = self.file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        for line in lines[-MAX_LINES:]:
            try:
                row = json.loads(line)
                past = Past(int(row["peak"]), float(row["s"]), tuple(map(int, row.get("parts", ()))))
                self._past.update(dict.fromkeys(row["keys"], past))
            except (ValueError, KeyError, TypeError):
                continue
        if len(lines) > 2 * MAX_LINES:
            made = self.file.with_suffix(f".{os.getpid()}")
            made.write_text("\n".join(lines[-MAX_LINES:]) + "\n", encoding="utf-8")
            made.replace(self.file)

    def predict(self, stage: Stage, *, budget_bytes: int, slots: int) -> None:
        """Fill in what the stage is supposed to need."""
        for key in stage.keys:
            past = self._past.get(key)
            if past is not None:
                stage.predicted_bytes, stage.predicted_s = int(past.peak_bytes * HEADROOM), past.seconds
                stage.source = "history"
                stage.parts = tuple(int(part * HEADROOM) for part in past.parts)
                return
        siblings = self._siblings[f"{stage.name} {stage.arch}"] or self._siblings[stage.name]
        if len(siblings) >= 2:
            stage.predicted_bytes, stage.source = _like(siblings, stage.input_bytes), "siblings"
            return
        # Unknown: as its kind, but never so much that a small budget could not try two at once.
        prior = PRIOR.get(stage.name, OTHER_PRIOR)
        stage.predicted_bytes, stage.source = min(prior, budget_bytes // max(2, slots)), "prior"

    def learn(self, stage: Stage, *, peak_bytes: int, seconds: float) -> None:
        """Keep what was measured, for siblings now and for the next build."""
        known = next((self._past[key] for key in stage.keys if key in self._past), None)
        parts = stage.course() or (
            known.parts if known is not None and peak_bytes <= known.peak_bytes else ()
        )
        self._past.update(dict.fromkeys(stage.keys, Past(peak_bytes, seconds, parts)))
        for group in (f"{stage.name} {stage.arch}", stage.name):
            self._siblings[group].append((peak_bytes, stage.input_bytes))
        row = {"keys": list(stage.keys), "peak": peak_bytes, "s": round(seconds, 3), "stage": stage.name}
        if parts:
            row["parts"] = parts
        with contextlib.suppress(OSError):  # a full disk loses a figure, not the build
            if self._out < 0:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self._out = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(self._out, json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._out >= 0:
            os.close(self._out)
            self._out = -1


def _like(siblings: deque, input_bytes: int) -> int:
    """By the size of what it reads, where that explains the siblings' needs; else as most of them."""
    peaks = sorted(peak for peak, _ in siblings)
    typical = int(peaks[int(len(peaks) * QUANTILE)])
    sizes = [size for _, size in siblings]
    if not input_bytes or len(siblings) < 3 or min(sizes) <= 0 or min(sizes) == max(sizes):
        return typical
    mean_size, mean_peak = sum(sizes) / len(sizes), sum(peaks) / len(peaks)
    together = sum((size - mean_size) * (peak - mean_peak) for peak, size in siblings)
    spread_size = sum((size - mean_size) ** 2 for size in sizes)
    spread_peak = sum((peak - mean_peak) ** 2 for peak in peaks)
    if together <= 0 or together**2 < CORRELATED * spread_size * spread_peak:
        return typical
    line = mean_peak + together / spread_size * (input_bytes - mean_size)
    return int(max(peaks[0] / 2, 1.1 * line))


_realpath = cache(os.path.realpath)


def keys_of(command: Command, unit: str, stage_name: str, arch: str, digest: str) -> tuple[str, ...]:
    """The keys of a stage: by content and flags, by name and flags, by name."""
    tool = _realpath(command.tool)
    flags = " ".join(normal(a) for a in command.args if a.startswith("-"))
    folder = normal(command.cwd)
    wide = (stage_name, arch, unit)
    parts = [(*wide, folder), (*wide, folder, tool, flags)]
    if digest:
        parts.append((stage_name, arch, tool, flags, digest))
    return tuple(hashlib.sha256("\0".join(p).encode()).hexdigest()[:20] for p in reversed(parts))
