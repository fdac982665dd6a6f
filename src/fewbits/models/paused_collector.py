"""`collector_paused`: Python's cyclic garbage collector stands still while a model is loaded.

Loading makes hundreds of thousands of objects that all stay: the tokenizer's words, modules, file headers.
Each time so many have come, the collector walks through everything that torch and transformers hold as well,
0.15 to 0.35 s a walk with the interpreter's lock held, and finds nothing. What no name refers to any more
is freed as ever, weights among it; only cycles wait for the end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_LOCK = Lock()
_INSIDE: list[bool] = []  # for each load that runs, in the order of coming: did it find the collector at work


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection until all that are inside, in any thread, have left; then as before."""
    with _LOCK:
        _INSIDE.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            first_found_it_at_work = _INSIDE.pop()
            if first_found_it_at_work and not _INSIDE:
                gc.enable()


__all__ = ["collector_paused"]
