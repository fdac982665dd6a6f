"""Running a build command under the controller, from its start to the last process that it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fewjobs.cache import Cache
from fewjobs.controller import Controller
from fewjobs.errors import BadInput, Unsupported
from fewjobs.file_systems import IN_MEMORY, file_system
from fewjobs.intake import WORTH_KEEPING_S, Intake
from fewjobs.native import Native, build_native
from fewjobs.options import Options
from fewjobs.predict import History
from fewjobs.sample import descendants, own_peak_bytes
from fewjobs.tools import child_environment, make_tools
from fewjobs.trace import Trace
from fewjobs.verdict import Verdict
from fewjobs.watch import BudgetWatch
from fewjobs.window import Window, widen

CACHE_BYTES = 20 * 2**30
GRACE_S = 5.0  # between asking and killing
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Settings:
    """What the user chooses.

    Attributes:
        memory_bytes: the build's own limit; None: what there is.
        keep: folder for kept objects and the build's temporary files; None: the user's cache.
        jobs: stages at once; None: one for each processor.
        log: file for a line about everything that is done.
        pager: whether memory may be paged to the disk.
        cache: whether finished objects are kept.
        compile_native: whether launcher and pager may be compiled; else launchers are Python scripts.
        stage_limit_bytes: growth of one stage past it is a runaway; None: past what is known of its kind.
        exact_jobs: the command's number of jobs is left alone.
        worth_keeping_s: an object that took less time is not kept.
        root: where ``proc`` and ``sys`` are.
    """

    memory_bytes: int | None = None
    keep: Path | None = None
    jobs: int | None = None
    log: Path | None = None
    pager: bool = True
    cache: bool = True
    compile_native: bool = True
    stage_limit_bytes: int | None = None
    exact_jobs: bool = False
    worth_keeping_s: float = WORTH_KEEPING_S
    root: Path = Path("/")


@dataclass
class Result:
    """How a build went.

    Attributes:
        code: what the command ended with.
        profile: everything that was measured.
        verdicts: on the stages that were stopped.
        notes: what could not be done, and why.
    """

    code: int
    profile: dict[str, Any]
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_build(
    command: Sequence[str],
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    on_tick: Callable[[Controller], None] | None = None,
    output: Callable[[bytes], None] | None = None,
) -> Result:
    """Run one build command.

    Args:
        command: the command and its arguments.
        settings: what the user chooses.
        environ: the environment to start from (default: this process's).
        on_tick: called with the controller after every sample, to show it.
        output: called with what the command prints, instead of its going where ours goes.
    """
    environ = _own_environment() if environ is None else dict(environ)
    if not command:
        raise BadInput("there is no command to run; write it behind --, as in -- ninja -j8.")
    executable = shutil.which(command[0], path=environ.get("PATH"))
    if executable is None:
        raise BadInput(f"there is no command {command[0]!r} on the PATH; check its name, or give its path.")
    if environ.get("FEWBITS_BUILD") and Path(environ["FEWBITS_BUILD"], "sock").exists():
        # Inside another fewbits build, which watches everything already.
        code = _plain_run(command, environ)
        return Result(code, {}, notes=["this is part of another fewbits build, which watches it"])
    return _Run(command, settings, environ, on_tick, output).go()


def _own_environment() -> dict[str, str]:
    """Our environment as it was given to us: Python adds LC_CTYPE in the C locale, which changes messages."""
    environ = dict(os.environ)
    with contextlib.suppress(OSError):
        variables = Path("/proc/self/environ").read_bytes().split(b"\0")
        if environ.get("LC_CTYPE") == "C.UTF-8" and not any(e.startswith(b"LC_CTYPE=") for e in variables):
            del environ["LC_CTYPE"]
    return environ


def _plain_run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    pid = os.posix_spawnp(command[0], list(command), dict(environ))
    _, status = os.waitpid(pid, 0)
    return _code(status)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """The user's folder for everything that fewbits build keeps."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "/var/tmp", ".cache")  # noqa: PTH118
    return Path(base, "fewbits", "build")


class _Run:
    """One build."""

    def __init__(
        self,
        command: Sequence[str],
        settings: Settings,
        environ: Mapping[str, str],
        on_tick: Callable[[Controller], None] | None,
        output: Callable[[bytes], None] | None,
    ) -> None:
        self.command, self.settings, self.environ, self.on_tick = command, settings, environ, on_tick
        self.output = output
        self.root = usable_root(environ)
        self.keep = settings.keep.absolute() if settings.keep is not None else None
        self.notes: list[str] = []
        root = cache_root(environ)
        if self.root != root.resolve():
            self.notes.append(f"{root} cannot be used; what is to be kept is in {self.root}")
        self.pid = 0
        self.status: int | None = None
        self.asked_to_stop = 0
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._heard = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]
        self.stop_s = 0.0

    def go(self) -> Result:
        """Run it, and clean up whatever happens."""
        slots = self.settings.jobs or len(os.sched_getaffinity(0))
        native = Native(None, None, "not asked for")
        if self.settings.compile_native:
            native = build_native(self.root / "native", self.environ)
        if native.launcher is None:
            self.notes.append(f"launchers are Python scripts, 20 ms each: {native.reason}")
        pager = native.pager if self.settings.pager else None
        if pager is None and self.settings.pager:
            self.notes.append(f"compilers' memory cannot be moved to the disk: {native.reason}")
        tools = make_tools(self.root, native, self.environ)
        store = self.keep or self.root
        for folder in (store, *([store / "tmp"] if self.keep else [])):
            folder.mkdir(parents=True, exist_ok=True)
        run_folder = _run_folder(self.root)
        pages = _pages_folder(store, self.environ)
        if pages is None and pager is not None:
            pager = None
            self.notes.append("compilers' memory cannot be moved to the disk: every folder is on tmpfs")
        trace = Trace(self.command, slots, tools.toolkit, self.settings.log)
        trace.facts = _facts(self.environ, store, pager is not None)
        cache = Cache(store / "cache") if self.settings.cache else None
        if cache is not None:
            cache.trim(CACHE_BYTES)
        history = History(self.root / "history.jsonl")
        history.load()
        options = Options(
            run_folder,
            slots,
            self.settings.memory_bytes,
            pager,
            pages or run_folder,
            self.settings.stage_limit_bytes,
        )
        budget = BudgetWatch(self.settings.memory_bytes, self.settings.root, self.environ)
        keep_s = self.settings.worth_keeping_s
        intake = Intake(cache, run_folder, lambda: time.monotonic() - trace.epoch, keep_s)
        window = self._window(slots)
        options.units = window.units or slots + 2
        environ = {**self.environ, **window.variables}
        child = child_environment(tools, environ, run_folder=run_folder, jobs=slots + 2, keep=self.keep)
        cpu_before = time.process_time()
        controller = Controller(options, history, intake, trace, budget, on_tick=self.on_tick)
        try:
            if window.note:
                trace.say(window.note)
                self.notes.append(window.note)
            with _subreaper(), self._signals(), _frozen():
                self._serve(controller, window.command, child)
        finally:
            controller.close()
            history.close()
            trace.close()
            _kill_all()
            if cache is not None:
                cache.flush()
            shutil.rmtree(run_folder, ignore_errors=True)
        if controller.others.uncaught:
            names = ", ".join(sorted(controller.others.uncaught))
            self.notes.append(f"not caught, and only counted: {names}; they were started by their own paths")
        code = 128 + self.asked_to_stop if self.asked_to_stop else _code(self.status or 0)
        budget_bytes = self.settings.memory_bytes or controller.budget_bytes
        cpu_s = time.process_time() - cpu_before  # for the seconds that the profile names, without making it
        profile = trace.profile(code=code, budget_bytes=budget_bytes, verdicts=controller.verdicts)
        profile["notes"] = self.notes
        profile["controller"] = {
            "cpu_s": round(cpu_s, 3),
            "ticks": controller.ticks,
            "tick_ms": round(1000 * controller.tick_cpu_s / max(1, controller.ticks), 3),
            "peak_rss_bytes": own_peak_bytes(),
        }
        profile["facts"].update(binding=controller.budget.why, nvcc_threads=intake.nvcc_threads)
        return Result(code, profile, controller.verdicts, self.notes)

    def _window(self, slots: int) -> Window:
        if self.settings.exact_jobs:
            return Window(list(self.command), {})
        return widen(self.command, self.environ, slots)

    def _serve(self, controller: Controller, command: list[str], child: dict[str, str]) -> None:
        actions, reader = [], -1
        if self.output is not None:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            actions = [(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_DUP2, writer, 2)]
        # What Python ignores, too: a compiler ends as it would without us.
        defaults = [signal.SIGPIPE, signal.SIGXFSZ, *self._heard]
        # The command is looked for on the user's PATH: ours begins with launchers.
        path = shutil.which(command[0], path=child["PATH"]) or command[0]
        self.pid = os.posix_spawn(path, command, child, file_actions=actions, setsigdef=defaults)
        if reader >= 0:
            os.close(writer)
            controller.watch(reader, lambda: self._relay(controller, reader))
        try:
            with contextlib.suppress(OSError):  # before Linux 5.3 its end is seen at the next tick
                end = os.pidfd_open(self.pid)
                controller.watch(end, lambda: self._wake(controller, end))
            controller.serve(self._finished)
        finally:
            if reader >= 0:
                self._drain(reader)

    def _wake(self, controller: Controller, end: int) -> None:
        controller.unwatch(end)
        os.close(end)

    def _relay(self, controller: Controller, reader: int) -> None:
        data = os.read(reader, 1 << 16)
        if not data:
            controller.unwatch(reader)
        elif self.output is not None:
            self.output(data)

    def _drain(self, reader: int) -> None:
        os.set_blocking(reader, False)
        with contextlib.suppress(OSError):
            while self.output is not None and (data := os.read(reader, 1 << 16)):
                self.output(data)
        os.close(reader)

    def _finished(self) -> bool:
        """Reap what has ended; done when the command itself has."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except OSError as error:
                if error.errno != errno.ECHILD:
                    raise
                return True
            if pid == 0:
                break
            if pid == self.pid:
                self.status = status
        if self.asked_to_stop and time.monotonic() - self.stop_s > GRACE_S:
            return True
        return self.status is not None

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and the like reach the command, and end us when it has ended.

        What is ignored here, as nohup has it, stays so for the command and its compilers too.
        """

        def stop(number: int, _: object) -> None:
            if not self.asked_to_stop:
                self.asked_to_stop, self.stop_s = number, time.monotonic()
            if self.pid and self.status is None:
                with contextlib.suppress(OSError):
                    os.kill(self.pid, number)
            for pid in descendants(os.getpid()):  # a stopped process hears nothing
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

        before = {number: signal.signal(number, stop) for number in self._heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def usable_root(environ: Mapping[str, str] | None = None) -> Path:
    """The cache, or a folder beside the other temporary files where the home cannot be written.

    Its real path: launchers know their own folder by it, and compare it with the PATH.
    """
    home = cache_root(environ)
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_ours(home):
            return home.resolve()
    with contextlib.suppress(OSError):  # also where there is no folder for temporary files
        beside = Path(tempfile.gettempdir(), f"fewbits-build-{os.getuid()}")
        beside.mkdir(exist_ok=True, mode=0o700)
        if not beside.is_symlink() and _is_ours(beside):  # its name is known, and anybody may have taken it
            return beside.resolve()
    raise Unsupported(
        f"neither {home} nor the folder for temporary files can be written to and run from; "
        "set XDG_CACHE_HOME to a folder that can."
    )


def _is_ours(folder: Path) -> bool:
    """Whether a folder belongs to us, may hold programs, and takes a file, which is tried."""
    if folder.stat().st_uid != os.getuid() or os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return False
    with tempfile.TemporaryFile(dir=folder):
        return True


def _run_folder(root: Path) -> Path:
    """The private folder of this run, named by our process id so that launchers find it among ancestors."""
    runs = root / "runs"
    runs.mkdir(mode=0o700, exist_ok=True)
    for old in runs.iterdir():  # of runs that were killed
        if old.name.isdigit() and not Path("/proc", old.name).exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = runs / str(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def _pages_folder(store: Path, environ: Mapping[str, str]) -> Path | None:
    """A folder on a disk for memory that is paged out: the store's, TMPDIR or /var/tmp."""
    for place in (store, Path(environ.get("TMPDIR") or "/tmp"), Path("/var/tmp")):
        if file_system(place) not in IN_MEMORY and os.access(place, os.W_OK):
            return place
    return None


def _facts(environ: Mapping[str, str], store: Path, pager: bool) -> dict[str, Any]:
    """What the report's advice looks at, besides the stages."""
    temporary = environ.get("TMPDIR") or "/tmp"
    names = (
        "MAX_JOBS",
        "NVCC_THREADS",
        "TORCH_CUDA_ARCH_LIST",
        "NVTE_CUDA_ARCHS",
        "CMAKE_CUDA_ARCHITECTURES",
        "NVCC_APPEND_FLAGS",
        "NVTE_BUILD_THREADS_PER_JOB",
        "CMAKE_BUILD_PARALLEL_LEVEL",
    )
    return {
        "temporary": temporary,
        "temporary_file_system": file_system(Path(temporary)),
        "store": str(store),
        "pager": pager,
        "gpus": _gpus(environ),
        "variables": {name: environ[name] for name in names if name in environ},
    }


def _gpus(environ: Mapping[str, str]) -> list[str]:
    """Compute capabilities of the GPUs that are here."""
    smi = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if smi is None:
        return []
    command = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(re.findall(r"^\d+\.\d+", done.stdout, re.MULTILINE)))


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """What exists now is not looked through for garbage again and again while the build runs."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Orphans of the build become our children, so that none is left behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _kill_all()
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _kill_all() -> None:
    """End everything below us: first politely, then not."""
    deadline = time.monotonic() + 1.0
    for number in (signal.SIGTERM, signal.SIGKILL):
        while left := list(descendants(os.getpid())):
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)
            _reap()
            if number == signal.SIGTERM and time.monotonic() > deadline:
                break
            if time.monotonic() > deadline + 5:
                return


def _reap() -> None:
    with contextlib.suppress(OSError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
