"""The Triton kernels of float8_operands.py, which has the formulas, and their launches.

Amaxes are compared as the bits of magnitudes, whose order is that of the numbers and has NaN above all, so
that several programs can leave theirs in one place. Where codes are stored as they are and transposed, the
second conversion is kept apart from the first by a cut that changes no value: see
matmul_float8.py:_float8_weight_pair_kernel, where one conversion for both stores wrote wrong bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.launch.grid import programs, split_program
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, on_device_of, tl

_SIDE = 128  # of a program's tile, and a block's length
_RUN = 8192  # values of a program that only looks for the largest


# 1. The kernels.


@jit
def _bits(x):
    """The bits of magnitudes, as int32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _amax_kernel(x_ptr, largest_ptr, count, BLOCK: tl.constexpr):
    """The largest magnitude of BLOCK values; largest_ptr is of int32."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < count, other=0.0)
    tl.atomic_max(largest_ptr, tl.max(_bits(x), 0), sem="relaxed")


@jit
def _cut(x, LARGEST: tl.constexpr):
    """x between plus and minus LARGEST; a NaN stays one."""
    return tl.clamp(x, -LARGEST * 1.0, LARGEST * 1.0, propagate_nan=tl.PropagateNan.ALL)


@jit
def _one_multiplier_kernel(
    x_ptr, multiplier_ptr, rows_ptr, columns_ptr, largest_ptr, M, K, stride_xm,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RECORD: tl.constexpr, LARGEST: tl.constexpr,
    CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of x to codes, written as it is and transposed.

    CUT: the conversion to 8 bits does not cut by itself, as a GPU's does.
    """
    row_tile, column_tile = split_program(tl.cdiv(M, BLOCK))
    offs_m = row_tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs_k = column_tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :], mask=mask, other=0.0)
    if RECORD:
        tl.atomic_max(largest_ptr, tl.max(tl.max(_bits(x), 1), 0), sem="relaxed")
    scaled = x.to(tl.float32) * tl.load(multiplier_ptr)
    if ROWS:
        codes = _cut(scaled, LARGEST) if CUT else scaled
        tl.store(
            rows_ptr + offs_m[:, None] * K + offs_k[None, :], codes.to(rows_ptr.dtype.element_ty), mask=mask
        )
    if COLUMNS:
        codes_t = tl.trans(_cut(scaled, LARGEST).to(columns_ptr.dtype.element_ty))
        tl.store(columns_ptr + offs_k[:, None] * M + offs_m[None, :], codes_t, mask=tl.trans(mask))


