"""Stages of a measurement, each with its own time limit, told at once and again in a table at the end."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class _TimeIsUpError(Exception):
    """A stage took longer than its limit."""


class Stages:
    """Runs stages one after the other; what one of them loses is lost for it alone.

    Attributes:
        seconds: for all stages together; a stage that cannot begin before is left out, and said to be.
        rows: (what, figure) of all stages so far.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, time.perf_counter()
        self.rows: list[tuple[str, str]] = []
        print(f"{device_name()}, torch {torch.__version__}", flush=True)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.perf_counter() - self.began)

    def tell(self, what: str, figure: str) -> None:
        """One more row of the table, printed at once."""
        self.rows.append((what, figure))
        print(f"[{time.perf_counter() - self.began:5.1f} s] {what}: {figure}", flush=True)

    def run(self, what: str, limit: float, stage: Callable[[], None]) -> None:
        """One stage of at most ``limit`` seconds; an error is printed and the next stage goes on."""
        limit = min(limit, self.left)
        if limit < 1:
            self.tell(what, "left out, the time is up")
            return
        try:
            with _limited(limit):
                stage()
        except _TimeIsUpError:
            self.tell(what, f"stopped after {limit:.0f} s")
        except Exception as error:  # noqa: BLE001 the other stages are worth having
            traceback.print_exc()
            self.tell(what, f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}")

    def table(self) -> None:
        """Everything that was told, as a table."""
        print(f"\nafter {time.perf_counter() - self.began:.1f} s\n\n| what | |\n| --- | --- |")
        for what, figure in self.rows:
            print(f"| {what} | {figure} |")


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TimeIsUpError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def device_name() -> str:
    """The GPU's name, or that there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def device() -> torch.device:
    """The GPU, or the CPU where there is none (to try a script)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds_of(run: Callable[[], object], rounds: int = 1) -> float:
    """The median time of ``run`` until the device is idle."""
    times = []
    for _ in range(rounds):
        _wait()
        began = time.perf_counter()
        run()
        _wait()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
