"""What a launcher (torchrun, Slurm, MPI) told this process in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# who starts several tasks of one step, the variable with their number, and that with this one's number
_TASKS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
)


@dataclass(frozen=True)
class Launched:
    """How this process was started.

    Attributes:
        by: srun, mpirun or mpiexec, if one has started several tasks; None otherwise.
        task: this one's number among them.
        tasks: how many.
        has_rank: torch's variables are there too, so that processes can meet.
        restarts: how often torch's elastic agent has started this process again.
    """

    by: str | None = None
    task: int = 0
    tasks: int = 1
    has_rank: bool = False
    restarts: int = 0


def launched(environ: Mapping[str, str] | None = None) -> Launched:
    """Read it; numbers that are none count as missing."""
    environ = os.environ if environ is None else environ

    def number(name: str, missing: int) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdigit() else missing

    found = next((names for names in _TASKS if number(names[1], 1) > 1), None)
    by, tasks, task = found or (None, "", "")
    return Launched(
        by=by,
        task=number(task, 0),
        tasks=number(tasks, 1),
        has_rank="RANK" in environ and "LOCAL_RANK" in environ,
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0),
    )


__all__ = ["Launched", "launched"]
