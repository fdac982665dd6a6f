"""What the files of a run folder say, read forgivingly: a killed run has fewer of them, or half a line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput
from fewbits.training.run_folder.lock import Holder, holder_of
from fewbits.yaml_text import parse_yaml

FILES = ("run.json", "metrics.jsonl", "samples.json", "config.yaml")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run folder.

    Attributes:
        folder: where it is.
        run: run.json.
        steps: metrics.jsonl, one mapping for each step, in order; the later of two values counts.
        samples: samples.json.
        config: config.yaml.
        problems: a sentence for each file that could not be read.
        holder: the process that has the folder, or has left it behind.
    """

    folder: Path
    run: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    samples: tuple[Mapping[str, Any], ...]
    config: Mapping[str, Any]
    problems: tuple[str, ...] = field(default=())
    holder: Holder | None = None

    def curve(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of one metric, where it was measured and is finite."""
        values = ((s["step"], number(s.get(name))) for s in self.steps)
        return [(float(x), y) for x, y in values if y is not None]

    def first(self, *paths: str) -> Any:
        """The first of these entries of run.json that there is; dots go into nested objects."""
        for path in paths:
            value: Any = self.run
            for key in path.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None


def read_run(folder: Path) -> RunData:
    """Read a run folder.

    Raises:
        BadInput: there is no such folder, or it holds none of a run's files.
    """
    if not folder.is_dir():
        raise BadInput(f"there is no run folder {folder}; check the path.")
    if not any((folder / name).is_file() for name in FILES):
        raise BadInput(
            f"{folder} holds no training run (none of {', '.join(FILES)}); give the run's output_dir."
        )
    problems: list[str] = []
    samples = _load(folder / "samples.json", json.loads, list, problems)
    return RunData(
        folder=folder,
        run=_load(folder / "run.json", json.loads, dict, problems) or {},
        steps=_steps(folder / "metrics.jsonl", problems),
        samples=tuple(s for s in samples or () if isinstance(s, Mapping)),
        config=_load(folder / "config.yaml", partial(parse_yaml, name="config.yaml"), dict, problems) or {},
        problems=tuple(problems),
        holder=holder_of(folder),
    )


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _load(path: Path, parse: Any, kind: type, problems: list[str]) -> Any:
    if not path.is_file():
        return None
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        problems.append(f"{path.name} could not be read and was left out.")
        return None
    return value


def _steps(path: Path, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    if not path.is_file():
        return ()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    steps: dict[float, dict[str, Any]] = {}
    bad = 0
    for i, line in enumerate(lines):
        record = _record(line)
        step = number(record.get("step")) if record is not None else None
        if record is None or step is None:
            bad += line.strip() != "" and i + 1 < len(lines)  # half a line at the end is what a kill leaves
            continue
        steps.setdefault(step, {}).update(record)
    if bad:
        problems.append(
            f"{bad} line{'s' if bad > 1 else ''} of {path.name} could not be read and were left out."
        )
    return tuple(steps[step] for step in sorted(steps))


def _record(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
