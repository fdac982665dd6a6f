"""The terminal that a command writes to: standard output or the error stream."""

from __future__ import annotations

from rich.console import Console

NO_TERMINAL_WIDTH = 160  # a file or a pipe has no edge to wrap at


def console(*, stderr: bool = False) -> Console:
    """Standard output, or the error stream, as they are now."""
    stream = Console(stderr=stderr)
    if not stream.is_terminal:
        stream.width = NO_TERMINAL_WIDTH
    return stream
