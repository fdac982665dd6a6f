"""The arguments and the launch of float8_operands.cu: 16 bits to float8, by rows and by columns.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same arguments.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.grid import programs
from fewbits.kernels.launch.jit import capability_of, cdiv, on_device_of

SOURCE = "codec/float8_operands.cu"
THREADS = 256
_SIDE = 128  # of a program's tile
_VALUES, _TILE, _ONE = range(3)
_COLUMN = 16  # codes of a column that are stored at once
_ROW = 8  # values of a row that are loaded at once


class Arguments(ctypes.Structure):
    """The kernel's argument, field by field as in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "multiplier", "rows", "row_scales")),
        *((name, ctypes.c_void_p) for name in ("columns", "column_scales", "largest", "sums", "dy")),
        *((name, ctypes.c_int) for name in ("M", "K", "pitch")),
        *((name, ctypes.c_float) for name in ("epsilon", "overflow", "linear", "cubic")),
    ]


class Results(NamedTuple):
    """Where codes go. What is not wanted is of no values."""

    rows: Tensor  # (M, K)
    row_scales: (
        Tensor | None
    )  # (M, ceil(K / 128)) with contiguous columns, or of tiles; None under one multiplier
    columns: Tensor  # (K, M)
    column_scales: Tensor | None


class SmoothActivation(NamedTuple):
    """What is rounded in place of x: ``x * sigmoid(linear * x + cubic * x**3)``, or its gradient.

    Attributes:
        linear: 0, with ``cubic`` 0, rounds x itself.
        cubic: see above.
        dy: (M, K) of x's type, contiguous, for the gradient; of no values for the activation.
    """

    linear: float
    cubic: float
    dy: Tensor

    @property
    def is_on(self) -> bool:
        """Whether x goes through anything."""
        return self.linear != 0.0 or self.cubic != 0.0


class Others(NamedTuple):
    """What a call takes beside x and its results. What is not wanted is of no values."""

    multiplier: Tensor | None  # (1,), for one multiplier
    largest: Tensor  # (1,)
    sums: Tensor | None  # `sums_of_tiles`
    through: SmoothActivation


class Call(NamedTuple):
    """What is launched."""

    argument: Arguments
    defines: nvrtc.Defines
    grid: tuple[int, int, int]


def fits(x: Tensor, rows: Tensor, columns: Tensor, dy: Tensor | None = None) -> bool:
    """Whether the kernel reads x (M, K) and writes rows (M, K), columns (K, M): 8 and 16 bytes at a time.

    ``dy`` (M, K) or of no values is that of `SmoothActivation`.
    """
    M, K = x.shape
    if dy is not None and dy.numel() and (dy.dtype != x.dtype or not dy.is_contiguous()):
        return False
    return (
        x.numel() > 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and K % _ROW == x.stride(0) % _ROW == 0
        and (not columns.numel() or M % _COLUMN == 0)
        and all(part.data_ptr() % 16 == 0 for part in (x, rows, columns, *(() if dy is None else (dy,))))
    )


def is_here(device: torch.device) -> bool:
    """Whether this GPU converts to float8 and kernels can be compiled for it."""
    return capability_of(device) >= (8, 9) and nvrtc.missing() is None


def sums_of_tiles(x: Tensor) -> Tensor:
    """Where a call leaves the sums of each tile's columns: (ceil(M / 128), K) float32 for x (M, K)."""
    return torch.empty(cdiv(x.shape[0], _SIDE), x.shape[1], dtype=torch.float32, device=x.device)


def call_of_blocks(
    x: Tensor, results: Results, others: Others, *, tile: bool, power_of_two: bool, epsilon: float
) -> Call:
    """The call of `block_multipliers` for what `fits` has passed."""
    defines = {"WAY": _TILE if tile else _VALUES, "POWER_OF_TWO": power_of_two, "RECORD": False}
    return _call(x, results, defines, others, epsilon)


def call_of_one(x: Tensor, results: Results, others: Others) -> Call:
    """The call of `one_multiplier` for what `fits` has passed; without results it only looks for the amax."""
    defines = {"WAY": _ONE, "POWER_OF_TWO": False, "RECORD": others.largest.numel() > 0}
    return _call(x, results, defines, others, 0.0)


def _call(x: Tensor, results: Results, defines: dict[str, int], others: Others, epsilon: float) -> Call:
    M, K = x.shape
    through = others.through
    wants: dict[str, int] = {"ROWS": results.rows.numel() > 0, "COLUMNS": results.columns.numel() > 0}
    wants |= {"SUMS": others.sums is not None, "THROUGH": _way(through)}
    kinds = {"E5M2": results.rows.dtype == torch.float8_e5m2, "FLOAT16": x.dtype == torch.float16}
    tensors = (x, others.multiplier, *results, others.largest, others.sums, through.dy)
    argument = Arguments(
        *(None if t is None else t.data_ptr() for t in tensors),
        *(M, K, x.stride(0), epsilon, torch.finfo(x.dtype).max, through.linear, through.cubic),
    )
    macros = tuple((name, int(value)) for name, value in {**defines, **wants, **kinds}.items())
    return Call(argument, macros, (*programs(M, K, _SIDE, _SIDE), 1, 1))


def _way(through: SmoothActivation) -> int:
    return 0 if not through.is_on else 2 if through.dy.numel() else 1


def launch(call: Call, x: Tensor) -> None:
    """Start a call on the device of x (M, K)."""
    with on_device_of(x):
        kernel = nvrtc.kernel(SOURCE, "float8_tile", call.defines, x.device.index, 0)
        nvrtc.launch(kernel, call.grid, THREADS, 0, call.argument)