@jit
def _multiplier(bits, epsilon, overflow, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`multiplier_of_amax` of the bits of amaxes."""
    amax = tl.maximum(bits.to(tl.float32, bitcast=True), epsilon, propagate_nan=tl.PropagateNan.ALL)
    multiplier = tl.div_rn(LARGEST * 1.0, amax)
    multiplier = tl.where(multiplier == float("inf"), overflow, multiplier)
    if POWER_OF_TWO:
        power = (multiplier.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        multiplier = tl.where(amax == amax, power, amax)
    return tl.where(amax == 0.0, 1.0, multiplier)


@jit
def _multiplier_kernel(
    amax_ptr, multiplier_ptr, scale_ptr, epsilon, overflow, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """One amax to its multiplier and its scale."""
    bits = tl.load(amax_ptr).to(tl.int32, bitcast=True)
    multiplier = _multiplier(bits, epsilon, overflow, LARGEST, POWER_OF_TWO)
    tl.store(multiplier_ptr, multiplier)
    tl.store(scale_ptr, tl.div_rn(1.0, multiplier))


@jit
def _block_multipliers_kernel(
    x_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, M, K, stride_xm, epsilon, overflow,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of x to codes and scales by its rows, and by its columns, which are stored transposed."""
    row_tile, column_tile = split_program(tl.cdiv(M, BLOCK))
    offs_m = row_tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs_k = column_tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask_m, mask_k = offs_m < M, offs_k < K
    mask = mask_m[:, None] & mask_k[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :], mask=mask, other=0.0)
    bits, xf = _bits(x), x.to(tl.float32)
    if TILE:
        multiplier = _multiplier(tl.max(tl.max(bits, 1), 0), epsilon, overflow, LARGEST, POWER_OF_TWO)
        by_row, by_column = xf * multiplier, xf * multiplier
        scale = tl.div_rn(1.0, multiplier)
        if ROWS:
            tl.store(row_scales_ptr + row_tile.to(tl.int64) * tl.cdiv(K, BLOCK) + column_tile, scale)
        if COLUMNS:
            tl.store(column_scales_ptr + column_tile.to(tl.int64) * tl.cdiv(M, BLOCK) + row_tile, scale)
    else:
        by_row, by_column = xf, xf
        if ROWS:
            multiplier = _multiplier(tl.max(bits, 1), epsilon, overflow, LARGEST, POWER_OF_TWO)
            by_row = xf * multiplier[:, None]
            tl.store(
                row_scales_ptr + column_tile.to(tl.int64) * M + offs_m,
                tl.div_rn(1.0, multiplier),
                mask=mask_m,
            )
        if COLUMNS:
            multiplier = _multiplier(tl.max(bits, 0), epsilon, overflow, LARGEST, POWER_OF_TWO)
            by_column = xf * multiplier[None, :]
            tl.store(
                column_scales_ptr + row_tile.to(tl.int64) * K + offs_k,
                tl.div_rn(1.0, multiplier),
                mask=mask_k,
            )
    if ROWS:
        codes = _cut(by_row, LARGEST) if CUT else by_row
        tl.store(
            rows_ptr + offs_m[:, None] * K + offs_k[None, :], codes.to(rows_ptr.dtype.element_ty), mask=mask
        )
    if COLUMNS:
        codes_t = tl.trans(_cut(by_column, LARGEST).to(columns_ptr.dtype.element_ty))
        tl.store(columns_ptr + offs_k[:, None] * M + offs_m[None, :], codes_t, mask=tl.trans(mask))


# 2. The launches. What is not wanted is a tensor of no values, and another pointer takes its place.


def launch_amax(x: Tensor, largest: Tensor) -> None:
    """Raise ``largest`` (1,) to the largest magnitude of x (contiguous, any shape)."""
    with on_device_of(x):
        _amax_kernel[(cdiv(x.numel(), _RUN),)](
            x, largest.view(torch.int32), x.numel(), BLOCK=_RUN, num_warps=8
        )


def launch_multiplier(
    amax: Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float, multiplier: Tensor, scale: Tensor
) -> None:
    """Multiplier (1,) and scale (1,) of an amax (1,), all of float32."""
    with on_device_of(amax):
        _multiplier_kernel[(1,)](
            amax, multiplier, scale, epsilon, float(torch.finfo(torch.float32).max),
            LARGEST=int(torch.finfo(dtype).max), POWER_OF_TWO=power_of_two, num_warps=1,
        )  # fmt: skip


def launch_one(x: Tensor, multiplier: Tensor, rows: Tensor, columns: Tensor, largest: Tensor) -> None:
    """Codes of x (M, K) into rows (M, K) and columns (K, M), under a multiplier (1,); amax into largest."""
    M, K = x.shape
    wants = {"ROWS": rows.numel() > 0, "COLUMNS": columns.numel() > 0, "RECORD": largest.numel() > 0}
    record = largest if largest.numel() else multiplier
    with on_device_of(x):
        _one_multiplier_kernel[programs(M, K, _SIDE, _SIDE)](
            x, multiplier, rows if rows.numel() else columns, columns if columns.numel() else rows,
            record.view(torch.int32), M, K, x.stride(0), **wants,
            LARGEST=int(torch.finfo(rows.dtype).max), CUT=not x.is_cuda, BLOCK=_SIDE, num_warps=8,
        )  # fmt: skip


