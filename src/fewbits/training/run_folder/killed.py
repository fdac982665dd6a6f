"""Runs that ended without a word: who looks at their folder next notes it.

A run that ends by itself, or for a reason that it sees, says so in run.json. One that is killed leaves
"running" there, and the lock with its owner (process, machine, when it began). Whoever comes next (the
launcher that has lost its ranks, another run, `fewbits report`, `generate`, `export`) asks the lock whether
the owner lives. Only one of this machine that certainly does not is called dead: numbers of processes come
again, so where there is no lock to ask, the time at which the process began is compared too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput, TrainingStopped
from fewbits.training.run_folder.layout import RunFolder
from fewbits.training.run_folder.lock import Holder, Owner, holder_of

KILLED = "killed"
_OPEN = ("running", "prolonged")  # what run.json says of a run that has noted no end


def process_facts() -> dict[str, Any]:
    """This process, for run.json."""
    facts = asdict(Owner.here())
    return {name: facts[name] for name in ("pid", "host", "machine", "began")}


def is_dead(run: Mapping[str, Any], holder: Holder | None) -> bool:
    """Whether a run that has noted no end has certainly ended.

    Args:
        run: what run.json says.
        holder: who holds its folder.
    """
    if holder is not None:
        return holder.is_alive is False
    process = run.get("process")
    owner = Owner.read_facts(process) if isinstance(process, Mapping) else None
    return owner is None or not owner.still_runs()


def note_if_killed(path: str | Path, sentence: str | None = None) -> None:
    """Let run.json say that a run was killed, if it was; a folder of anything else stays as it is.

    Args:
        path: the run folder.
        sentence: how it ended, if that is known.
    """
    folder = RunFolder(path)
    with suppress(BadInput, TrainingStopped, OSError):  # damaged, read-only, or somebody has just taken it
        holder = holder_of(folder.path)
        if folder.read().get("status") not in _OPEN or not is_dead(folder.read(), holder):
            return
        with folder.lock:
            folder.lock.take()
            facts = folder.read()
            if facts.get("status") in _OPEN:
                last_sign = None if holder is None else holder.seen.isoformat(timespec="seconds")
                folder.write(status=KILLED, ended=last_sign, error=sentence or _sentence(facts, holder))


def _sentence(facts: Mapping[str, Any], holder: Holder | None) -> str:
    process = facts.get("process")
    owner = None if holder is None else holder.owner
    if owner is None and isinstance(process, Mapping):
        owner = Owner.read_facts(process)
    by = "" if owner is None else f" ({owner})"
    last = "" if holder is None else f", after {holder.seen.strftime('%Y-%m-%d %H:%M:%S UTC')}"
    return f"The run's process{by} was killed before its end{last}."


__all__ = ["KILLED", "is_dead", "note_if_killed", "process_facts"]
