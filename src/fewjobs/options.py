"""What the controller of a build is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Options:
    """What the controller is told.

    Attributes:
        folder: the run's private folder, with the socket in it.
        slots: how many stages may run at once.
        given_bytes: the user's own limit, or None.
        pager: the pager's library, or None.
        pages: where memory is paged out to.
        stage_limit_bytes: growth past it is a runaway; None: by the stage's class.
        units: how many units may be at work at once, however many stages each has; 0: any number.
    """

    folder: Path
    slots: int
    given_bytes: int | None = None
    pager: Path | None = None
    pages: Path = Path("/var/tmp")
    stage_limit_bytes: int | None = None
    caps: bool = True
    units: int = 0
