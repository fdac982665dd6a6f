"""Launches that are prepared once: what a kernel needs besides its tensors is the same in every step.

A training step starts a few thousand kernels, and the host needs longer to begin one than the GPU to run it
where the batch is small. Most of that time goes into what never changes for one layer: tiles, grids, tables,
constants, and Triton's own search for the machine code that fits the arguments (their dtypes, which numbers
are multiples of 16, which pointers are aligned). Three things here keep it:

    keep_plans      a function from an object and facts that can be hashed to a plan, found again by them
    Launch          a Triton kernel with its grid, its numbers and its constants; it is called with tensors,
                    and finds the machine code by itself from the second call on
    start_kernel    a launch in one call, for kernels that have nothing else to prepare

Triton compiles one machine code for pointers that are aligned to 16 bytes and others for those that are not.
A launch keeps the first alone: tensors of which one is not aligned take Triton's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from fewbits.formats.table_cache import may_keep
from fewbits.kernels.launch.jit import triton

T = TypeVar("T")
# Versions of Triton whose machine code is started as `Launch` does it; any other goes through `kernel[grid]`.
_KNOWN = triton is not None and str(triton.__version__).startswith(("3.6.", "3.7."))

_MOST_PLANS = 4096  # of one function; a model has a few for each shape of weight
_ALIGNMENT = 16


def keep_plans(make: Callable[..., T]) -> Callable[..., T]:
    """Keep what ``make`` returns for its arguments, which say all of it.

    The first argument is told from others by what it is and not by what it holds (a format's hash would take
    as long as the rest), and stays alive with the plan; all others are hashed. Nothing is kept while
    something is traced or a CUDA graph is captured: tables that are made then are gone afterwards. Tiles that
    `fewbits bench tune` measures are taken by the next process.
    """
    plans: dict[Any, tuple[object, T]] = {}

    @wraps(make)
    def plan(of: object, *facts: Any) -> T:
        key = (id(of), facts)
        entry = plans.get(key)
        if entry is None:
            entry = of, make(of, *facts)
            if may_keep():
                if len(plans) >= _MOST_PLANS:
                    plans.clear()
                plans[key] = entry
        return entry[1]

    plan.cache_clear = plans.clear  # type: ignore[attr-defined]
    return plan


MachineCode = dict[tuple[torch.dtype, ...], Any]


class Launch:
    """A Triton kernel on one device, with everything but its tensors.

    Args:
        kernel: the ``@jit`` function, whose arguments are tensors, then numbers, then constants.
        grid: how many programs it has along each axis.
        numbers: its arguments after the tensors, in order.
        constants: its ``tl.constexpr`` arguments by name.
        machine_code: what Triton made for tensors of some dtypes; launches whose numbers Triton does not tell
            apart, on one device, may share it. None: its own.
        options: Triton's own, such as ``num_warps``.
    """

    __slots__ = ("_compiled", "_constants", "_grid", "_kernel", "_numbers", "_options", "_rest")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        machine_code: MachineCode | None = None,
        **options: Any,
    ) -> None:
        self._kernel, self._grid, self._numbers = kernel, (*grid, 1, 1)[:3], numbers
        self._constants, self._options = constants, options
        self._compiled: MachineCode = {} if machine_code is None else machine_code
        self._rest = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))

    def __call__(self, *tensors: Tensor) -> None:
        """Start it on the current stream of the device that holds all ``tensors`` (of any shape)."""
        unaligned = 0
        for tensor in tensors:
            unaligned |= tensor.data_ptr()
        dtypes = tuple([tensor.dtype for tensor in tensors])
        aligned = not unaligned % _ALIGNMENT
        compiled = self._compiled.get(dtypes) if aligned else None
        if compiled is not None:
            _run(compiled, self._grid, tensors, self._rest)
            return
        machine_code = self._kernel[self._grid](*tensors, *self._numbers, **self._constants, **self._options)
        if aligned and hasattr(machine_code, "packed_metadata"):  # the interpreter has none
            self._compiled[dtypes] = machine_code


def _run(compiled: Any, grid: tuple[int, ...], tensors: tuple[Tensor, ...], rest: tuple[Any, ...]) -> None:
    """Start machine code directly; by Triton's own call where a profiler listens to its launches."""
    first = tensors[0]
    if _KNOWN and first.is_cuda:
        runtime = triton.knobs.runtime
        if not runtime.launch_enter_hook.calls and not runtime.launch_exit_hook.calls:
            stream = torch._C._cuda_getCurrentRawStream(first.get_device())
            code = compiled.function, compiled.packed_metadata
            compiled.run(*grid, stream, *code, None, None, None, *tensors, *rest)
            return
    compiled[grid](*tensors, *rest)


def start_kernel(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor, ...], *numbers: float, **named: Any
) -> None:
    """``kernel[grid](*tensors, *numbers, **named)`` on the current stream of the tensors' device.

    Args:
        kernel: the ``@jit`` function, whose arguments are tensors, then numbers, then constants.
        grid: how many programs it has along each axis.
        tensors: of any shape, on one device, which is the current one.
        *numbers: whole and others.
        **named: its ``tl.constexpr`` arguments, and Triton's options such as ``num_warps``.
    """
    _launch_of(kernel, grid, numbers, tuple(named.items()), tensors[0].device)(*tensors)


@keep_plans
def _launch_of(
    kernel: Any,
    grid: tuple[int, ...],
    numbers: tuple[int | float, ...],
    named: tuple[tuple[str, Any], ...],
    device: torch.device,
) -> Launch:
    constants = dict(named)
    options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
    # Batches of ever other lengths have ever other numbers, and few kinds of them.
    machine_code = _machine_code_of(kernel, tuple(map(_kind, numbers)), named, device)
    return Launch(kernel, grid, numbers, constants, machine_code, **options)


@keep_plans
def _machine_code_of(
    _kernel: Any, _kinds: tuple[Any, ...], _named: tuple[tuple[str, Any], ...], _device: torch.device
) -> MachineCode:
    """One for each kernel that Triton compiles; the launches fill it."""
    return {}


def _kind(number: float) -> tuple[Any, ...]:
    """All that Triton compiles a number by: its type and width, whether it is 1, whether 16 divides it."""
    if isinstance(number, float):
        return (float,)
    bits = (number if number >= 0 else ~number).bit_length()
    return type(number), number == 1, number % 16 == 0, bits > 31, bits > 63


_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
