"""No rank waits for one that is gone: heartbeats, and the sentence of the first rank that failed.

torchrun ends the other processes of a machine when one of them dies, but it does not tell the other machines,
and a process that waits in a collective of NCCL notices nothing. So a thread of each process writes a beat
into the store and looks at its right neighbour's: one that has fallen silent is reported to all. A rank that
fails by itself reports its own sentence, and so does one whose launcher is gone, which nobody would end with
the others. Whoever reads a report ends at once, with that sentence, even while its main thread waits.

The cost: each rank makes about four short requests in a period, whatever the number of ranks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fewbits.errors import PeerLost
from fewbits.training.ranks.neighbours import Place
from fewbits.training.ranks.processes import Ranks, is_broken_connection

_FAILED = "failed"
_LEFT = b"left"


@dataclass(frozen=True)
class Pace:
    """How often a beat is written, and how long a silence is a death; in all less than a minute."""

    period_s: float = 3.0
    silence_s: float = 40.0
    stopped_s: float = 15.0  # for which a process of this machine may be stopped


def end_process(sentence: str) -> None:
    """Say it, leave it for torchrun, and end, whatever the main thread is waiting for."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(PeerLost(sentence))
    sys.stderr.write(f"error: {sentence}\n")
    sys.stderr.flush()
    os._exit(1)


class Watch:
    """The thread that beats and looks; a context around everything that may wait for other ranks."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        pace: Pace | None = None,
        end: Callable[[str], None] = end_process,
        told: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Nothing runs before the context begins.

        Args:
            ranks: this process; alone it has nobody to watch.
            pace: of beats.
            end: ends the process with a sentence.
            told: gets the sentence before the end, such as to note it in the run's record.
        """
        self.ranks, self.pace = ranks, pace or Pace()
        self._end, self._told = end, told
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        # a connection of its own: a main thread that waits in the store holds the other one
        self._store: Any = None if ranks.size == 1 else ranks.store.clone()
        self._places: dict[int, Place] = {}
        self._still: dict[int, float] = {}  # since when a neighbour is stopped
        self._launcher = os.getppid() if dist.is_torchelastic_launched() else None

    def __enter__(self) -> Watch:
        if self._store is not None:
            self._store.set(f"place/{self.ranks.rank}", json.dumps(Place.here().as_dict()))
            self._thread = threading.Thread(target=self._run, name="fewbits-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * self.pace.period_s)
        if self._store is None:
            return
        if error is None:
            self._say_left()
        elif is_broken_connection(error):
            sentence = self._why_broken(error)
            self._let_others_read()
            raise PeerLost(sentence) from error
        else:
            if not isinstance(error, PeerLost):
                self._report(f"{self.ranks} stopped: {_sentence(error)}")
            self._let_others_read()

    def _let_others_read(self) -> None:
        """Without torchrun the leader's process holds the store: others may still have to read in it."""
        deadline = time.monotonic() + 2 * self.pace.period_s
        others = [f"bye/{rank}" for rank in range(self.ranks.size)]
        try:
            self._store.set(f"bye/{self.ranks.rank}", "")
            while self.ranks.leads and time.monotonic() < deadline and not self._store.check(others):
                time.sleep(0.05)
        except RuntimeError:  # it is gone already
            return

    def _why_broken(self, error: BaseException) -> str:
        """The report of the rank that is to blame, if it had the time for one."""
        deadline = time.monotonic() + self.pace.period_s
        while time.monotonic() < deadline:
            try:
                if self._store.check([_FAILED]):
                    return str(self._store.get(_FAILED).decode())
            except RuntimeError:  # the store went with the rank that held it
                break
            time.sleep(0.1)
        return (
            f"{self.ranks} lost the connection to another rank ({_first_line(error)}), which was probably"
            " killed; the checkpoints are whole: look at the other ranks' logs, then go on with resume."
        )

    def _report(self, sentence: str) -> None:
        with suppress(RuntimeError):  # nobody is left to read it
            self._store.compare_set(_FAILED, "", sentence)

    def _say_left(self) -> None:
        with suppress(RuntimeError):  # the rank that held the store has left too
            self._store.set(self._key(self.ranks.rank), _LEFT)

    def _run(self) -> None:
        right = (self.ranks.rank + 1) % self.ranks.size
        last, beat = b"", 0
        since = reached = before = time.monotonic()
        while not self._done.wait(self.pace.period_s):
            beat += 1
            now = time.monotonic()
            if now - before > 3 * self.pace.period_s + 1:  # this process was stopped, or its machine
                since = reached = now
                self._still.clear()
            before = now
            if self._launcher is not None and os.getppid() != self._launcher:
                self._report(self._orphaned())
                return self._stop(self._orphaned())
            try:
                self._store.set(self._key(self.ranks.rank), str(beat))
                failed = self._store.check([_FAILED]) and self._store.get(_FAILED).decode()
                heard = self._store.get(self._key(right)) if self._store.check([self._key(right)]) else b""
                reached = now
            except RuntimeError as error:
                if now - reached > self.pace.silence_s:
                    return self._stop(self._store_gone(error))
                continue
            if failed:
                return self._stop(failed)
            if heard != last:
                last, since = heard, now
            elif heard != _LEFT and now - since > self.pace.silence_s:
                self._report(self._silent(right))
            self._look_beside(now)
        return None

    def _look_beside(self, now: float) -> None:
        """Both neighbours, where they are processes of this machine."""
        size = self.ranks.size
        for rank in {(self.ranks.rank + step) % size for step in (1, -1)} - {self.ranks.rank}:
            try:
                if rank not in self._places and self._store.check([f"place/{rank}"]):
                    self._places[rank] = Place(**json.loads(self._store.get(f"place/{rank}").decode()))
                place = self._places.get(rank)
                fate = "" if place is None else place.fate()
                # it may have left, and then ended, in the meantime
                left = (
                    fate
                    and self._store.check([self._key(rank)])
                    and self._store.get(self._key(rank)) == _LEFT
                )
            except RuntimeError:  # the store is gone, which is told elsewhere
                return
            if place is None or left or fate != "stopped":
                self._still.pop(rank, None)
            if place is None or left or not fate:
                continue
            who = f"rank {rank} of {size} (process {place.pid} on {self.ranks.host})"
            whole = "the checkpoints are whole: go on with resume."
            if fate == "gone":
                self._report(f"{who} is gone, and has not said why; {whole}")
            elif now - self._still.setdefault(rank, now) > self.pace.stopped_s:
                self._report(f"{who} has been stopped for {now - self._still[rank]:.0f} s; {whole}")

    def _stop(self, sentence: str) -> None:
        if self._done.is_set():
            return
        self._told(sentence)
        with suppress(RuntimeError):  # the store may be gone, with its rank
            self._store.set(f"bye/{self.ranks.rank}", "")
        self._end(sentence)

    def _silent(self, rank: int) -> str:
        return (
            f"rank {rank} of {self.ranks.size} has given no sign of life for {self.pace.silence_s:g} s, so it"
            " or its machine is gone; the checkpoints are whole: go on with resume."
        )

    def _orphaned(self) -> str:
        return (
            f"the launcher of {self.ranks} (process {self._launcher}) is gone; the checkpoints are whole: go"
            " on with resume."
        )

    def _store_gone(self, error: BaseException) -> str:
        return (
            f"{self.ranks} cannot reach the store of the first machine any more ({_first_line(error)}), so"
            " the run's launcher there is gone; the checkpoints are whole: go on with resume."
        )

    @staticmethod
    def _key(rank: int) -> str:
        return f"beat/{rank}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if text.endswith(".") else f"{type(error).__name__}: {text}."
