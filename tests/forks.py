"""Processes that tests fork and kill."""

from __future__ import annotations

import os
import threading

import torch
from tqdm import tqdm


def fork() -> int:
    """`os.fork`, whose child draws its progress bars under a lock of its own.

    tqdm's lock is shared with forked processes: one that is killed while it holds it leaves every later
    progress bar of the parent waiting for ever. And torch makes its pool of threads anew at the first use
    after a fork, unguarded: of the threads that transformers reads weights with, some found no pool ("Invalid
    thread pool!"). So one thread alone asks for it first.
    """
    pid = os.fork()
    if pid == 0:
        tqdm.set_lock(threading.RLock())
        torch.set_num_threads(torch.get_num_threads())
    return pid
