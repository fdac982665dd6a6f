"""The Triton kernels of small_blocks.py, which has the formulas, and their launches.

A program takes a tile of whole blocks. Divisions are IEEE's and no multiply-add is fused; amaxes are compared
as the bits of magnitudes, whose order is that of the numbers and has NaN above all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.launch.grid import programs, split_program
from fewbits.kernels.launch.jit import CompileCase, jit, on_device_of, tl

_ROWS, _COLUMNS = 32, 128  # of a program's tile


# 1. The kernels.


@jit
def _of_blocks(x, TALL: tl.constexpr, WIDE: tl.constexpr):
    """x (rows, columns) as (rows / TALL, TALL, columns / WIDE, WIDE)."""
    return tl.reshape(x, (x.shape[0] // TALL, TALL, x.shape[1] // WIDE, WIDE))


@jit
def _spread(scale, like, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Numbers of blocks (rows / TALL, columns / WIDE) at each value of ``like`` (rows, columns)."""
    grown = tl.expand_dims(tl.expand_dims(scale, 2), 1)
    shape: tl.constexpr = (like.shape[0] // TALL, TALL, like.shape[1] // WIDE, WIDE)
    return tl.reshape(tl.broadcast_to(grown, shape), like.shape)


@jit
def _amax(x, TALL: tl.constexpr, WIDE: tl.constexpr):
    """The largest magnitudes of blocks, as float32."""
    bits = _of_blocks(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, TALL, WIDE)
    return tl.max(tl.max(bits, 3), 1).to(tl.float32, bitcast=True)


@jit
def _power(exponent):
    """2**(e - 127) of exponents 0 to 254 (int32)."""
    bits = tl.where(exponent > 0, exponent << 23, 0x400000)
    return bits.to(tl.float32, bitcast=True)


@jit
def _exponent(amax, LARGEST: tl.constexpr):
    """`exponents_of_amax`, as int32."""
    inverse: tl.constexpr = 1.0 / LARGEST
    quotient = amax * inverse
    bits = quotient.to(tl.int32, bitcast=True)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    small = (exponent == 0) & (mantissa <= 0x400000)
    raised = exponent + tl.where((mantissa > 0) & (exponent < 254) & (small == 0), 1, 0)
    return tl.where(exponent == 255, tl.where(mantissa > 0, 255, 254), raised)


@jit
def _e4m3(x):
    """x (not negative, at most 448) to the nearest number of E4M3, and its code (int32); a NaN stays one."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)  # a power of two: only the sum rounds
    steps = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    value = ((x * steps + 12582912.0) - 12582912.0) * step
    normal = (value.to(tl.int32, bitcast=True) >> 20) - 960
    code = tl.where(value < 0.015625, (value * 512.0).to(tl.int32), normal)
    return tl.where(x == x, value, x), tl.where(x == x, code, 127)


@jit
def _e2m1(scaled, uniform, STOCHASTIC: tl.constexpr):
    """Codes (int32) of float32 values."""
    bits = scaled.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(size <= 6.0, size, 6.0)  # a NaN too
    high, higher = size >= 2.0, size >= 4.0
    steps = size * tl.where(higher, 0.5, tl.where(high, 1.0, 2.0))
    if STOCHASTIC:
        low = tl.floor(steps)
        whole = low + tl.where(uniform < steps - low, 1.0, 0.0)
    else:
        whole = (steps + 12582912.0) - 12582912.0
    code = whole.to(tl.int32) + tl.where(higher, 4, tl.where(high, 2, 0))
    return code | ((bits >> 28) & 8)


@jit
def _uniform(seed, row, column, K, QUARTER: tl.constexpr, SHAPE: tl.constexpr):
    """Random numbers in [0, 1) of the positions of a tile's rows, from ``column`` (a multiple of 4) on."""
    counter = row[:, None] * (K // 4) + (column // 4 + tl.arange(0, QUARTER))[None, :]
    r0, r1, r2, r3 = tl.randint4x(seed, counter)
    words = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), SHAPE)
    return (words.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-08


@jit
def _small_blocks_kernel(
    x_ptr, codes_ptr, scales_ptr, amax_ptr, M, K, bound, seed,
    TALL: tl.constexpr, WIDE: tl.constexpr, E2M1: tl.constexpr, LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of x to codes and scales."""
    row_tile, column_tile = split_program(tl.cdiv(M, ROWS))
    offs_m, first = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS
    offs_k = first + tl.arange(0, COLUMNS)
    at = offs_m.to(tl.int64)[:, None]
    mask_m = (offs_m < M)[:, None]
    x = tl.load(x_ptr + at * K + offs_k[None, :], mask=mask_m & (offs_k < K)[None, :], other=0.0)
    x = x.to(tl.float32)
    amax = _amax(x, TALL, WIDE)
    block_m = row_tile * (ROWS // TALL) + tl.arange(0, ROWS // TALL)
    block_k = column_tile * (COLUMNS // WIDE) + tl.arange(0, COLUMNS // WIDE)
    scale_at = scales_ptr + block_m.to(tl.int64)[:, None] * tl.cdiv(K, WIDE) + block_k[None, :]
    scale_mask = (block_m < tl.cdiv(M, TALL))[:, None] & (block_k < tl.cdiv(K, WIDE))[None, :]
    if E2M1:
        largest = tl.full((), 3.4028234663852886e38, tl.float32)
        encode = tl.div_rn(bound * 6.0, tl.load(amax_ptr))
        encode = tl.where(encode > largest, largest, encode)
        encode = tl.where(encode == 0.0, 1.0, encode)
        scale = amax * (encode * tl.div_rn(1.0, 6.0))
        scale, narrow = _e4m3(tl.where(scale > 448.0, 448.0, scale))
        tl.store(scale_at, narrow.to(tl.uint8), mask=scale_mask)
        inverse = tl.div_rn(1.0, scale * tl.div_rn(1.0, encode))
        inverse = tl.where(inverse > largest, largest, inverse)
        uniform = x
        if STOCHASTIC:
            uniform = _uniform(seed, offs_m, first, K, COLUMNS // 4, (ROWS, COLUMNS))
        code = _e2m1(x * _spread(inverse, x, TALL, WIDE), uniform, STOCHASTIC)
        low, high = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
        half = first // 2 + tl.arange(0, COLUMNS // 2)
        tl.store(
            codes_ptr + at * (K // 2) + half[None, :],
            (low | (high << 4)).to(tl.uint8),
            mask=mask_m & (half < K // 2)[None, :],
        )
    else:
        exponent = _exponent(amax, LARGEST)
        tl.store(scale_at, exponent.to(tl.uint8), mask=scale_mask)
        inverse = tl.where(exponent == 255, float("nan"), _power(254 - exponent))
        scaled = x * _spread(inverse, x, TALL, WIDE)
        scaled = tl.clamp(scaled, -LARGEST * 1.0, LARGEST * 1.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(
            codes_ptr + at * K + offs_k[None, :],
            scaled.to(codes_ptr.dtype.element_ty),
            mask=mask_m & (offs_k < K)[None, :],
        )


@jit
def _small_values_kernel(
    codes_ptr, scales_ptr, values_ptr, M, K,
    TALL: tl.constexpr, WIDE: tl.constexpr, E2M1: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of codes and scales to bfloat16."""
    row_tile, column_tile = split_program(tl.cdiv(M, ROWS))
    offs_m, first = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS
    offs_k = first + tl.arange(0, COLUMNS)
    at = offs_m.to(tl.int64)[:, None]
    mask_m, mask_k = (offs_m < M)[:, None], (offs_k < K)[None, :]
    block_m = row_tile * (ROWS // TALL) + tl.arange(0, ROWS // TALL)
    block_k = column_tile * (COLUMNS // WIDE) + tl.arange(0, COLUMNS // WIDE)
    scale_at = scales_ptr + block_m.to(tl.int64)[:, None] * tl.cdiv(K, WIDE) + block_k[None, :]
    scale_mask = (block_m < tl.cdiv(M, TALL))[:, None] & (block_k < tl.cdiv(K, WIDE))[None, :]
    scale = tl.load(scale_at, mask=scale_mask, other=0.0)
    if E2M1:
        half = first // 2 + tl.arange(0, COLUMNS // 2)
        byte = tl.load(
            codes_ptr + at * (K // 2) + half[None, :], mask=mask_m & (half < K // 2)[None, :], other=0
        ).to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (ROWS, COLUMNS))
        size = code & 7
        large = tl.where(size == 7, 6.0, tl.where(size == 6, 4.0, 3.0))
        value = tl.where(size > 4, large, size.to(tl.float32) * 0.5)
        value = tl.where(code > 7, -value, value)
        grown = scale.to(tl.float32)
    else:
        value = tl.load(codes_ptr + at * K + offs_k[None, :], mask=mask_m & mask_k, other=0.0).to(tl.float32)
        exponent = scale.to(tl.int32)
        grown = tl.where(exponent == 255, float("nan"), _power(exponent))
    value = value * _spread(grown, value, TALL, WIDE)
    tl.store(values_ptr + at * K + offs_k[None, :], value.to(tl.bfloat16), mask=mask_m & mask_k)


# 2. The launches.


def launch_blocks(
    x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor, block: Sequence[int], bound: float, seed: int
) -> None:
    """`small_blocks_ref` of x (M, K), contiguous, K a multiple of 16."""
    M, K = x.shape
    is_e2m1 = codes.dtype == torch.uint8
    with on_device_of(x):
        _small_blocks_kernel[programs(M, K, _ROWS, _COLUMNS)](
            x, codes, scales.view(torch.uint8), amax if amax.numel() else x, M, K, bound, max(seed, 0),
            TALL=block[0], WIDE=block[1], E2M1=is_e2m1,
            LARGEST=6 if is_e2m1 else int(torch.finfo(codes.dtype).max),
            STOCHASTIC=is_e2m1 and seed >= 0, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip


def launch_values(codes: Tensor, scales: Tensor, block: Sequence[int], values: Tensor) -> None:
    """`small_values_ref` into values (M, K), K a multiple of 16."""
    M, K = values.shape
    with on_device_of(values):
        _small_values_kernel[programs(M, K, _ROWS, _COLUMNS)](
            codes, scales, values, M, K, TALL=block[0], WIDE=block[1], E2M1=codes.dtype == torch.uint8,
            ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip


# 3. The ways in which they are compiled.

_TYPES = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scales_ptr": "*u8", "amax_ptr": "*fp32"}
_TYPES |= {"M": "i32", "K": "i32", "bound": "fp32", "seed": "i64"}
_VALUE_TYPES = {"codes_ptr": "*fp8e4nv", "scales_ptr": "*u8", "values_ptr": "*bf16", "M": "i32", "K": "i32"}
_TILE = {"ROWS": _ROWS, "COLUMNS": _COLUMNS}
_MX: dict[str, Any] = {"TALL": 1, "WIDE": 32, "E2M1": False}
_FOUR: dict[str, Any] = {"TALL": 16, "WIDE": 16, "E2M1": True}
_FOUR_TYPES = {"codes_ptr": "*u8"}
_FOUR_VALUE_TYPES = {**_FOUR_TYPES, "scales_ptr": "*fp8e4nv"}


def _case(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> CompileCase:
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = tuple(n for n in types if n.endswith("_ptr") or n == "K")
    return CompileCase(kernel, signature, constants, aligned, 4, 89)


COMPILE_CASES = (
    _case(_small_blocks_kernel, _TYPES, {**_MX, "LARGEST": 448, "STOCHASTIC": False, **_TILE}),
    _case(_small_blocks_kernel, _TYPES | _FOUR_TYPES, {**_FOUR, "LARGEST": 6, "STOCHASTIC": True, **_TILE}),
    _case(_small_values_kernel, _VALUE_TYPES, {**_MX, **_TILE}),
    _case(_small_values_kernel, _VALUE_TYPES | _FOUR_VALUE_TYPES, {**_FOUR, **_TILE}),
)