def launch_blocks(
    x: Tensor,
    tile: bool,
    power_of_two: bool,
    epsilon: float,
    rows: Tensor,
    row_scales: Tensor,
    columns: Tensor,
    column_scales: Tensor,
) -> None:
    """Codes and scales of x (M, K) by blocks into rows (M, K) and columns (K, M)."""
    M, K = x.shape
    by_row, by_column = rows.numel() > 0, columns.numel() > 0
    sides = [(rows, row_scales), (columns, column_scales)]
    first, second = (sides[0] if by_row else sides[1]), (sides[1] if by_column else sides[0])
    with on_device_of(x):
        _block_multipliers_kernel[programs(M, K, _SIDE, _SIDE)](
            x, *first, *second, M, K, x.stride(0), epsilon, float(torch.finfo(x.dtype).max),
            ROWS=by_row, COLUMNS=by_column, TILE=tile, POWER_OF_TWO=power_of_two,
            LARGEST=int(torch.finfo(rows.dtype).max), CUT=not x.is_cuda, BLOCK=_SIDE, num_warps=8,
        )  # fmt: skip


# 3. The ways in which they are compiled.

_NUMBERS = dict.fromkeys(("M", "K", "stride_xm"), "i32")
_ONE = {"x_ptr": "*bf16", "multiplier_ptr": "*fp32", "rows_ptr": "*fp8e4nv", "columns_ptr": "*fp8e4nv"}
_ONE |= {"largest_ptr": "*i32", **_NUMBERS}
_ONE_CONSTANTS: dict[str, Any] = {"ROWS": True, "COLUMNS": True, "RECORD": True, "LARGEST": 448}
_ONE_CONSTANTS |= {"CUT": False, "BLOCK": _SIDE}
_BLOCKS = {"x_ptr": "*bf16", "rows_ptr": "*fp8e4nv", "row_scales_ptr": "*fp32", "columns_ptr": "*fp8e4nv"}
_BLOCKS |= {"column_scales_ptr": "*fp32", **_NUMBERS, "epsilon": "fp32", "overflow": "fp32"}
_BLOCKS_CONSTANTS: dict[str, Any] = {"ROWS": True, "COLUMNS": True, "TILE": False, "POWER_OF_TWO": True}
_BLOCKS_CONSTANTS |= {"LARGEST": 448, "CUT": False, "BLOCK": _SIDE}


def _case(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], /, e5m2: bool = False, **changed: Any
) -> CompileCase:
    types = {name: kind.replace("fp8e4nv", "fp8e5") if e5m2 else kind for name, kind in types.items()}
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = tuple(n for n in types if n in _NUMBERS or (n.endswith("_ptr") and n != "largest_ptr"))
    return CompileCase(kernel, signature, {**constants, **changed}, aligned, 8, 89)


COMPILE_CASES = (
    CompileCase(
        _amax_kernel,
        {"x_ptr": "*bf16", "largest_ptr": "*i32", "count": "i32", "BLOCK": "constexpr"},
        {"BLOCK": _RUN},
        ("x_ptr", "count"),
        8,
    ),
    CompileCase(
        _multiplier_kernel,
        {**dict.fromkeys(("amax_ptr", "multiplier_ptr", "scale_ptr"), "*fp32"), "epsilon": "fp32"}
        | {"overflow": "fp32", "LARGEST": "constexpr", "POWER_OF_TWO": "constexpr"},
        {"LARGEST": 448, "POWER_OF_TWO": True},
        (),
        1,
    ),
    _case(_one_multiplier_kernel, _ONE, _ONE_CONSTANTS),
    _case(_one_multiplier_kernel, _ONE, _ONE_CONSTANTS, e5m2=True, LARGEST=57344),
    _case(_block_multipliers_kernel, _BLOCKS, _BLOCKS_CONSTANTS),
    _case(_block_multipliers_kernel, _BLOCKS, _BLOCKS_CONSTANTS, TILE=True),
)
