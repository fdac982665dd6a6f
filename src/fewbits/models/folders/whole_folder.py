"""Folders written whole or not at all, and the folder that was there before never lost.

`whole_folder` is the only way this library publishes a folder: everything is written into a hidden sibling,
brought to the disk, and one rename gives it the wanted name. An older folder of that name trades places with
the new one in a single step where the file system can (``RENAME_EXCHANGE``); elsewhere it is kept aside until
the new one is in place. The hidden sibling ``.NAME.XXXXXXXX.partial`` holds

* ``owner.json``: pid, host and start of the process that writes, so that a later run knows a killed one's;
* ``new/``: what is being written, and after an exchange what was there before;
* ``old/``: what was there before, between the two renames where there is no exchange.

Any later run in the same place finishes or removes what killed runs left.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from fewbits.errors import BadInput, FewbitsError
from fewbits.models.folders.records import RECORDS, files_of, refuse_others
from fewbits.words import size

MODEL, ADAPTER = "config.json", "adapter_config.json"  # the file that tells what a folder holds
_OWNER, _NEW, _OLD = "owner.json", "new", "old"
_PARTIAL = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.partial")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOTSUP}
_EMPTY_AFTER_S = 60.0  # a partial folder without an owner is one that is being made, or was killed then
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "manifest.json")
_BELONGS_TO_A_MODEL = (
    *_WEIGHTS,
    "pytorch_model*.bin*",
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "adapter_model*",
    "recovery_adapter",  # a folder, over this model alone
)


@contextmanager
def whole_folder(
    target: Path | str,
    *,
    overwrite: bool | None = False,
    marker: str = MODEL,
    protected: Iterable[Path | str] = (),
    replaced: Iterable[str] = (),
    written: frozenset[str] | None = None,
) -> Iterator[Path]:
    """A hidden folder to write into; on success it is synced and takes target's place by one rename.

    Args:
        target: the folder's name in the end; a symbolic link means the folder it points to.
        overwrite: what becomes of a folder that is there and not empty. False: it is refused. True: it is
            replaced if it holds what is being written (a model, an adapter); files in it that belong to no
            model stay. None: as transformers' ``save_pretrained`` does, new files go beside the others, and
            only old weights vanish.
        marker: `MODEL` or `ADAPTER`, what is being written.
        protected: folders that are read for this; ``target`` may neither be nor hold one.
        replaced: names of further files that go with what is replaced.
        written: paths in ``target`` that an earlier call wrote (`replaces_own`): with ``overwrite`` these
            alone go, and everything else stays.

    Raises:
        BadInput: the place is taken, protected, or cannot be written to, or the disk is full. On any error
            ``target`` is as it was.
    """
    target = check_destination(target, overwrite=overwrite, marker=marker, protected=protected)
    inside = _is_fixed(target)  # nothing can take this folder's place: its empty room is filled instead
    partial = (target if inside else target.parent) / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        (partial / _OWNER).write_text(json.dumps(this_process()), encoding="utf-8")
        new = partial / _NEW
        new.mkdir()
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _write_error(target, error) from error
    try:
        yield new
        give_the_umasks_mode(new)
        if inside:
            _fill(new, target)
        else:
            if written is not None:
                _carry_over_others(target, new, written)
            else:
                _carry_over(
                    target,
                    new,
                    (*_BELONGS_TO_A_MODEL, *map(glob.escape, replaced)) if overwrite else _WEIGHTS,
                )
            sync(new)
            if overwrite is False:
                _put_new(new, target)
            else:
                take_place(new, target, aside=partial / _OLD)
            fsync(target.parent)
    except FewbitsError:
        raise
    except (OSError, SafetensorError) as error:
        raise _write_error(target, error) from error
    finally:
        _discard(partial)


def check_destination(
    target: Path | str,
    *,
    overwrite: bool | None = False,
    marker: str = MODEL,
    protected: Iterable[Path | str] = (),
) -> Path:
    """Refuse a place where `whole_folder` would not write, before long work is begun.

    What killed runs left beside it is finished or removed first.

    Args:
        target: as for `whole_folder`, and so the others.
        overwrite: what may become of a folder that is there.
        marker: what is to be written.
        protected: what is read for it.

    Returns:
        The absolute path of the folder, symbolic links followed.

    Raises:
        BadInput: the place is taken or protected.
    """
    if str(target) == "-":
        raise BadInput("a folder cannot go to standard output; give its name in place of -.")
    path = Path(target).expanduser().resolve()
    remove_leftovers(path.parent)
    remove_leftovers(path)
    if path.exists() and not path.is_dir():
        raise BadInput(f"{target} is a file, and a folder is to be written there; choose another name.")
    for source in protected:
        if _holds(path, Path(source)):
            raise BadInput(
                f"{target} is or holds {source}, which is read for this and never overwritten; choose "
                "another folder."
            )
    if not path.is_dir() or not any(path.iterdir()):
        return path
    if overwrite is False:
        raise BadInput(
            f"{target} exists and is not empty; choose another folder, or have it replaced: --overwrite, in "
            "Python overwrite=True."
        )
    other = ADAPTER if marker == MODEL else MODEL
    if overwrite and (not (path / marker).is_file() or (path / other).is_file()):
        raise BadInput(
            f"{target} is no folder of {'a model' if marker == MODEL else 'an adapter'} alone, and only such "
            "a one is replaced; choose another folder."
        )
    if _is_fixed(path):
        raise BadInput(
            f"{target} is not empty and cannot be replaced as a whole (it is a mount point, holds the "
            "current folder, or lies where you may not write); choose a new folder in it."
        )
    return path


def _put_new(new: Path, target: Path) -> None:
    """Give ``new`` the name ``target``, where nothing, or an empty folder, has it.

    Raises:
        BadInput: another process has written it since that was seen; theirs stays.
    """
    try:
        new.replace(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise _written_meanwhile(target) from error


def _written_meanwhile(target: Path) -> BadInput:
    return BadInput(
        f"{target} was written by another process in the meantime, and stays as that one left it; choose"
        " another folder."
    )


def take_place(new: Path, target: Path, *, aside: Path) -> Path | None:
    """Give ``new`` the name ``target``; the caller brings both to the disk.

    Args:
        new: the folder to publish, on the same file system.
        target: its name in the end.
        aside: where the old folder waits if the two cannot trade places; who finds it there after a kill, and
            no ``target``, brings it back.

    Returns:
        Where the old folder is now, for the caller to remove; None if there was none.
    """
    if not target.exists() or not any(target.iterdir()):
        new.replace(target)
        return None
    if _exchange(new, target):
        return new
    target.replace(aside)
    new.replace(target)
    return aside


def remove_leftovers(folder: Path) -> None:
    """Finish or remove what killed runs left in ``folder``; what living processes write stays."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return
    for partial in folder.glob(".*.partial"):
        match = _PARTIAL.fullmatch(partial.name)
        if match is None or not partial.is_dir() or not _is_left(partial):
            continue
        target, old = folder / match["name"], partial / _OLD
        with suppress(OSError):  # another process may be doing the same
            if old.is_dir() and not target.exists():
                old.replace(target)
            _discard(partial)


