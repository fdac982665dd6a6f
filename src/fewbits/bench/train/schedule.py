"""The parent: one process for each job, all importing side by side, then the device in turn.

Processes of one wave build, check and warm up together (compiling is the host's work), as far as their memory
allows; then each is timed alone, while all others wait on a pipe. With ``together=1`` a wave is one process.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fewbits.bench.train.configurations import Configuration
from fewbits.bench.train.shapes import Shape

_MARK = "@fewbits "
# Peers read their settings from the environment: no network, no statistics, no threads fighting.
_ENVIRONMENT = (
    "HF_HUB_OFFLINE=1",
    "TRANSFORMERS_OFFLINE=1",
    "HF_HUB_DISABLE_TELEMETRY=1",
    "TOKENIZERS_PARALLELISM=false",
    "UNSLOTH_DISABLE_STATISTICS=1",
)
_LAST_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job by plain data, as it travels to its process.

    Attributes:
        configuration: who trains; None writes the checkpoint.
        shape: what.
        batch: sequences, and tokens in each.
        peak_gib: memory that it may hold, for who may stand beside it.
        facts: further fields of `fewbits.bench.train.builders.Job`.
    """

    configuration: Configuration | None
    shape: Shape
    batch: tuple[int, int]
    peak_gib: float
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """For the log."""
        who = "checkpoint" if self.configuration is None else self.configuration.name
        return f"{self.shape.name} {self.batch[0]}x{self.batch[1]} {who}"


@dataclass
class Outcome:
    """What a process said, by state, and how it ended.

    Attributes:
        task: its work.
        said: the last line of each state.
        tries: all lines of the state "try".
        error: why there is no result; None while there is none or it is well.
    """

    task: Task
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    tries: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


class Process:
    """A worker and its pipes."""

    def __init__(self, task: Task, folder: Path, log: Path) -> None:
        self.outcome = Outcome(task)
        self.log = log
        folder.mkdir(parents=True, exist_ok=True)  # Unsloth writes its compiled modules where it runs
        job = folder / "job.json"
        who = task.configuration
        job.write_text(
            json.dumps(
                {
                    "configuration": "checkpoint" if who is None else who.name,
                    "shape": {"name": task.shape.name, "fields": dict(task.shape.fields)},
                    "batch": task.batch,
                    **task.facts,
                }
            ),
            encoding="utf-8",
        )
        path = f"PYTHONPATH={_python_path()}"
        command = [shutil.which("env") or "env", path, *_ENVIRONMENT, sys.executable, "-u", "-m"]
        self._popen = subprocess.Popen(
            [*command, "fewbits.bench.train.worker", str(job)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(log.open("w", encoding="utf-8"),), daemon=True).start()

    def _read(self, log: IO[str]) -> None:
        assert self._popen.stdout is not None
        with log:
            for line in self._popen.stdout:
                log.write(line)
                if line.startswith(_MARK):
                    self._lines.put(json.loads(line.removeprefix(_MARK)))
        self._lines.put(None)

    def go(self) -> None:
        """It is this process' turn."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write("go\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            pass  # it died; `until` says why

    def until(self, state: str, deadline: float, heard: Callable[[Outcome, dict[str, Any]], None]) -> bool:
        """Listen until it reaches ``state``; False once it ended, or was ended at the deadline."""
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                self.outcome.error = "it was stopped: its time was over"
                self.end()
                return False
            if line is None:
                self._explain()
                return False
            self.outcome.said[line["state"]] = line
            if line["state"] == "try":
                self.outcome.tries.append(line)
            heard(self.outcome, line)
            if line["state"] == state:
                return True

    def _explain(self) -> None:
        code = self._popen.wait()
        if code and self.outcome.error is None:
            last = [
                x for x in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()
            ]
            tail = [x.strip() for x in last[-_LAST_LINES:] if not x.startswith((_MARK, " ", "Traceback"))]
            self.outcome.error = f"{tail[-1] if tail else 'no message'} (exit code {code}; {self.log})"

    def end(self) -> None:
        """Stop it, if it still runs, and wait."""
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()


def waves(tasks: Sequence[Task], together: int, memory_gib: float) -> Iterator[list[int]]:
    """Indices of the tasks in order, as many at a time as ``together`` and the memory allow; at least one."""
    wave: list[int] = []
    held = 0.0
    for i, task in enumerate(tasks):
        if wave and (len(wave) >= together or held + task.peak_gib > memory_gib):
            yield wave
            wave, held = [], 0.0
        wave.append(i)
        held += task.peak_gib
    if wave:
        yield wave


def run(
    tasks: Sequence[Task],
    out: Path,
    *,
    together: int,
    memory_gib: float,
    limits: tuple[float, float],
    heard: Callable[[Outcome, dict[str, Any]], None],
) -> list[Outcome]:
    """Do all tasks; checkpoints first.

    Args:
        tasks: in the order in which they are timed.
        out: a folder for logs and the processes' working folders.
        together: how many processes may warm up side by side.
        memory_gib: what these may hold together.
        limits: seconds for one turn of a process, and for all of it.
        heard: is called with every line.
    """
    last = time.monotonic() + limits[1]
    processes: list[Process] = []

    def deadline() -> float:
        return min(time.monotonic() + limits[0], last)

    try:
        for i, task in enumerate(tasks):
            stem = f"{i:02d}-{task.name.replace(' ', '-').replace(':', '-').replace('@', '-')}"
            processes.append(Process(task, out / "work" / stem, out / f"{stem}.log"))
        for process in processes:
            if process.outcome.task.configuration is None and process.until("imported", deadline(), heard):
                process.go()
                process.until("done", deadline(), heard)
        jobs = [p for p in processes if p.outcome.task.configuration is not None]
        for wave in waves([p.outcome.task for p in jobs], together, memory_gib):
            _wave([jobs[i] for i in wave], deadline, heard)
    finally:
        for process in processes:
            process.end()
    return [p.outcome for p in processes if p.outcome.task.configuration is not None]


def _wave(
    wave: list[Process], deadline: Callable[[], float], heard: Callable[[Outcome, dict[str, Any]], None]
) -> None:
    ready = [p for p in wave if p.until("imported", deadline(), heard)]
    for process in ready:
        process.go()
    warm = [p for p in ready if p.until("warm", deadline(), heard)]
    for process in warm:
        process.go()
        process.until("timed", deadline(), heard)
        process.end()


def _python_path() -> str:
    """Where this interpreter found its modules: the worker must find the same."""
    return ":".join(dict.fromkeys(str(Path(p).resolve()) for p in sys.path if p and Path(p).is_dir()))
