"""An allocation that failed, and the random numbers with which its pass began: to repeat the pass."""

from __future__ import annotations

import torch
from torch import Tensor

# What other libraries say when an allocation of theirs fails.
_ALSO_SAID = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _ALSO_SAID)


def first_sentence(error: BaseException) -> str:
    """What was asked for, without the allocator's advice."""
    return ". ".join(str(error).splitlines()[0].split(". ")[:2]).rstrip(".") if str(error) else "no message"


def random_state() -> tuple[Tensor, list[Tensor]]:
    """Of the CPU's generator and of those of all CUDA devices in use, each (bytes,) uint8; nothing waits."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), devices


def set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    """Back to what `random_state` found.

    Each state is (bytes,) uint8: the CPU's, then one for each GPU.
    """
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
