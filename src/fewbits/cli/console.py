"""The terminal: two streams and a bar."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_NO_TERMINAL_WIDTH = 160  # a file or a pipe has no edge to wrap at


def console(*, stderr: bool = False) -> Console:
    """Standard output, or the error stream, as they are now."""
    made = Console(stderr=stderr)
    if not made.is_terminal:
        made.width = _NO_TERMINAL_WIDTH
    return made


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
