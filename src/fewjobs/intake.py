"""What a launcher asks for: its command line is read, its result is looked for among those that are kept."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from fewjobs.cache import Cache, file_clock, variables
from fewjobs.client import Client
from fewjobs.command import TEMPORARY, read_command, threads_of, unit_name
from fewjobs.depfile import read_depfile, write_depfile
from fewjobs.predict import keys_of
from fewjobs.request import Request
from fewjobs.stage import Stage
from fewjobs.tools import has_launchers

WORTH_KEEPING_S = 0.25  # what compiles faster is not worth a look at its headers
LARGE_INPUT_BYTES = 4 * 2**20  # read beside the loop, which has to keep sampling
Found = tuple[str, str] | None


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - for every compilation
        return file.read()


class Intake:
    """Reads requests, and asks the cache.

    Args:
        cache: finished objects, or None.
        scratch: folder for depfiles that only we asked for.
        clock: seconds of the build.
        worth_keeping_s: what compiles faster is not kept.
    """

    def __init__(
        self,
        cache: Cache | None,
        scratch: Path,
        clock: Callable[[], float],
        worth_keeping_s: float = WORTH_KEEPING_S,
    ) -> None:
        self.worth_keeping_s = worth_keeping_s
        self.cache, self.scratch, self.clock = cache, str(scratch), clock
        self._count = 0
        self.nvcc_threads = 1
        self.ready: deque[Callable[[], None]] = deque()
        self.wakes, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.wakes)
        os.close(self._wake)

    def read(self, pid: int, tool: str, above: Request | None, said: Sequence[str] = ()) -> Request | None:
        """The request of a launcher, or None for a command that is none of ours.

        Args:
            pid: the launcher.
            tool: what it is to run.
            above: the request that this is a part of.
            said: its folder and arguments, where it has told them.
        """
        try:
            cwd = said[0] if said else os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115 - for every compilation
            words = said[1:] or os.fsdecode(_bytes(f"/proc/{pid}/cmdline")).split("\0")[:-1]
        except OSError:
            return None
        if len(words) > 3 and words[2].endswith("launch.py"):  # the launcher in Python
            words = words[3:]
        first = words[0].rpartition("/")[2] if words else ""
        args = words[2:] if first == "fewbits-launch" else words[1:]
        command = read_command(tool, args, cwd)
        unit = above.unit if above is not None else unit_name(command)
        if command.name == "nvcc":
            self.nvcc_threads = max(self.nvcc_threads, threads_of(command.args))
        is_driver = command.name == "nvcc" and has_launchers(command.tool.rpartition("/")[0])
        arch = "" if command.name == "nvcc" and is_driver else command.arch
        stage = Stage(unit, arch, command.name, command.tool)
        if command.source:
            try:
                stage.input_bytes = os.stat(command.place(command.source)).st_size  # noqa: PTH116
            except OSError:
                stage.input_bytes = 0
        return Request(command, unit, stage, is_driver, pid, asked_s=self.clock())

    def find_keys(self, request: Request, *, by_content: bool = True) -> None:
        """Fill in under which keys the history of its stage is kept: by names and the source's content."""
        command, stage = request.command, request.stage
        if stage.keys or request.is_driver:
            return
        digest = ""
        if by_content and self.cache is not None and command.source and not TEMPORARY.search(command.source):
            digest = self.cache.digest(command.place(command.source))
        stage.keys = keys_of(command, request.unit, command.name, stage.arch, digest)

    def look_up(self, request: Request, answer: Callable[[Found], None]) -> None:
        """Ask the cache; the answer comes at once, or through ``ready`` when much has to be read."""
        if self.cache is None:
            answer(None)
        elif request.stage.input_bytes < LARGE_INPUT_BYTES or request.command.name not in ("cicc", "ptxas"):
            answer(self._find(request))
        else:
            threading.Thread(target=self._find_beside, args=(request, answer), daemon=True).start()

    def _find_beside(self, request: Request, answer: Callable[[Found], None]) -> None:
        result = self._find(request)
        self.ready.append(lambda: answer(result))
        with contextlib.suppress(OSError):
            os.write(self._wake, b".")

    def answer_ready(self) -> None:
        """Give the answers that have been found beside the loop."""
        with contextlib.suppress(OSError):
            os.read(self.wakes, 4096)
        while self.ready:
            self.ready.popleft()()

    def _find(self, request: Request) -> Found:
        assert self.cache is not None
        self._count += 1
        scratch = f"{self.scratch}/{self._count}.d"
        request.recipe = self.cache.draft(request.command, scratch)
        if request.recipe is None or not self.cache.may_know(request.command):
            return None
        self._find_key(request)
        if request.recipe is None or not self.cache.has(request.recipe):
            return None
        return self.cache.fetch(request.recipe)

    def _find_key(self, request: Request) -> None:
        """The key of its recipe, while its launcher is there; without one nothing is kept."""
        assert self.cache is not None
        if request.recipe is None or request.recipe.key:
            return
        try:
            environ = variables(_bytes(f"/proc/{request.pid}/environ"))
        except OSError:
            request.recipe = None
            return
        request.recipe = self.cache.keyed(request.recipe, environ)

    def is_waited_for(self, request: Request) -> bool:
        """Whether something has to be done for the command before its launcher may end."""
        recipe = request.recipe
        return recipe is not None and (bool(recipe.wanted_depfile) or self.worth_keeping_s < WORTH_KEEPING_S)

    def replaced(self, request: Request) -> tuple[str, ...]:
        """The number of arguments to run instead of the command's own, and these; ("0",) for the same."""
        if request.recipe is None or not request.recipe.args or request.command.tool == "":
            return ("0",)
        args = request.recipe.args
        if sum(map(len, args)) > 60_000 or not request.command.plain:
            request.recipe = None  # too long to send, or the words came from a response file
            return ("0",)
        return (str(len(args)), *args)

    def finished(self, request: Request, client: Client, printed: tuple[int, int], seconds: float) -> str:
        """Keep the result of a command that has succeeded, if that saves time.

        Returns "", or a sentence why the command has not succeeded after all: its depfile cannot be written.
        """
        if seconds >= self.worth_keeping_s and self.cache is not None:
            self._find_key(request)
        recipe = request.recipe
        if recipe is None or self.cache is None:
            return ""
        if recipe.wanted_depfile:
            names = read_depfile(Path(recipe.depfile))
            try:
                write_depfile(recipe.command, recipe.command.path(recipe.wanted_depfile), names)
            except OSError as error:
                return f"fewbits build: cannot write {recipe.wanted_depfile}: {error.strerror}\n"
        if seconds >= self.worth_keeping_s:
            out = client.printed(printed[0])
            err = out if printed[1] == printed[0] else client.printed(printed[1])
            if out is not None and err is not None:
                together = printed[0] == printed[1]
                started = client.began or file_clock() - seconds - 1
                with contextlib.suppress(OSError):  # a full disk: the build folder has the object
                    self.cache.store(recipe, started=started, out="" if together else out, err=err)
        if recipe.args:
            with contextlib.suppress(OSError):
                os.unlink(recipe.depfile)  # noqa: PTH108 - for every compilation
        return ""
