"""The folder of a run: which files are where, whose they are, how the run ended."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput, TrainingStopped
from fewbits.models.whole_folder import is_disk_full
from fewbits.training.checkpointing import remove_leftovers, write_atomic
from fewbits.training.config import TrainConfig
from fewbits.training.run_lock import RunLock


class RunFolder:
    """The files of a run, by name."""

    def __init__(self, path: str | Path, lock: RunLock | None = None) -> None:
        self.path = Path(path)
        self.lock = RunLock(self.path) if lock is None else lock
        self.config = self.path / "config.yaml"
        self.run = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.json"
        self.checkpoints = self.path / "checkpoints"
        self.final = self.path / "final"
        self.merged = self.path / "merged"
        self.is_ours = False  # until `open` has found that the folder may be written to
        self.is_written = True  # by this process; of several, one does

    def check(self, config: TrainConfig, *, resume: bool) -> None:
        """Refuse a folder that holds another run; writes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"output_dir {self.path} is a file; choose another name.")
        held = any(
            path.exists() for path in (self.config, self.run, self.metrics, self.checkpoints, self.final)
        )
        if held and not resume:
            raise BadInput(
                f"output_dir {self.path} holds another run; choose another one, or go on with that run with"
                " resume."
            )
        if held and self.config.is_file():
            changed = config.differences(TrainConfig.from_yaml(self.config))
            if changed:
                raise BadInput(
                    f"output_dir {self.path} holds another run, with another {', '.join(changed)}; choose"
                    " another output_dir, or resume with the configuration in its config.yaml."
                )

    def open(self, config: TrainConfig, *, resume: bool) -> None:
        """Begin a run here, or go on with the same one; another run's folder is refused, and one in use."""
        self.lock.take()
        self.check(config, resume=resume)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.checkpoints):
            remove_leftovers(folder)
        write_atomic(self.config, replace(config, take_over=False).to_yaml())
        self.is_ours = True

    def note_end(self, sentence: str) -> None:
        """The run has ended badly, for this reason."""
        if self.is_ours and self.is_written and self.run.is_file():
            self.write(status="stopped", ended=now(), error=sentence)

    def read(self) -> dict[str, Any]:
        """What run.json says so far."""
        return json.loads(self.run.read_text(encoding="utf-8")) if self.run.is_file() else {}

    def write(self, **facts: Any) -> None:
        """Add facts to run.json."""
        if not self.is_written:
            return
        self.lock.confirm()
        write_atomic(self.run, json.dumps({**self.read(), **facts}, indent=1, default=str) + "\n")


class Recorded:
    """Notes in run.json how a run ended that did not end well."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        try:
            self.folder.note_end(f"{type(error).__name__}: {error}")
        except TrainingStopped:  # another process has the folder now: it is told already
            return
        except OSError as second:
            if not is_disk_full(second):
                raise


class FullDisk:
    """A full disk gets its sentence."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and is_disk_full(error) and not isinstance(error, TrainingStopped):
            raise TrainingStopped(
                f"the disk is full, so {self.folder.path} cannot be written to; the checkpoints there are"
                " whole: make room, then go on with resume."
            ) from error


def now() -> str:
    """The time, for records."""
    return datetime.now(UTC).isoformat(timespec="seconds")
