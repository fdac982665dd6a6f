"""Checkpoints and their manifests (`fewbits.models.folders.folder_manifest`), with several ranks.

The manifest is the last file of a checkpoint. Before a run goes on from one, all files are read and compared.
Several ranks hash what each of them has written (a network file system may not show it to the others yet),
and check a share each.

Checkpoints of versions before manifests have none: what can be opened is opened, and the run says so.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.models.folders.folder_manifest import FILE, facts_of, fault_in, names_in, write_facts

PROMISE = "has_manifest"  # an entry of the file of counters: then a missing manifest is damage, too
SHARDED = "sharded.json"  # stands in checkpoints of models that were spread over ranks
_OF_RANK = re.compile(r"(?:__(\d+)_\d+\.distcp|rng_state_(\d+)\.pth|gradient_exchange_(\d+)\.safetensors)")
_NEEDED = ("trainer_state.json", "scheduler.pt", "fewbits.json")
_NEEDED_WHOLE = ("optimizer.pt",)


def _alone(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class Writers:
    """Who writes a checkpoint.

    Attributes:
        rank: this process.
        size: how many there are.
        gather: gives every rank's value, by rank; called by all of them.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = _alone


def write_manifest(folder: Path, writers: Writers) -> None:
    """Note the bytes of all files in a folder that is complete; every rank calls, and rank 0 writes."""
    mine = [name for name in names_in(folder) if _writer_of(name) % writers.size == writers.rank]
    parts = writers.gather(facts_of(folder, mine))
    if writers.rank == 0:
        files = {name: facts for part in parts for name, facts in part.items()}
        write_facts(folder, files)


def fault_of(folder: Path, rank: int = 0, size: int = 1) -> str | None:
    """What is wrong with a checkpoint, in words; None: nothing.

    Args:
        folder: the checkpoint.
        rank: of several ranks, which share the reading, this one.
        size: how many there are.
    """
    if not folder.is_dir():
        return "it is no folder"
    if not (folder / FILE).exists():
        return _fault_without_manifest(folder) if rank == 0 else None
    return fault_in(folder, rank, size)


def has_manifest(folder: Path) -> bool:
    """Whether its bytes can be compared."""
    return (folder / FILE).is_file()


def _writer_of(name: str) -> int:
    """The rank that writes a file of this name."""
    match = _OF_RANK.fullmatch(name.rpartition("/")[2])
    return int(next(filter(None, match.groups()))) if match else 0


def _fault_without_manifest(folder: Path) -> str | None:
    """Of a checkpoint whose bytes were not noted: is everything there, and can it be opened?"""
    facts = _json(folder / "fewbits.json")
    if isinstance(facts, Mapping) and facts.get(PROMISE):
        return f"{FILE} is missing"
    needed = _NEEDED if (folder / SHARDED).is_file() else (*_NEEDED, *_NEEDED_WHOLE)
    for name in (*needed, *sorted(path.name for path in folder.glob("rng_state*.pth"))):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.suffix == ".json":
            read = _json(path)
            if not isinstance(read, Mapping):
                return f"{name} cannot be read"
            if name == "trainer_state.json" and type(read.get("global_step")) is not int:
                return f"{name} names no step"
        elif not _opens(path):
            return f"{name} cannot be read"
    return None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _opens(path: Path) -> bool:
    """Whether a file of torch.save, which is a zip archive with checksums, is whole."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, ValueError, RuntimeError, NotImplementedError, EOFError):
        return False


__all__ = ["FILE", "Writers", "fault_of", "has_manifest", "write_manifest"]
