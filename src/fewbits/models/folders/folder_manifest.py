"""What a folder's bytes were when it was written, and whether they still are.

``manifest.json`` is written last: for each other file its size in bytes and its SHA-256, as sha256sum prints
it. Checkpoints and the models and adapters that training runs leave have one, and who opens such a folder
compares the files that it reads: a flipped bit, a truncated, emptied or missing file is named before it
becomes a weight.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fewbits.errors import BadCheckpoint

FILE = "manifest.json"
_THREADS = 8  # hashing gives Python's lock back
_READ = {".safetensors", ".json", ".jinja", ".txt", ".model"}  # what a model, an adapter, a tokenizer are


def names_in(folder: Path) -> list[str]:
    """All files of a folder but the manifest, by their paths in it, sorted."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != FILE)
    return sorted(path.relative_to(folder).as_posix() for path in files)


def facts_of(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files, read by several threads."""

    def one(name: str) -> dict[str, Any]:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return {"bytes": file.tell(), "sha256": digest.hexdigest()}

    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def write_facts(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest: `facts_of` all files."""
    text = json.dumps({"version": 1, "files": dict(sorted(files.items()))}, indent=1)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def fault_in(folder: Path, rank: int = 0, size: int = 1, suffixes: Iterable[str] | None = None) -> str | None:
    """What is wrong with a folder that has a manifest, in words; None: nothing.

    Args:
        folder: the folder.
        rank: of several ranks, which share the reading, this one.
        size: how many there are.
        suffixes: compare files of these kinds only; None: all.
    """
    try:
        manifest = json.loads((folder / FILE).read_text(encoding="utf-8"))
        files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
        version = int(manifest["version"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return f"its {FILE} cannot be read"
    if not files:
        return f"its {FILE} names no file"
    if version != 1:
        return f"its {FILE} has version {version}, which this version of fewbits does not know"
    checked = [name for name in sorted(files) if suffixes is None or Path(name).suffix in suffixes]
    names = checked[rank::size]
    sizes = (_fault_of_size(folder / name, name, files[name][0]) for name in names)
    if fault := next((fault for fault in sizes if fault), None):
        return fault
    for name, facts in facts_of(folder, names).items():
        if facts["sha256"] != files[name][1]:
            return f"the bytes of {name} are not those that were written"
    return None


def check_folder(folder: Path) -> None:
    """Compare what is read of a model or an adapter with the folder's manifest, if it has one of ours.

    Raises:
        BadCheckpoint: a file is missing or has other bytes.
    """
    try:  # other tools have files of this name
        is_ours = '"sha256"' in (folder / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    fault = fault_in(folder, suffixes=_READ) if is_ours else None
    if fault is not None:
        raise BadCheckpoint(
            f"{folder} is damaged: {fault}; copy it again from where it was written, or, if you have changed "
            f"it yourself, delete its {FILE}."
        )


def _fault_of_size(path: Path, name: str, size: int) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    num_bytes = path.stat().st_size
    return None if num_bytes == size else f"{name} has {num_bytes:,} bytes where {size:,} were written"