def _discard(partial: Path) -> None:
    """Remove a partial folder, last of all who owns it: a kill in between leaves one that is known."""
    for name in (_NEW, _OLD):
        shutil.rmtree(partial / name, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)


def _is_left(partial: Path) -> bool:
    """True if no process writes this folder any more."""
    try:
        owner = json.loads((partial / _OWNER).read_text(encoding="utf-8"))
        return owner_is_gone(owner)
    except (OSError, ValueError):
        pass
    try:  # killed before it could say whose it is: then there is nothing in it
        fresh = time.time() - partial.stat().st_mtime < _EMPTY_AFTER_S
        return not fresh and {p.name for p in partial.iterdir()} <= {_OWNER}
    except OSError:
        return False


def this_process() -> dict[str, object]:
    """What `owner_is_gone` needs to know this process again: pid, host, and when it began."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _start_of(os.getpid())}


def owner_is_gone(owner: object) -> bool:
    """True if the process that wrote an ``owner.json`` is known to have ended.

    Args:
        owner: what the file holds: pid, host, and the process's start where the system tells it.
    """
    if not isinstance(owner, dict) or not isinstance(owner.get("pid"), int):
        return False
    if owner.get("host") != socket.gethostname():
        return False  # a process of another machine cannot be asked
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return owner.get("started") != _start_of(owner["pid"])  # the number may have been given out again


def _start_of(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None where the system has no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _holds(target: Path, source: Path) -> bool:
    """True if ``source`` is the folder ``target`` or lies in it, by whatever path."""
    source = source.expanduser().resolve()
    if not target.exists() or not source.exists():
        return False
    return any(folder.samefile(target) for folder in (source, *source.parents))


def _is_fixed(target: Path) -> bool:
    """True for a folder that cannot be renamed, or must not be: somebody stands in it."""
    if not target.is_dir():
        return False
    return (
        target.is_mount()
        or target in (Path.cwd(), *Path.cwd().parents)
        or (os.access(target, os.W_OK) and not os.access(target.parent, os.W_OK))
    )


def _carry_over(target: Path, new: Path, replaced: tuple[str, ...]) -> None:
    """Give ``new`` the files of ``target`` that it does not replace, as further names of the same data."""
    if not target.is_dir():
        return
    has_weights = any(file.match(_WEIGHTS[0]) for file in new.iterdir())
    for entry in target.iterdir():
        if (new / entry.name).exists() or _PARTIAL.fullmatch(entry.name):
            continue
        stale = any(entry.match(pattern) for pattern in replaced)
        if stale and (has_weights or replaced is not _WEIGHTS):
            continue
        if entry.name in RECORDS and any((new / name).exists() for name in files_of(entry)):
            continue  # what it says it wrote is no longer there
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry, new / entry.name)
    shutil.copymode(target, new)


def _carry_over_others(target: Path, new: Path, written: frozenset[str]) -> None:
    """Give ``new`` all of ``target`` but the files in ``written``, as further names of the same data.

    Raises:
        BadInput: ``new`` has a file of the same name as one that is not in ``written``.
    """
    if not target.is_dir():
        return
    refuse_others(target, (p.relative_to(new).as_posix() for p in new.rglob("*") if not p.is_dir()), written)
    folders = [target]
    for path in sorted(target.rglob("*")):
        inner = path.relative_to(target)
        is_folder = path.is_dir() and not path.is_symlink()
        if inner.as_posix() in written or _PARTIAL.fullmatch(inner.parts[0]):
            continue
        if is_folder and any(path.iterdir()):
            continue  # made with the first file in it that stays
        for folder in reversed([*([path] if is_folder else []), *path.parents]):
            if folder.is_relative_to(target) and not (new / folder.relative_to(target)).is_dir():
                (new / folder.relative_to(target)).mkdir()
                folders.append(folder)
        if not is_folder:
            _link(path, new / inner)
    for folder in reversed(folders):
        shutil.copymode(folder, new / folder.relative_to(target))


def _link(source: str | Path, place: str | Path) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, place, follow_symlinks=False)


def _fill(new: Path, target: Path) -> None:
    """Move everything from ``new`` into the empty ``target``; what makes it a model comes last."""
    sync(new)
    if any(not _PARTIAL.fullmatch(entry.name) for entry in target.iterdir()):
        raise _written_meanwhile(target)
    for entry in sorted(new.iterdir(), key=lambda p: (p.name in (MODEL, ADAPTER), p.name)):
        entry.replace(target / entry.name)
    fsync(target)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders trade names in one step; False if this system cannot."""
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def is_disk_full(error: BaseException) -> bool:
    """True if the error, or one beneath it, says that the file system takes no more."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL:
            return True
        if any(
            f"os error {number}" in str(cause) for number in _DISK_FULL
        ):  # safetensors tells it in the text only
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def fsync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def give_the_umasks_mode(folder: Path) -> None:
    """Of all files in a new folder: writers of weights begin with some that only their owner may read."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | mode)


def sync(folder: Path) -> None:
    """Bring a folder with all that is in it to the disk."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            fsync(path)


def _write_error(target: Path, error: Exception) -> BadInput:
    if is_disk_full(error):
        free = shutil.disk_usage(_existing(target)).free
        return BadInput(
            f"the disk is full while writing {target} ({size(free)} free); nothing was changed "
            "there, free some space or choose another disk."
        )
    reason = getattr(error, "strerror", None) or str(error)
    return BadInput(
        f"cannot write to {target} ({reason}); nothing was changed there, choose a folder you may write to."
    )


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.is_dir())
