"""What a call leaves word of in a folder that it wrote: by whom, and which files, so that a rerun knows them.

A record is a JSON object, ``merge.json`` or ``export.json``, with ``"written_by": "fewbits"``, ``"files"``,
the paths below the folder, and ``"weights"``, by which the bytes of safetensors are known again: who saves
another model there leaves the record as it was, and a rerun must not take that model for its own. What else
a record tells is its writer's.
"""

from __future__ import annotations

import hashlib
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
_WEIGHTS = (".safetensors", ".bin")
_SAMPLES, _SAMPLE_BYTES = 64, 16384
# What transformers and PEFT open in a folder, whatever else lies there; and what makes it one of a model.
_OPENED = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_OPENED_BY_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_CONFIGS = {"config.json", "adapter_config.json"}


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

    Raises:
        BadInput: weights in the folder are not those of the earlier call.
    """
    if overwrite is not None:
        return Replaced(overwrite)
    folder = Path(target).expanduser()
    written = files_of(folder / mark)
    if not written:
        return Replaced(False)
    if other := _weights_of_others(folder, mark, written):
        if other not in written and other.startswith("adapter") != ("adapter_config.json" in written):
            raise BadInput(
                f"{folder / other} was saved beside what the earlier call wrote, and would be opened with it;"
                " a model and an adapter need a folder each."
            )
        raise BadInput(
            f"{folder / other} is not what the earlier call wrote, which {mark} tells of, and would be"
            " replaced; choose another folder, or pass overwrite=True."
        )
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
        told: what else the record tells; its keys are none of ``written_by``, ``files`` and ``weights``.
        earlier: files that an earlier call wrote and that stay beside the new ones.
    """
    new = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    files = sorted({mark, *earlier, *new})
    weights = {name: _known_by(folder / name) for name in files if _is_weights(folder / name)}
    record = {**told, "written_by": _WRITER, "files": files, **({"weights": weights} if weights else {})}
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


def _weights_of_others(folder: Path, mark: str, written: frozenset[str]) -> str | None:
    """A file of weights that the writer of the record did not leave so; None: there is none.

    Where it wrote a model or an adapter, one that a loader would open in place of it counts, too.
    """
    weights = read_record(folder / mark).get("weights")
    for name, before in weights.items() if isinstance(weights, dict) else ():
        if _is_weights(folder / name) and _known_by(folder / name) != before:
            return str(name)
    if not written & _CONFIGS:
        return None
    opened = (name for name in (*_OPENED, *_OPENED_BY_INDEX) if name not in written)
    return next((name for name in opened if (folder / name).exists()), None)


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS and path.is_file()


def _known_by(path: Path) -> str:
    """A hash of a file's size and of samples of its bytes; of all bytes up to a megabyte."""
    length = path.stat().st_size
    digest = hashlib.blake2b(str(length).encode(), digest_size=16)
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(number * _SAMPLE_BYTES, length * number // _SAMPLES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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
