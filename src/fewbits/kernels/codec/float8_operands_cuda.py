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
        *((name, ctypes.c_void_p) for name in ("columns", "column_scales", "largest", "sums")),
        *((name, ctypes.c_int) for name in ("M", "K", "pitch")),
        *((name, ctypes.c_float) for name in ("epsilon", "overflow")),
    ]


class Results(NamedTuple):
    """Where codes go. What is not wanted is of no values."""

    rows: Tensor  # (M, K)
    row_scales: (
        Tensor | None
    )  # (M, ceil(K / 128)) with contiguous columns, or of tiles; None under one multiplier
    columns: Tensor  # (K, M)
    column_scales: Tensor | None


class Call(NamedTuple):
    """What is launched."""

    argument: Arguments
    defines: nvrtc.Defines
    grid: tuple[int, int, int]


def fits(x: Tensor, rows: Tensor, columns: Tensor) -> bool:
    """Whether the kernel reads x (M, K) and writes rows (M, K), columns (K, M): 8 and 16 bytes at a time."""
    M, K = x.shape
    return (
        x.numel() > 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and K % _ROW == x.stride(0) % _ROW == 0
        and (not columns.numel() or M % _COLUMN == 0)
        and all(part.data_ptr() % 16 == 0 for part in (x, rows, columns))
    )


def is_here(device: torch.device) -> bool:
    """Whether this GPU converts to float8 and kernels can be compiled for it."""
    return capability_of(device) >= (8, 9) and nvrtc.missing() is None


def sums_of_tiles(x: Tensor) -> Tensor:
    """Where a call leaves the sums of each tile's columns: (ceil(M / 128), K) float32 for x (M, K)."""
    return torch.empty(cdiv(x.shape[0], _SIDE), x.shape[1], dtype=torch.float32, device=x.device)


def call_of_blocks(
    x: Tensor,
    results: Results,
    *,
    tile: bool,
    power_of_two: bool,
    epsilon: float,
    sums: Tensor | None = None,
) -> Call:
    """The call of `block_multipliers` for what `fits` has passed; ``sums`` is of `sums_of_tiles`."""
    defines = {"WAY": _TILE if tile else _VALUES, "POWER_OF_TWO": power_of_two, "RECORD": False}
    return _call(x, results, defines, (None, None, sums), epsilon)


def call_of_one(
    x: Tensor, multiplier: Tensor, results: Results, largest: Tensor, sums: Tensor | None = None
) -> Call:
    """The call of `one_multiplier` for what `fits` has passed; ``largest`` of no values records nothing."""
    record = largest if largest.numel() else None
    defines = {"WAY": _ONE, "POWER_OF_TWO": False, "RECORD": record is not None}
    return _call(x, results, defines, (multiplier, record, sums), 0.0)


def _call(
    x: Tensor,
    results: Results,
    defines: dict[str, int],
    others: tuple[Tensor | None, Tensor | None, Tensor | None],
    epsilon: float,
) -> Call:
    (M, K), (multiplier, largest, sums) = x.shape, others
    defines = {**defines, "SUMS": sums is not None}
    wants = {"ROWS": results.rows.numel() > 0, "COLUMNS": results.columns.numel() > 0}
    kinds = {"E5M2": results.rows.dtype == torch.float8_e5m2, "FLOAT16": x.dtype == torch.float16}
    tensors = (x, multiplier, *results, largest, sums)
    argument = Arguments(
        *(None if t is None else t.data_ptr() for t in tensors),
        *(M, K, x.stride(0), epsilon, torch.finfo(x.dtype).max),
    )
    macros = tuple((name, int(value)) for name, value in {**defines, **wants, **kinds}.items())
    return Call(argument, macros, (*programs(M, K, _SIDE, _SIDE), 1, 1))


def launch(call: Call, x: Tensor) -> None:
    """Start a call on the device of x (M, K)."""
    with on_device_of(x):
        kernel = nvrtc.kernel(SOURCE, "float8_tile", call.defines, x.device.index, 0)
        nvrtc.launch(kernel, call.grid, THREADS, 0, call.argument)
