"""Checkpoints of adapters from the trainer's side: what trains is copied, a thread writes the files.

What the training waits for is the walk for what trains, a copy to the host by the device's own engine, and
files of some bytes. The memory that the copies are made in is locked once, after the first step, in the same
thread. For adapters of rank 16 in a model of 8B it is half a gigabyte; locking 128 MiB took 0.059 s on the
host of an H200.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.training.checkpoints.beside import (
    Beside,
    HostMemory,
    copies_done,
    fits_beside,
    host_copy,
    nbytes_beside,
)
from fewbits.training.checkpoints.folders import only_lora, save_scales, trainable
from fewbits.training.checkpoints.model_state import write_copies

OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"  # as the host calls it


class SavingBeside:
    """The thread that writes one run's checkpoints, and the memory that they are copied to.

    Args:
        is_possible: whether nobody else has to take part in a checkpoint.
    """

    def __init__(self, *, is_possible: bool) -> None:
        self._is_possible = is_possible
        self._thread, self._memory = Beside(), HostMemory()

    def wait(self) -> None:
        """Until what was begun is done; raises what it raised."""
        self._thread.wait()

    def takes(self, model: nn.Module, trained: dict[str, Tensor], optimizer: Any) -> bool:
        """Whether copies of all that trains, of any shape, as `trainable` names it, are small."""
        if not self._is_possible or not only_lora(model, trained):
            return False
        return fits_beside(trained, optimizer.state_dict(), memory=self._memory)

    def reserve(self, model: nn.Module, optimizer: Any) -> None:
        """After a run's first step: lock memory in the thread, before a checkpoint needs it."""
        trained = trainable(model)
        if not self._memory.nbytes and self.takes(model, trained, optimizer):
            nbytes = nbytes_beside(trained, optimizer.state_dict())
            self._thread.begin(lambda: self._memory.reserve(nbytes))

    def begin(
        self,
        model: nn.Module,
        trained: dict[str, Tensor],
        optimizer: Any,
        *,
        staging: Path,
        rest: ExitStack,
    ) -> None:
        """Copy what trains to the host; the rest of the writing goes on in the thread.

        Args:
            model: whose adapters train.
            trained: as `trainable` names them, of any shape.
            optimizer: whose state is saved as well.
            staging: the folder that is written to.
            rest: what is to be done in the thread when all is written.
        """
        self._memory.begin()
        weights = host_copy(trained, self._memory)
        state = host_copy(optimizer.state_dict(), self._memory)
        copied = copies_done()
        save_scales(model, staging)

        def write() -> None:
            with rest:
                copied()
                torch.save(state, staging / OPTIMIZER_FILE)
                write_copies(model, staging, weights)

        self._thread.begin(write)


__all__ = ["OPTIMIZER_FILE", "SCHEDULER_FILE", "SavingBeside"]
