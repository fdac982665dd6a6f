"""The folder of a run: which files are where, whose they are, how the run ended."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput, TrainingStopped
from fewbits.models.folders.whole_folder import is_disk_full
from fewbits.training.checkpoints.folders import PREFIX, remove_leftovers, write_atomic
from fewbits.training.config import TrainConfig, prolongs
from fewbits.training.run_folder.lock import RunLock


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
        self._check_kinds()
        held = any(
            path.exists() for path in (self.config, self.run, self.metrics, self.checkpoints, self.final)
        )
        if held and not resume:
            raise BadInput(
                f"output_dir {self.path} holds another run; choose another one, or go on with that run with"
                " resume."
            )
        if held and self.config.is_file():
            earlier = TrainConfig.from_yaml(self.config)
            changed = config.differences(earlier)
            if changed and not prolongs(config, earlier):
                raise BadInput(
                    f"output_dir {self.path} holds another run, with another {', '.join(changed)}; choose"
                    " another output_dir, or resume with the configuration in its config.yaml."
                )

    def missing(self) -> list[Path]:
        """Records that a run with checkpoints should have: settings, and hashes of data and weights."""
        begun = self.checkpoints.is_dir() and any(self.checkpoints.glob(f"{PREFIX}*"))
        return [path for path in (self.config, self.run) if begun and not path.is_file()]

    def _check_kinds(self) -> None:
        """A folder of a file's name, or a file of a folder's, is not ours to remove."""
        files = (self.config, self.run, self.metrics, self.samples, self.path / "report.html")
        for path in files:
            if path.is_dir():
                raise BadInput(
                    f"{path} is a folder, where a file of the run belongs; move it away, or choose another"
                    " output_dir."
                )
        for path in (self.checkpoints, self.final, self.merged):
            if path.exists() and not path.is_dir():
                raise BadInput(
                    f"{path} is a file, where a folder of the run belongs; move it away, or choose another"
                    " output_dir."
                )

    def prolonged(self, config: TrainConfig) -> bool:
        """Whether these settings are those of the run here, with more steps or epochs."""
        return self.config.is_file() and prolongs(config, TrainConfig.from_yaml(self.config))

    def open(self, config: TrainConfig, *, resume: bool) -> None:
        """Begin a run here, or go on with the same one; another run's folder is refused, and one in use."""
        self.lock.take()
        self.check(config, resume=resume)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.checkpoints):
            remove_leftovers(folder)
        if self.prolonged(config):  # before the settings: killed in between, it must not look finished
            self.write(status="prolonged")
        write_atomic(self.config, replace(config, take_over=False).to_yaml())
        self.is_ours = True

    def note_end(self, sentence: str) -> None:
        """The run has ended badly, for this reason."""
        if self.is_ours and self.is_written and self.run.is_file():
            self.write(status="stopped", ended=now(), error=sentence)

    def read(self) -> dict[str, Any]:
        """What run.json says so far.

        Raises:
            BadInput: it is damaged.
        """
        if not self.run.is_file():
            return {}
        facts = read_json(self.run, dict)
        if not isinstance(facts.get("data", {}), dict):
            raise BadInput(_damaged(self.run))
        return dict(facts)

    def read_samples(self) -> list[dict[str, Any]]:
        """The sample prompts and what was answered so far.

        Raises:
            BadInput: the file is damaged.
        """
        samples = read_json(self.samples, list)
        if not all(isinstance(s, dict) and isinstance(s.get("prompt"), str) for s in samples):
            raise BadInput(_damaged(self.samples))
        return list(samples)

    def write(self, **facts: Any) -> None:
        """Add facts to run.json."""
        if not self.is_written:
            return
        self.lock.confirm()
        write_atomic(self.run, json.dumps({**self.read(), **facts}, indent=1, default=str) + "\n")


def read_json(path: Path, kind: type) -> Any:
    """A run's own file of JSON.

    Raises:
        BadInput: it cannot be read, or holds another kind of value; with the command that does without it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(_damaged(path)) from error
    if not isinstance(value, kind):
        raise BadInput(_damaged(path))
    return value


def _damaged(path: Path) -> str:
    config = shlex.quote(str(path.parent / "config.yaml"))
    return (
        f"{path} is damaged; no checkpoint depends on it, so the run goes on without what it recorded:"
        f" rm {shlex.quote(str(path))} && fewbits train {config} --resume"
    )


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
