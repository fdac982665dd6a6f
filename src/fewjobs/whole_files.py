"""What a build keeps: published whole or not at all, and known by its digest to be whole when it is used.

A kill leaves files without a name, which the next build removes. A loss of power may leave a named file
empty: therefore everything reaches the disk before it gets its name, and is digested again before it counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path


class Contents:
    """The digest under which outputs are kept, and by which they are known to be whole."""

    def __init__(self, key: str) -> None:
        self._whole, self._bytes = hashlib.sha256(key.encode()), 0

    def update(self, block: bytes) -> None:
        """Add bytes of the file at hand."""
        self._whole.update(block)
        self._bytes += len(block)

    def end_file(self) -> None:
        """Go on to the next output: its bytes are not those of the one before."""
        self._whole.update(f"\0{self._bytes}\0".encode())
        self._bytes = 0

    def digest(self) -> str:
        """The digest of everything up to here."""
        return self._whole.hexdigest()


def seal(result: dict) -> str:
    """The digest of one result of an entry, without its seal."""
    facts = {name: value for name, value in result.items() if name != "seal"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_results(entry: Path) -> list[dict]:
    """The results of an entry that are as they were written; what is damaged is as if it was not there."""
    try:
        contents = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    results = contents.get("results") if isinstance(contents, dict) else None
    if not isinstance(results, list):
        return []
    return [r for r in results if isinstance(r, dict) and r.get("seal") == seal(r)]


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(place: Path, data: bytes, *, executable: bool = False) -> None:
    """Give a file new content; who looks, also after a loss of power, sees all of the old or of the new."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}-{os.getpid()}")
    try:
        draft.write_bytes(data)
        if executable:
            draft.chmod(0o755)
        sync(draft)
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


def is_whole(place: Path, data: bytes) -> bool:
    """Whether a file holds just this."""
    try:
        return place.stat().st_size == len(data) and place.read_bytes() == data
    except OSError:
        return False


def publish_noted(draft: Path, place: Path) -> None:
    """Give a file its name, and note its digest beside it, by which `is_noted` knows it again."""
    digest = hashlib.sha256(draft.read_bytes()).hexdigest()
    sync(draft)
    draft.replace(place)
    write_whole(_note_of(place), digest.encode())


def is_noted(place: Path) -> bool:
    """Whether a file is what was published under its name."""
    try:
        return is_whole(_note_of(place), hashlib.sha256(place.read_bytes()).hexdigest().encode())
    except OSError:
        return False


def _note_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.sha256")


def rename_synced(draft: Path, folder: Path) -> None:
    """Give a folder of files its name; one that stands there, and may be damaged, goes."""
    for file in (*draft.iterdir(), draft):
        sync(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = draft.with_name(f"{draft.name}-old")
    try:
        if folder.exists():
            folder.rename(old)
        draft.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(new: Path) -> None:
    """Remove what killed processes have left unpublished; names begin with the process's number."""
    with contextlib.suppress(OSError):
        for left in new.iterdir():
            if Path("/proc", left.name.partition("-")[0]).exists():
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


class Publisher:
    """A thread that waits for the disk in the controller's place; one, as entries are read and rewritten."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Have something done beside the loop; a full disk stops none of what follows."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def flush(self) -> None:
        """Wait until everything is done."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with contextlib.suppress(OSError):
                job()
