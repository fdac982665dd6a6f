"""What a run writes and shows while it trains, and when it evaluates, saves and stops."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bar,
)
from transformers import TrainerCallback

from fewbits.training.checkpoints.folders import Progress, write_atomic
from fewbits.training.run_folder.lock import RunLock

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

Args = Any  # transformers.TrainingArguments; beside it come its TrainerState and TrainerControl


def memory_bytes() -> int:
    """The most memory used so far on the GPU; without one, what this process holds now."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return int(psutil.Process().memory_info().rss)


class StillOurs(TrainerCallback):
    """Stops a run whose folder another process has taken over, before it writes there."""

    def __init__(self, lock: RunLock) -> None:
        self.lock = lock

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint may follow each step."""
        self.lock.confirm()

    def on_evaluate(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A new best may be kept."""
        self.lock.confirm()


class Schedule(TrainerCallback):
    """Saves each new best, stops when patience ends, and closes a run with evaluation and checkpoint."""

    def __init__(self, progress: Progress, *, evaluates: bool, keep_best: bool, patience: int | None) -> None:
        self.progress = progress
        self.evaluates = evaluates
        self.keep_best = keep_best
        self.patience = patience

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The last step is evaluated and saved; before a checkpoint comes a log line, also after a resume."""
        if control.should_training_stop:
            control.should_save = True
            control.should_evaluate = self.evaluates
        if control.should_save or control.should_evaluate:
            control.should_log = True

    def on_evaluate(
        self,
        args: Args,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs: Any,
    ) -> None:
        """Compare with the best loss so far."""
        if state.global_step == 0:
            return
        if state.best_metric is None or metrics["eval_loss"] < state.best_metric:
            self.progress.evaluations_without_gain = 0
            control.should_save = control.should_save or self.keep_best
            return
        self.progress.evaluations_without_gain += 1
        if self.patience is not None and self.progress.evaluations_without_gain >= self.patience:
            self.progress.stopped_early = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True


class MetricsFile(TrainerCallback):
    """One JSON object a line in metrics.jsonl, for each logging step and each evaluation."""

    def __init__(self, path: Path, progress: Progress, *, all_figures: bool = False) -> None:
        self.path = path
        self.progress = progress
        self.all_figures = all_figures  # what another trainer logs, its count of tokens too
        self._last_time = self._began = time.perf_counter()
        self._earlier = progress.seconds
        self._last_tokens = progress.tokens

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Drop lines of steps that the checkpoint does not know: they will come again."""
        self._began = self._last_time = time.perf_counter()
        self._earlier, self._last_tokens = self.progress.seconds, self.progress.tokens
        records = [record for record in read_metrics(self.path) if record["step"] <= state.global_step]
        if state.global_step == 0:
            records = []
        write_atomic(self.path, "".join(json.dumps(record) + "\n" for record in records))

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the clock for the checkpoint."""
        self._tick()

    def _tick(self) -> float:
        self.progress.seconds = round(self._earlier + time.perf_counter() - self._began, 3)
        return self.progress.seconds

    def on_log(
        self, args: Args, state: TrainerState, control: TrainerControl, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Write the line; the host's closing summary is not one."""
        if not state.is_world_process_zero or not ({"loss", "eval_loss"} & logs.keys()):
            return
        if self.all_figures:
            self.progress.tokens = int(logs.get("num_tokens", self.progress.tokens))
        record: dict[str, Any] = {
            "step": state.global_step,
            "epoch": state.epoch,
            "tokens": self.progress.tokens,
            "seconds": self._tick(),
        }
        usual = ("loss", "eval_loss", "learning_rate", "grad_norm")
        keys = [key for key in logs if key not in record] if self.all_figures else usual
        record |= {key: logs[key] for key in keys if key in logs}
        if "loss" in logs:
            now = time.perf_counter()
            rate = (self.progress.tokens - self._last_tokens) / max(now - self._last_time, 1e-9)
            record["tokens_per_second"] = round(rate, 1)
            self._last_time, self._last_tokens = now, self.progress.tokens
        record["memory_bytes"] = memory_bytes()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if "eval_loss" in logs:
            self._last_time = time.perf_counter()  # evaluation is not training time


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file that can be read."""
    return [record for record in _lines(path) if record is not None]


def damaged_metrics(path: Path) -> int:
    """Lines of a metrics file that cannot be read, besides a last one that a kill cut short."""
    return sum(record is None for record in _lines(path)[:-1])


def _lines(path: Path) -> list[dict[str, Any] | None]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_record(line) for line in lines if line.strip()]


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


class ProgressBar(TrainerCallback):
    """A bar with loss, tokens a second, memory, time left; away from a terminal a line an evaluation."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self.console = console
        self.progress = progress
        self.bar: Bar | None = None
        self.task: TaskID | None = None
        self._shown: dict[str, float] = {}
        self._start = (0.0, 0)

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the bar."""
        self._start = (time.perf_counter(), self.progress.tokens)
        if not self.console.is_terminal or not state.is_world_process_zero:
            return
        columns = (TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        ends = (
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, *ends, console=self.console)
        self.task = self.bar.add_task("training", total=state.max_steps, completed=state.global_step, text="")
        self.bar.start()

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move it."""
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=state.global_step, text=self._text())

    def _text(self) -> str:
        seconds = max(time.perf_counter() - self._start[0], 1e-9)
        parts = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in self._shown.items()]
        parts.append(f"{(self.progress.tokens - self._start[1]) / seconds:,.0f} tokens/s")
        parts.append(f"{memory_bytes() / 2**20:,.0f} MiB")
        return "  ".join(parts)

    def on_log(
        self, args: Args, state: TrainerState, control: TrainerControl, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Remember the newest losses."""
        self._shown |= {name: logs[name] for name in ("loss", "eval_loss") if name in logs}
        if self.bar is None and "eval_loss" in logs and state.is_world_process_zero:
            self.console.print(f"step {state.global_step}/{state.max_steps}  {self._text()}", highlight=False)

    def on_train_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the last line standing."""
        self.close()

    def close(self) -> None:
        """Also after an error: a live display must not outlive the training."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
