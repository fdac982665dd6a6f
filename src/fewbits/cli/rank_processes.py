"""Looks after the processes that torch's agent has started: signals go to them, and none stands still unseen.

The agent waits in a thread. The main thread hands signals on: SIGTERM, SIGUSR1 and SIGHUP ask the ranks for a
checkpoint and the end, for which they may take their time; Ctrl-C ends them at once. A second signal kills.

A process that is stopped (SIGSTOP) is no dead one to the agent, and the others wait for it. The system tells
its parent, so it is named within a second or two, and after `STOPPED_S` it is ended, and with it the run.

When one process has ended, the agent ends the others. Which did it end, and which had ended before? Times do
not tell: this process may get no turn between two deaths. But Python announces every signal that it is about
to send (an audit event), in the thread that sends it. So what the agent has signalled is known for certain.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil

STOPPED_S = 10.0  # for which a process may stand still
_SAID_S = 1.0  # after which that is said
_INTERRUPTED_S = 10.0  # within which a process must have ended after Ctrl-C
_SAME_S = 2.0  # within which a signal is the first one again: `timeout` sends it to us and to our group
_ALONE_S = 15.0  # after which it is said that other machines are waited for
_WAIT_S, _LOOK_S = 0.2, 1.0  # looking goes through all processes of the machine
_HANDED_ON = {  # what came, and what the ranks get
    "SIGTERM": signal.SIGTERM,
    "SIGUSR1": signal.SIGUSR1,
    "SIGHUP": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
}


class RankProcesses:
    """The processes of one launch.

    Attributes:
        signal: the first that came; None: none did.
        ended_by_agent: numbers of the processes that lived when the agent sent them a signal.
        stopped: sentences about processes that stood still and were ended for it, by process number.
    """

    def __init__(self, work: Callable[[], None], *, restarts: bool = False, waits: str = "") -> None:
        """Nothing is started yet.

        Args:
            work: starts the processes and waits for them.
            restarts: whether it may start them again.
            waits: said after a while in which it has started none, because it waits for other machines.
        """
        self.restarts, self._waits = restarts, waits
        self.signal: signal.Signals | None = None
        self.stopped: dict[int, str] = {}
        self._agent = _Agent(work)
        # Such as the workers of torch.compile: neither a rank, nor to be sent a signal.
        self._earlier = {child.pid for child in psutil.Process().children()}
        self.ended_by_agent = self._agent.signalled
        self._asked: set[int] = set()  # numbers of the processes that got the signal
        self._still: dict[int, float] = {}  # since when, by process number
        self._said: set[int] = set()
        self._signalled = 0.0
        self._began = self._seen = time.monotonic()
        self._started = False

    def run(self) -> None:
        """Wait until all have ended.

        Raises:
            BaseException: what the agent raised.
        """
        before = {name: signal.getsignal(getattr(signal, name)) for name in _HANDED_ON}
        try:
            for name, old in before.items():
                if old is not signal.SIG_IGN:  # as nohup has it
                    signal.signal(getattr(signal, name), self._heard)
            self._agent.start()
            while self._agent.is_alive():
                self._agent.join(_WAIT_S)
                if time.monotonic() - self._seen < _LOOK_S:
                    continue
                children = _children(self._earlier)
                self._look(children)
                if self.signal is not None:
                    self._ask(children, self.signal)  # those that were started since; the agent is not told
                if self.signal is not None and not children and not self._started:
                    break  # it waits for other machines, and cannot be told
        finally:
            for name, old in before.items():
                signal.signal(getattr(signal, name), old)
            self._agent.listens = False
        if self._agent.error is not None:
            raise self._agent.error

    def _ask(self, children: list[psutil.Process], came: signal.Signals) -> None:
        """Hand a signal on to processes that did not get it yet."""
        for child in children:
            if child.pid not in self._asked:
                self._asked.add(child.pid)
                _send(child.pid, _HANDED_ON[came.name])

    def _heard(self, number: int, frame: FrameType | None) -> None:
        again, self.signal = self.signal is not None, self.signal or signal.Signals(number)
        self._signalled = self._signalled or time.monotonic()
        if again and number != signal.SIGINT and time.monotonic() - self._signalled < _SAME_S:
            return
        if not again:
            self._ask(_children(self._earlier), self.signal)
            return
        for child in _children(self._earlier):
            _send(child.pid, signal.SIGKILL)

    def _look(self, children: list[psutil.Process]) -> None:
        """Who stands still, or goes on after Ctrl-C."""
        now = time.monotonic()
        if now - self._seen > 5 * _LOOK_S:  # this process itself was stopped
            self._still.clear()
        self._seen, self._started = now, self._started or bool(children)
        if self._waits and not self._started and now - self._began > _ALONE_S:
            sys.stderr.write(self._waits)
            sys.stderr.flush()
            self._waits = ""
        if self.signal == signal.SIGINT and now - self._signalled > _INTERRUPTED_S:
            for child in children:
                _send(child.pid, signal.SIGKILL)
        for child in children:
            by = _stopped_by(child.pid)
            if by is None:
                self._still.pop(child.pid, None)
            else:
                self._judge(child, signal.Signals(by).name, now - self._still.setdefault(child.pid, now))

    def _judge(self, child: psutil.Process, by: str, seconds: float) -> None:
        who = f"{_rank_of(child)} (process {child.pid})"
        if seconds >= _SAID_S and child.pid not in self._said:
            self._said.add(child.pid)
            sys.stderr.write(
                f"{who} was stopped by {by}, and the others wait for it; kill -CONT {child.pid} lets it go"
                f" on, otherwise the run ends in {STOPPED_S - seconds:.0f} s.\n"
            )
            sys.stderr.flush()
        if seconds > STOPPED_S:
            self.stopped[child.pid] = (
                f"{who} was stopped by {by} and stood still for {seconds:.0f} s, so it was ended, and the run"
                " with it; the checkpoints are whole: go on with --resume."
            )
            _send(child.pid, signal.SIGKILL)


class _Agent(threading.Thread):
    """torch's agent, whose signal handlers are for a main thread: here it sets none."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="fewbits-agent", daemon=True)
        self.error: BaseException | None = None
        self.signalled: set[int] = set()
        self.listens = True  # what Python announces; who listens to it cannot be removed again
        self._work = work

    def run(self) -> None:
        sys.addaudithook(self._announced)
        with _Kept(self):
            self._work()

    def _announced(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.killpg", "os.kill") and self.listens and threading.get_ident() == self.ident:
            self.signalled.add(arguments[0])


class _Kept:
    """Keeps the error of a thread for who waits for it."""

    def __init__(self, agent: _Agent) -> None:
        self.agent = agent

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.agent.error = error
        return True


def _children(earlier: set[int]) -> list[psutil.Process]:
    """The ranks: what the agent has started, and not the processes that were there before."""
    children = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.pid not in earlier and child.status() != psutil.STATUS_ZOMBIE:
                children.append(child)
    return children


def _rank_of(child: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"rank {child.environ()['RANK']}"
    return "a rank"


def _stopped_by(pid: int) -> int | None:
    """The signal by which a child is stopped; None: it is not."""
    try:
        state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if state is None else state.si_status


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


__all__ = ["STOPPED_S", "RankProcesses"]
