"""What every kernel launch needs: Triton where there is one, the operand's device, tiles. No arithmetic here.

A machine without a GPU needs no Triton: `jit` then leaves the kernel a plain function that nobody calls, and
the ops run their references.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit: Callable[..., Any] = triton.jit
except ImportError:
    triton, tl = None, None

    def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Leave ``fn`` as it is: there is no Triton to compile it."""
        return (lambda later: later) if fn is None else fn


__all__ = [
    "CompileCase",
    "RowTile",
    "capability_of",
    "cdiv",
    "constant_when_compiled",
    "converts_float8",
    "jit",
    "multiprocessors",
    "next_power_of_2",
    "on_device_of",
    "tl",
    "triton",
]


@dataclass(frozen=True)
class CompileCase:
    """One way a kernel is compiled; tests/kernels/test_cubins.py builds each kernel for every architecture.

    Attributes:
        kernel: the ``@jit`` function.
        signature: Triton's type of every argument, in order; "constexpr" for those in ``constants``.
        constants: values of the ``tl.constexpr`` arguments.
        aligned: names of arguments that a launch finds divisible by 16, as most pointers are.
        num_warps: warps of a program.
        capability: the lowest compute capability, times ten, that has the kernel's types: 89 for float8.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = field(default=())
    num_warps: int = 4
    capability: int = 80


class RowTile(NamedTuple):
    """Rows and columns of one program's tile, and its warps."""

    block_m: int
    block_n: int
    num_warps: int


def constant_when_compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile calls ``fn`` and does not trace it: ``torch.compiler.assume_constant_result``.

    That one imports the whole compiler, 2 s, only to set this attribute.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def converts_float8(x: Tensor) -> bool:
    """Whether kernels on x's device may hold float8: the interpreter, and a GPU whose units convert it.

    x may have any shape.
    """
    return not x.is_cuda or capability_of(x.device) >= (8, 9)


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; one without an index is the current one.

    Torch looks its properties up anew in each call, which takes 20 us of the host.
    """
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a small stand-in for a CPU, where Triton only interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A guard under which launches go to the device (and its current stream) that holds ``x``.

    ``x`` may have any shape. Nothing is done, and no time spent, where that device is the current one.
    """
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(x.device)


_NO_GUARD = contextlib.nullcontext()
