"""The lock on a run folder: one run at a time writes there, and others can tell whether it still lives.

The file ``run.lock`` names the owner (process, host, machine, when it began, its launch) and is held with
flock, which the kernel gives back when the owner ends in whatever way. So on one machine the truth does not
depend on numbers of processes, which come again. The owner touches the file every `HEARTBEAT_S` seconds: the
last sign of life, for those on other machines, where a lock may not be seen. Where the file system has no
flock, the owner's process is looked for by its number and the time it began.

Several ranks share one lock. The leader owns it, the others ask nothing:

    lock = RunLock(folder, launch=launch)           # a context: it gives back on its way out what was taken
    ranks.led("run folder", lock.take)              # rank 0 takes it; its refusal is raised on every rank

* ``take`` may be called again; it does nothing then. ``release`` gives the folder back and removes the file,
  and also the folder where nothing else was ever put into it.
* ``launch`` names the launch that the process belongs to (torchrun's run id); None: a launch of its own. What
  an earlier attempt of the same launch has left is taken over on any machine, and one that is just being
  ended is waited for, `PATIENCE_S` seconds.
* ``take_over`` takes what a process of another machine has left, which cannot be seen to be dead.
* ``confirm`` raises where another process has taken the folder over in the meantime: the leader asks before
  it writes a checkpoint or a record.

A run of several machines whose ranks were started apart (one torchrun or srun task each, without one
rendezvous) is several leaders: the first takes the lock, the others are refused with a sentence.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from fewbits.errors import BadInput, TrainingStopped

try:
    import fcntl
except ModuleNotFoundError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

FILE = "run.lock"
HEARTBEAT_S = 10.0
PATIENCE_S = 30.0
_GLANCE_S = 0.3  # somebody who only looks holds the lock for an instant
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Owner:
    """Who holds, or held, a run folder.

    Attributes:
        pid: number of the process.
        host: name of its machine.
        machine: what tells one running kernel from all others; empty where the system does not say.
        began: when the process began, in seconds since 1970, as the system counts it.
        taken: when the folder was taken, for people.
        launch: the launch it belongs to, or None.
    """

    pid: int
    host: str
    machine: str = ""
    began: float = 0.0
    taken: str = ""
    launch: str | None = None

    @classmethod
    def here(cls, launch: str | None = None) -> Owner:
        """This process."""
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=_BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.is_file() else "",
            began=psutil.Process().create_time(),
            taken=datetime.now(UTC).isoformat(timespec="seconds"),
            launch=launch,
        )

    @classmethod
    def read(cls, text: str) -> Owner | None:
        """From the file's text; None: it names nobody."""
        try:
            return cls.read_facts({**json.loads(text)})
        except (ValueError, TypeError, RecursionError):
            return None

    @classmethod
    def read_facts(cls, facts: Mapping[str, Any]) -> Owner | None:
        """From plain values, of which some may be left out; None: they are not of these kinds."""
        kinds = {"pid": int, "host": str, "machine": str, "began": float, "taken": str}
        launch = facts.get("launch")
        try:
            values: dict[str, Any] = {name: kinds[name](facts[name]) for name in kinds if name in facts}
            return cls(**values, launch=None if launch is None else str(launch))
        except (ValueError, TypeError, OverflowError):
            return None

    def is_near(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        me = Owner.here()
        return self.host == me.host or bool(self.machine and self.machine == me.machine)

    def still_runs(self) -> bool:
        """Whether its process, and not another of that number, runs on this machine."""
        if not self.is_near():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.began) < 1.0
        except psutil.Error:
            return False

    def is_same(self, other: Owner) -> bool:
        """Whether both are one process."""
        return (self.pid, self.host, self.machine) == (other.pid, other.host, other.machine)

    def __str__(self) -> str:
        """For a sentence."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Holder:
    """What can be told of a folder's lock.

    Attributes:
        owner: who has written the file; None: nobody, or it cannot be read.
        is_alive: False: it ended without giving the folder back; None: of another machine, nobody knows.
        seen: the last sign of life.
    """

    owner: Owner | None
    is_alive: bool | None
    seen: datetime


def holder_of(folder: Path) -> Holder | None:
    """Who holds a run folder; None: nobody. It waits for nothing and changes nothing."""
    path = folder / FILE
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # there is none, or it is no file of ours to read
        return None
    try:
        modified = datetime.fromtimestamp(os.fstat(handle).st_mtime, UTC)
        owner = Owner.read(_text(handle))
        held = _is_held(handle, shared=True)
        if held is None:
            held = owner is not None and owner.still_runs()
        if not held and owner is not None and not owner.is_near():
            return Holder(owner, None, modified)
        return Holder(owner, held, modified)
    except OSError:  # a folder of that name, for one
        return None
    finally:
        os.close(handle)


class RunLock:
    """The lock of one run folder, in the process that leads the run."""

    def __init__(
        self,
        folder: str | Path,
        *,
        launch: str | None = None,
        take_over: bool = False,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Nothing is taken yet.

        Args:
            folder: the run folder; `take` makes it.
            launch: the launch that this process belongs to.
            take_over: take what a process of another machine has left.
            tell: gets the sentence when something is taken over.
        """
        self.folder = Path(folder)
        self.path = self.folder / FILE
        self.launch, self.take_over, self.tell = launch, take_over, tell
        self._me = Owner.here(launch)
        self._handle: int | None = None
        self._made: list[Path] = []
        self._done = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.release()

    @property
    def is_ours(self) -> bool:
        """Whether this object has taken the folder."""
        return self._handle is not None

    def take(self) -> None:
        """Take the folder, or refuse.

        Raises:
            BadInput: another process has it, or a process of another machine may have it.
        """
        if self.is_ours:
            return
        self._me = Owner.here(self.launch)
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        deadline = time.monotonic() + PATIENCE_S
        while (handle := self._try()) is None:
            owner = self._owner()
            mine = owner is not None and self.launch is not None and owner.launch == self.launch
            if time.monotonic() > deadline or not mine:
                who = "another process" if owner is None else f"{owner}, since {owner.taken}"
                raise BadInput(
                    f"output_dir {self.folder} is in use by {who}; wait until that run has ended, or choose"
                    " another output_dir."
                )
            time.sleep(0.2)
        self._handle = handle
        self._done.clear()
        self._beating = threading.Thread(
            target=self._beat, args=(handle,), name="fewbits-run-lock", daemon=True
        )
        self._beating.start()

    def _try(self) -> int | None:
        """The open and locked file with this process in it; None: somebody has it."""
        handle = self._open()
        if handle is None:
            return None
        is_locked = False
        try:
            self._refuse_or_tell(Owner.read(_text(handle)))
            text = json.dumps(asdict(self._me)).encode()
            os.ftruncate(handle, 0)
            os.pwrite(handle, text, 0)
            os.fsync(handle)
            is_locked = True
        finally:
            if not is_locked:
                os.close(handle)
        return handle

    def _open(self) -> int | None:
        deadline = time.monotonic() + _GLANCE_S
        while True:
            handle = self._create()
            held = _is_held(handle, shared=False)
            if held is None:  # no flock here
                owner = Owner.read(_text(handle))
                held = owner is not None and owner.is_near() and owner.still_runs()
            elif not held and not _is_named(handle, self.path):  # its last owner has just removed it
                os.close(handle)
                continue
            if not held:
                return handle
            os.close(handle)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def _create(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # its last owner has just removed the empty folder
            return self._create()
        except IsADirectoryError as error:
            raise BadInput(
                f"{self.path} is a folder, where the run's lock belongs; remove it, or choose another"
                " output_dir."
            ) from error
        except OSError as error:
            raise BadInput(
                f"output_dir {self.folder} cannot be written to ({error.strerror}); choose another one."
            ) from error

    def _refuse_or_tell(self, owner: Owner | None) -> None:
        """The lock is free: whoever left the file is dead, if it was of this machine."""
        if owner is None:
            return
        last = datetime.fromtimestamp(self.path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        ours = self.launch is not None and owner.launch == self.launch
        if not (owner.is_near() or ours or self.take_over):
            raise BadInput(
                f"output_dir {self.folder} is held by {owner}, another machine (last sign of life {last}), so"
                " it cannot be seen whether that run lives; if it is gone, go on with take_over=true,"
                " otherwise choose another output_dir."
            )
        self.tell(
            f"{self.folder} was left behind by {owner} (last sign of life {last}), which is taken for gone:"
            " this process takes the folder over."
            if not owner.is_near()
            else f"{self.folder} was left behind by {owner}, which was killed (last sign of life {last}):"
            " this process takes the folder over."
        )

    def _owner(self) -> Owner | None:
        try:
            return Owner.read(self.path.read_text(encoding="utf-8", errors="replace"))
        except OSError:  # given back at this moment
            return None

    def confirm(self) -> None:
        """See that the folder is still ours, if it ever was.

        Raises:
            TrainingStopped: another process has taken it over.
        """
        if self._handle is None:
            return
        owner = self._owner()
        if owner is not None and not owner.is_same(self._me):
            raise TrainingStopped(
                f"{self.folder} was taken over by {owner}, so this process writes nothing more there; its"
                " run goes on from the last checkpoint."
            )

    def release(self) -> None:
        """Give the folder back; nothing happens where it was not taken."""
        handle, self._handle = self._handle, None
        if handle is None:
            self._remove_empty()
            return
        self._done.set()
        if self._beating is not None:
            self._beating.join(timeout=HEARTBEAT_S)
        owner = self._owner()
        if _is_named(handle, self.path) and owner is not None and owner.is_same(self._me):
            with suppress(OSError):
                self.path.unlink()
        os.close(handle)
        self._remove_empty()

    def _remove_empty(self) -> None:
        """Of folders that `take` has made, those into which nothing was put."""
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                break
        self._made = []

    def _beat(self, handle: int) -> None:
        while not self._done.wait(HEARTBEAT_S):
            with suppress(OSError):  # the storage may be away for a while
                os.utime(handle)


def _text(handle: int) -> str:
    return os.pread(handle, 10_000, 0).decode("utf-8", errors="replace")


def _is_held(handle: int, *, shared: bool) -> bool | None:
    """Whether somebody else has locked the file; if not, it is locked now. None: no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # ENOSYS, ENOLCK, EOPNOTSUPP: this file system has none
        return None
    return False


def _is_named(handle: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


__all__ = ["FILE", "Holder", "Owner", "RunLock", "holder_of"]
