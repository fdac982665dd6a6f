"""One command that wants to run, as the controller sees it."""

from __future__ import annotations

from dataclasses import dataclass

from fewjobs.cache import Recipe
from fewjobs.command import Command
from fewjobs.stage import Stage


@dataclass(eq=False)
class Request:
    """One command that wants to run.

    Attributes:
        command: what it is.
        unit: what it makes, as people call it.
        stage: what is to be admitted; a driver's is not used.
        is_driver: nvcc itself, whose stages ask on their own.
        pid: the launcher.
        recipe: how its result is kept, or None; without a key as long as that is not needed.
        asked_s: when.
    """

    command: Command
    unit: str
    stage: Stage
    is_driver: bool
    pid: int = 0
    recipe: Recipe | None = None
    asked_s: float = 0.0
