"""One process at a time works towards a file or folder; a second one is refused and touches nothing.

    with one_writer(path):
        ...                     # what is begun beside the destination, and its publication

Whoever works holds ``.NAME.lock`` beside the destination with flock, which the kernel gives back when the
process ends in whatever way: a killed one stands in nobody's way. The file tells the other's sentence who it
is, and goes with the work. Where the file system has no flock, the process that the file names is looked for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fewbits.errors import BadInput
from fewbits.models.folders.whole_folder import owner_is_gone, this_process

try:
    import fcntl
except ModuleNotFoundError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

_GLANCE_S = 0.3  # somebody who only looks has the lock for an instant


@contextmanager
def one_writer(target: Path | str) -> Iterator[None]:
    """Hold the right to write ``target`` while the block runs.

    Args:
        target: a file or folder, there or not; its parent folder is made if it is not there.

    Raises:
        BadInput: another process, or another call in this one, is writing it; or nothing can be written
            there.
    """
    lock = _lock_of(target)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _taken(lock, target)
    except OSError as error:
        raise BadInput(
            f"cannot write beside {target} ({error.strerror}); choose a folder you may write to."
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # before it is given back, so that nobody takes a file that is about to go
        os.close(handle)


def refuse_second_writer(target: Path | str) -> None:
    """Raise `BadInput` if somebody is writing ``target`` now: before long work such as loading a model."""
    lock = _lock_of(target)
    try:
        handle = os.open(lock, os.O_RDONLY)
    except OSError:  # nobody is, or whoever writes will be told why he cannot
        return
    try:
        if _is_held(handle, shared=True):
            raise _refusal(handle, lock, target)
    finally:
        os.close(handle)


def _lock_of(target: Path | str) -> Path:
    """One file for all names that lead to the folder in which ``target`` stands."""
    path = Path(target).expanduser()
    path = path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    return path.with_name(f".{path.name}.lock")


def _taken(lock: Path, target: Path | str) -> int:
    """The open lock file, held, with this process in it."""
    deadline = time.monotonic() + _GLANCE_S
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        is_ours = False
        try:
            if not _is_held(handle, shared=False):
                if _is_named(handle, lock):
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps(this_process()).encode(), 0)
                    is_ours = True
                    return handle
                # Otherwise its last owner has removed it since it was opened.
            elif time.monotonic() > deadline:
                raise _refusal(handle, lock, target)
        finally:
            if not is_ours:
                os.close(handle)
        time.sleep(0.02)


def _is_held(handle: int, *, shared: bool) -> bool:
    """Whether somebody else has it; if not, this handle has it now."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # ENOSYS, ENOLCK, EOPNOTSUPP: this file system has no locks
        pass
    owner = _owner(handle)
    return owner is not None and not owner_is_gone(owner)


def _is_named(handle: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), lock.stat())
    except OSError:
        return False


def _owner(handle: int) -> dict[str, object] | None:
    try:
        owner = json.loads(os.pread(handle, 10_000, 0))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _refusal(handle: int, lock: Path, target: Path | str) -> BadInput:
    owner = _owner(handle) or {}
    who = f"process {owner['pid']} on {owner.get('host')}" if "pid" in owner else "another process"
    # Without locks a process of another machine cannot be seen to be gone.
    gone = "" if owner.get("host") in (None, this_process()["host"]) else f"; if it is gone, remove {lock}"
    return BadInput(
        f"{target} is being written by {who}; wait until it has ended, or give another destination{gone}."
    )
