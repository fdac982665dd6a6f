"""Processes that tests fork and kill."""

from __future__ import annotations

import os
import threading

from tqdm import tqdm


def fork() -> int:
    """`os.fork`, whose child draws its progress bars under a lock of its own.

    tqdm's lock is shared with forked processes: one that is killed while it holds it leaves every later
    progress bar of the parent waiting for ever.
    """
    pid = os.fork()
    if pid == 0:
        tqdm.set_lock(threading.RLock())
    return pid
