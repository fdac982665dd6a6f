"""Checkpoints written beside the training: their numbers are copied to the host, a thread does the rest.

A step waits for the copies alone, some milliseconds for adapters. `staged` (folders.py) still names the
folder only when all is written and on the disk, so it appears whole or not at all. One checkpoint is written
at a time, and what goes wrong is raised where the run waits for it: at the next checkpoint, or at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_SHARE = 4  # of the free host memory, one part in so many may be taken by copies


class Beside:
    """At most one piece of work in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start; `wait` has been called before."""
        self._work = self._thread.submit(work)

    def wait(self) -> None:
        """Until the work is done; raises what it raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()


def fits_beside(*trees: Any) -> bool:
    """Whether the host has room for copies of all tensors in nested dicts, lists and tuples."""
    nbytes = sum(tensor.numel() * tensor.element_size() for tree in trees for tensor in _tensors(tree))
    return nbytes * _SHARE <= psutil.virtual_memory().available


def host_copy(tree: Any) -> Any:
    """The same nest with every tensor copied to the host; they are read after `copies_done`."""
    if isinstance(tree, Tensor):
        return _host_tensor(tree.detach())
    if isinstance(tree, dict):
        return type(tree)((key, host_copy(value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(host_copy(value) for value in tree)
    return tree


def copies_done() -> Callable[[], None]:
    """A function that waits for the copies that were begun so far on this thread's stream."""
    if not torch.cuda.is_available():
        return lambda: None
    event = torch.cuda.Event()
    event.record()

    def wait() -> None:
        event.synchronize()

    return wait


def _host_tensor(tensor: Tensor) -> Tensor:
    if is_traceable_wrapper_subclass(tensor):  # torchao's moments of 4 bits are tensors inside one
        names, rest = tensor.__tensor_flatten__()
        inner = {name: _host_tensor(getattr(tensor, name)) for name in names}
        whole: Tensor = type(tensor).__tensor_unflatten__(inner, rest, tensor.size(), tensor.stride())
        return whole
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(value)


__all__ = ["Beside", "copies_done", "fits_beside", "host_copy"]
