"""How Python itself behaves while a model is loaded: `collector_paused`, `quick_turns`, then as before.

Loading makes hundreds of thousands of objects that all stay: the tokenizer's words, modules, file headers.
Each time so many have come, Python's cyclic garbage collector walks through everything that torch and
transformers hold as well, 0.15 to 0.35 s a walk with the interpreter's lock held, and finds nothing. What no
name refers to any more is freed as ever, weights among it; only cycles wait for the end.

Readers of weights need the lock for some microseconds hundreds of times. One that computes in Python hands it
over only when it was asked for `sys.getswitchinterval` long, which is 5 ms: much longer than a reading takes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

TURN_S = 0.0005
_LOCK = Lock()


class _Setting:
    """A setting of the interpreter that the first that comes changes, and the last that goes gives back."""

    def __init__(self, change: Callable[[], Any], give_back: Callable[[Any], None]) -> None:
        self.change, self.give_back = change, give_back
        self.inside, self.before = 0, None

    @contextmanager
    def changed(self) -> Iterator[None]:
        with _LOCK:
            if not self.inside:
                self.before = self.change()
            self.inside += 1
        try:
            yield
        finally:
            with _LOCK:
                self.inside -= 1
                if not self.inside:
                    self.give_back(self.before)


def _pause() -> bool:
    was_at_work = gc.isenabled()
    gc.disable()
    return was_at_work


def _go_on(was_at_work: bool) -> None:
    if was_at_work:
        gc.enable()


def _shorten() -> float:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(TURN_S, before))
    return before


_COLLECTOR = _Setting(_pause, _go_on)
_TURNS = _Setting(_shorten, sys.setswitchinterval)


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection until all that are inside, in any thread, have left; then as before."""
    with _COLLECTOR.changed():
        yield


@contextmanager
def quick_turns() -> Iterator[None]:
    """Threads hand the interpreter's lock over after `TURN_S` seconds until all have left; then as before."""
    with _TURNS.changed():
        yield


__all__ = ["TURN_S", "collector_paused", "quick_turns"]
