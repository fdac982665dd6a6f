"""What a launcher (torchrun, Slurm, MPI) told this process in its environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

# who starts several tasks of one step, the variable with their number, and that with this one's number
_TASKS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
)

# run ids that nobody chose: torchrun's and ours for every launch, and a new one for each on one machine
_UNCHOSEN = ("none", "fewbits")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Launched:
    """How this process was started.

    Attributes:
        by: srun, mpirun or mpiexec, if one has started several tasks; None otherwise.
        task: this one's number among them.
        tasks: how many.
        has_rank: torch's variables are there too, so that processes can meet.
        restarts: how often torch's elastic agent has started this process again.
        launch: a name of the job, which stays when the job is requeued or its processes are started again,
            and which no other job has; None: there is none. torchrun's ``--rdzv-id`` where somebody chose
            one, otherwise Slurm's job and step. Of tasks that Slurm or MPI has started side by side the job
            would not be one run, so there only a chosen id counts.
    """

    by: str | None = None
    task: int = 0
    tasks: int = 1
    has_rank: bool = False
    restarts: int = 0
    launch: str | None = None


def launched(environ: Mapping[str, str] | None = None) -> Launched:
    """Read it; numbers that are none count as missing."""
    environ = os.environ if environ is None else environ

    def number(name: str, missing: int) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdigit() else missing

    variables = next((names for names in _TASKS if number(names[1], 1) > 1), None)
    by, tasks, task = variables or (None, "", "")
    return Launched(
        by=by,
        task=number(task, 0),
        tasks=number(tasks, 1),
        has_rank="RANK" in environ and "LOCAL_RANK" in environ,
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0),
        launch=_launch(environ, several=variables is not None),
    )


def _launch(environ: Mapping[str, str], *, several: bool) -> str | None:
    chosen, job = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("SLURM_JOB_ID", "")
    if chosen and chosen not in _UNCHOSEN and not _UUID.fullmatch(chosen):
        return f"run {chosen}"
    return None if several or not job else f"slurm {job}.{environ.get('SLURM_STEP_ID', 'batch')}"


__all__ = ["Launched", "launched"]
