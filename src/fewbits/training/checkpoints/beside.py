"""Checkpoints written beside the training: their numbers are copied to the host, a thread does the rest.

A step waits for the copies alone, some milliseconds for adapters, once there is page-locked memory for them
(`HostMemory`): to lock half a gigabyte takes a quarter of a second. `staged` (folders.py) still names the
folder only when all is written and on the disk, so it appears whole or not at all. One checkpoint is written
at a time, and what goes wrong is raised where the run waits for it: at the next checkpoint, or at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_ALIGNED = 64  # bytes at whose multiples copies begin
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


class HostMemory:
    """Page-locked memory in which one checkpoint's copies are made after the other's.

    Without a GPU, and for what has no room in it, each copy takes memory of its own.
    """

    def __init__(self) -> None:
        self._block: np.ndarray[Any, Any] | None = None
        self._taken = 0

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return 0 if self._block is None else self._block.nbytes

    def reserve(self, nbytes: int) -> None:
        """Lock so many bytes, in any thread; where the system locks no more of them, there are none."""
        try:
            block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        except RuntimeError:
            return
        self._block = block.numpy()

    def begin(self) -> None:
        """The copies that were made so far are written: their bytes may be used again."""
        self._taken = 0

    def empty(self, like: Tensor) -> Tensor:
        """A contiguous tensor on the host, alone in its storage, of the same shape and dtype."""
        nbytes = like.numel() * like.element_size()
        begin = -(-self._taken // _ALIGNED) * _ALIGNED
        if self._block is None or not nbytes or begin + nbytes > self.nbytes:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self._taken = begin + nbytes
        values = torch.frombuffer(self._block, dtype=like.dtype, count=like.numel(), offset=begin)
        return values.view(like.shape)


def nbytes_beside(*trees: Any) -> int:
    """What copies of all tensors in nested dicts, lists and tuples take in a `HostMemory`, in bytes."""
    sizes = (tensor.numel() * tensor.element_size() for tree in trees for tensor in _tensors(tree))
    return sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


def fits_beside(*trees: Any, memory: HostMemory | None = None) -> bool:
    """Whether the host has room for copies of all tensors in nested dicts, lists and tuples.

    Args:
        trees: the nests.
        memory: where the copies would be made; None: each in memory of its own.
    """
    nbytes = nbytes_beside(*trees)
    has_room = memory is not None and nbytes <= memory.nbytes
    return has_room or nbytes * _SHARE <= psutil.virtual_memory().available


def host_copy(tree: Any, memory: HostMemory | None = None) -> Any:
    """The same nest with every tensor copied to the host; they are read after `copies_done`.

    Args:
        tree: nested dicts, lists and tuples.
        memory: where the copies are made; None: each in memory of its own.
    """
    memory = memory or HostMemory()
    if isinstance(tree, Tensor):
        return _host_tensor(tree.detach(), memory)
    if isinstance(tree, dict):
        return type(tree)((key, host_copy(value, memory)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(host_copy(value, memory) for value in tree)
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


def _host_tensor(tensor: Tensor, memory: HostMemory) -> Tensor:
    if is_traceable_wrapper_subclass(tensor):  # torchao's moments of 4 bits are tensors inside one
        names, rest = tensor.__tensor_flatten__()
        inner = {name: _host_tensor(getattr(tensor, name), memory) for name in names}
        whole: Tensor = type(tensor).__tensor_unflatten__(inner, rest, tensor.size(), tensor.stride())
        return whole
    return memory.empty(tensor).copy_(tensor, non_blocking=True)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(value)


__all__ = ["Beside", "HostMemory", "copies_done", "fits_beside", "host_copy", "nbytes_beside"]
