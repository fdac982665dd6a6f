"""The sum of a small tensor over the GPUs of one host, one kernel on each: between products of a decode step.

    x <- x of rank 0 + x of rank 1 + ...        in this order on all ranks, which then have the same bits

Shapes: x (rows, width) float32, contiguous, an even number of values, the same on every rank. There is no
backward. Bytes: a rank sends 8 for each value to each other rank and reads as many.

A library's collectives take some 20 us for a row of 8,192 values, because ranks say first that they are
there; here what is sent says so itself (rank_sum.cu). Ranks find each other's memory through torch's
symmetric memory. Every rank has to launch as often as the others, and in the same order as other collectives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from fewbits.errors import Unsupported
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv, on_device_of

SOURCE = "generation/rank_sum.cu"
MOST_RANKS = 8
_THREADS, _MOST_BLOCKS = 256, 64
_LETTER = 16  # bytes for two values


def rank_sum_ref(xs: Sequence[Tensor]) -> Tensor:
    """The sum of x (rows, width) of all ranks, in their order."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def arguments_type(ranks: int) -> type[ctypes.Structure]:
    """What the kernel is given, field by field as in rank_sum.cu."""
    fields = [
        ("x", ctypes.c_void_p),
        ("inboxes", ctypes.c_void_p * ranks),
        ("turns", ctypes.c_void_p),
        ("pairs", ctypes.c_int64),
        ("rank", ctypes.c_int),
    ]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


def macros(ranks: int, early: bool) -> nvrtc.Defines:
    """What the kernel is compiled with."""
    return ("RANKS", ranks), ("THREADS", _THREADS), ("EARLY", int(early))


def blocks_for(pairs: int) -> int:
    """How many blocks a launch has."""
    return min(cdiv(pairs, _THREADS), _MOST_BLOCKS)


def rank_sum(x: Tensor, group: Any, rank: int, ranks: int) -> Tensor:
    """The sum of x (rows, width) over the ranks of a process group, in x's place; see `RankSum`."""
    return RankSum(x, group, rank, ranks).launch()


class RankSum:
    """The launches of one tensor's sum over the ranks of a process group; on a CPU the definition.

    Attributes:
        x: (rows, width) float32: what is summed, in its place.
    """

    def __init__(self, x: Tensor, group: Any, rank: int, ranks: int, *, early: bool = False) -> None:
        """Make the inboxes; all ranks do so at the same time.

        Args:
            x: (rows, width) float32 on this rank's device.
            group: the process group.
            rank: this process's place in it.
            ranks: how many it has.
            early: start before the kernel in front has ended, and let the next one start meanwhile (compute
                capability 9.0 and later).

        Raises:
            Unsupported: on this rank; others may have been luckier, so that all have to ask each other.
        """
        if x.dtype != torch.float32 or not x.is_contiguous() or x.numel() % 2:
            raise Unsupported(
                f"ranks sum contiguous float32 of an even number, not {x.dtype} of {tuple(x.shape)}."
            )
        self.x, self._group, self._ranks = x, group, ranks
        if not x.is_cuda:
            return
        if not 2 <= ranks <= MOST_RANKS:
            raise Unsupported(f"the kernel sums over 2 to {MOST_RANKS} ranks, not {ranks}.")
        self._early, self._macros = early, macros(ranks, early)
        pairs = x.numel() // 2
        self._blocks = blocks_for(pairs)
        self._inbox, self._handle = _inboxes(2 * ranks * pairs * _LETTER, x.device, group)
        self._turns = torch.zeros(self._blocks, dtype=torch.int32, device=x.device)
        kind = arguments_type(ranks)
        places = (ctypes.c_void_p * ranks)(*self._handle.buffer_ptrs)
        self._argument = kind(x.data_ptr(), places, self._turns.data_ptr(), pairs, rank)

    def launch(self) -> Tensor:
        """Run it on the current stream of x's device: x (rows, width)."""
        if not self.x.is_cuda:
            every = [torch.empty_like(self.x) for _ in range(self._ranks)]
            distributed.all_gather(every, self.x, group=self._group)
            return self.x.copy_(rank_sum_ref(every))
        with on_device_of(self.x):
            kernel = nvrtc.kernel(SOURCE, "rank_sum", self._macros, self.x.device.index, 0)
            nvrtc.launch(kernel, (self._blocks, 1, 1), _THREADS, 0, self._argument, early=self._early)
        return self.x


def _inboxes(nbytes: int, device: torch.device, group: Any) -> tuple[Tensor, Any]:
    """Zeros that all ranks of a group map, and what says where those of the others are."""
    try:
        from torch.distributed import _symmetric_memory as symmetric

        inbox = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        inbox.zero_()
        torch.cuda.synchronize(device)  # before the others know where it is
        return inbox, symmetric.rendezvous(inbox, group)
    except (ImportError, AttributeError, RuntimeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unsupported(f"ranks do not reach each other's memory ({said}).") from error
