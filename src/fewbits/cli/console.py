"""The terminal: two streams and a bar."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fewjobs.terminal import console

__all__ = ["Progress", "console"]


class Progress:
    """A bar on the error stream, if that is a terminal; called as ``advance(done, total)``."""

    def __init__(self, unit: str) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        self.bar = Bar(*columns, console=console(stderr=True), transient=True)
        self.task = self.bar.add_task(unit, total=None)
        self.shown = self.bar.console.is_terminal

    def __enter__(self) -> Progress:
        if self.shown:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.shown:
            self.bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` are done."""
        self.bar.update(self.task, completed=done, total=total)
