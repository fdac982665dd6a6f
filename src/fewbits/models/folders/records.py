"""What a call leaves word of in a folder that it wrote: by whom, and which files, so that a rerun knows them.

A record is a JSON object, ``merge.json`` or ``export.json``, with ``"written_by": "fewbits"`` and
``"files"``, the paths below the folder; what else it tells is its writer's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput

logger = logging.getLogger("fewbits")
RECORDS = ("merge.json", "export.json")
_WRITER = "fewbits"


@dataclass(frozen=True)
class Replaced:
    """What a call may do to the folder that is there.

    Attributes:
        overwrite: what to say to `whole_folder`.
        written: paths in the folder that an earlier call wrote, the only ones that may go; None: the caller
            chose, and ``overwrite`` alone decides.
    """

    overwrite: bool
    written: frozenset[str] | None = None


def replaces_own(target: Path | str, mark: str, overwrite: bool | None) -> Replaced:
    """Whether a call that writes a folder may replace the one that is there, and what in it.

    Args:
        target: the folder.
        mark: the record that such a call leaves in what it writes.
        overwrite: what the caller said; None, nothing: what an earlier such call wrote is replaced, as
            transformers' ``save_pretrained`` does when a script runs again, and nothing else is.
    """
    if overwrite is not None:
        return Replaced(overwrite)
    written = files_of(Path(target).expanduser() / mark)
    if not written:
        return Replaced(False)
    logger.warning(
        "%s was written by an earlier such call, and what that one wrote is replaced; overwrite=False"
        " refuses.",
        target,
    )
    return Replaced(True, written)


def write_record(folder: Path, mark: str, told: Mapping[str, Any], *, earlier: Iterable[str] = ()) -> None:
    """Write the record of a new folder; the last file that goes into it.

    Args:
        folder: the folder, with all that its writer wrote.
        mark: the record's name.
        told: what else the record tells; its keys are neither ``written_by`` nor ``files``.
        earlier: files that an earlier call wrote and that stay beside the new ones.
    """
    new = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    record = {**told, "written_by": _WRITER, "files": sorted({mark, *earlier, *new})}
    (folder / mark).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record(file: Path) -> dict[str, Any]:
    """The object in a record, whoever wrote it; empty where there is none."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def files_of(file: Path) -> frozenset[str]:
    """The files that a record of ours names, itself among them; empty for a record of anyone else."""
    record = read_record(file)
    files = record.get("files")
    if record.get("written_by") != _WRITER or not isinstance(files, list):
        files = list(record) if _is_bare(record) else []
    return frozenset([*(name for name in files if isinstance(name, str)), file.name] if files else ())


def _is_bare(record: Mapping[str, Any]) -> bool:
    """True for what GGUF exports wrote before records named their writer: a file's lines, by its name."""
    return all(
        name.endswith(".gguf")
        and isinstance(lines, list)
        and bool(lines)
        and str(lines[0]).partition(", ")[0].rpartition(": ")[2].startswith("GGUF ")
        for name, lines in record.items()
    )


def refuse_others(target: Path, names: Iterable[str], written: frozenset[str]) -> None:
    """Keep a rerun from taking the names of files that the earlier call did not write.

    Args:
        target: the folder that is there.
        names: paths below it that are to be written.
        written: those that the earlier call wrote.

    Raises:
        BadInput: one of them is there and somebody else's.
    """
    for name in names:
        if name not in written and (target / name).exists():
            raise BadInput(
                f"{target / name} is not of the earlier call, and would be replaced; move it away, choose "
                "another folder, or pass overwrite=True."
            )
