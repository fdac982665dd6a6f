"""The Triton kernels of quantize_float8.py, which has the formulas, and their launches.

`row_largest`, `scale_of_largest`, `inverse_of` and `to_float8` are called by other kernels too, which
quantise their own output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.launch.grid import programs, split_program
from fewbits.kernels.launch.jit import (
    CompileCase,
    RowTile,
    converts_float8,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
)
from fewbits.kernels.launch.prepared import start_kernel

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ROW = 65536  # the longest row that one program holds in registers
_NO_SCALE, _LARGEST_GIVEN, _SCALE_GIVEN = 0, 1, 2  # GIVEN of the kernel


# 1. The kernels.


@jit
def magnitude_bits(x):
    """Magnitudes as int32, in their order, NaN above infinity above all; exact, with no float32 copy."""
    if x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)
    return bits


@jit
def magnitude_of_bits(bits, like):
    """The float32 that `magnitude_bits` stands for; ``like`` has the dtype that it was taken from."""
    if like.dtype.primitive_bitwidth == 32:
        magnitude = bits.to(tl.float32, bitcast=True)
    else:
        magnitude = bits.to(tl.int16).to(like.dtype, bitcast=True).to(tl.float32)
    return magnitude


@jit
def row_largest(x):
    """The largest magnitude of each row of a tile, float32."""
    return magnitude_of_bits(tl.max(magnitude_bits(x), 1), x)


@jit
def scale_of_largest(largest, LARGEST: tl.constexpr):
    """``largest / LARGEST``, at least 2**-126, and NaN where that is not finite; rounded once."""
    scale = tl.maximum(tl.div_rn(largest, LARGEST * 1.0), 1.1754943508222875e-38)
    return tl.where(largest < float("inf"), scale, float("nan"))


@jit
def inverse_of(scale):
    """``1 / scale``, rounded once."""
    return tl.div_rn(1.0, scale)


@jit
def to_float8(x, inverse, to: tl.constexpr, LARGEST: tl.constexpr, KEEP: tl.constexpr, CUT: tl.constexpr):
    """``x * inverse`` in float8, cut to LARGEST; 0 under an inverse that is NaN.

    KEEP: x may hold what its scale does not say, so what is not finite becomes NaN. CUT: the conversion to
    float8 does not cut by itself, as a GPU's does (cvt.rn.satfinite).
    """
    xf = x.to(tl.float32)
    y = xf * inverse
    if CUT:
        y = tl.clamp(y, -LARGEST * 1.0, LARGEST * 1.0, propagate_nan=tl.PropagateNan.ALL)
    if KEEP:
        y = tl.where(tl.abs(xf) < float("inf"), y, float("nan"))
    return tl.where(inverse == inverse, y, 0.0).to(to)


@jit(do_not_specialize=("M",))
def _quantize_kernel(
    x_ptr, given_ptr, q_ptr, scale_ptr, M, N, stride_xm, stride_qm,
    GIVEN: tl.constexpr, SHARED: tl.constexpr, LARGEST: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows: whole ones if GIVEN is 0, else BLOCK_N columns of them.

    given_ptr has the largest magnitude (GIVEN 1) or the scale (GIVEN 2) of each row, or with SHARED one of
    all. The scale is written by the first program of a row, or of all.
    """
    row_tile, column_tile = split_program(tl.cdiv(M, BLOCK_M))
    offs_m = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    at = offs_m[:, None] * stride_xm + offs_n[None, :]
    mask = mask_m[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + at) if EVEN else tl.load(x_ptr + at, mask=mask, other=0.0)
    if GIVEN == 0:
        scale = scale_of_largest(row_largest(x), LARGEST)
    else:
        offs_s = offs_m * 0 if SHARED else offs_m
        scale = tl.load(given_ptr + offs_s, mask=mask_m, other=1.0)
        if GIVEN == 1:
            scale = scale_of_largest(scale, LARGEST)
    inverse = inverse_of(scale)
    q = to_float8(x, inverse[:, None], q_ptr.dtype.element_ty, LARGEST, GIVEN != 0, CUT)
    q_at = q_ptr + offs_m[:, None] * stride_qm + offs_n[None, :]
    if EVEN:
        tl.store(q_at, q)
    else:
        tl.store(q_at, q, mask=mask)
    first = mask_m & (column_tile == 0)
    if SHARED:
        first = first & (offs_m == 0)
    tl.store(scale_ptr + offs_m, scale, mask=first)


@jit(do_not_specialize=("M",))
def _quantize_blocks_kernel(
    x_ptr, q_ptr, scale_ptr, M, N, stride_xm, stride_qm, stride_sm,
    TILE: tl.constexpr, LARGEST: tl.constexpr, CUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of BLOCK_M rows: each row's are one block, or with TILE all of them."""
    row_tile, column_tile = split_program(tl.cdiv(M, BLOCK_M))
    offs_m = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask=mask, other=0.0)
    bits = tl.max(magnitude_bits(x), 1)
    if TILE:
        largest = magnitude_of_bits(tl.max(bits, 0), x)
        scale = scale_of_largest(largest, LARGEST)
        tl.store(scale_ptr + row_tile.to(tl.int64) * stride_sm + column_tile, scale)
        inverse = inverse_of(scale)
    else:
        scale = scale_of_largest(magnitude_of_bits(bits, x), LARGEST)
        tl.store(scale_ptr + offs_m * stride_sm + column_tile, scale, mask=offs_m < M)
        inverse = inverse_of(scale)[:, None]
    q = to_float8(x, inverse, q_ptr.dtype.element_ty, LARGEST, False, CUT)
    tl.store(q_ptr + offs_m[:, None] * stride_qm + offs_n[None, :], q, mask=mask)


# 2. The launches.


def row_tile(N: int) -> RowTile:
    """A program holds whole rows: 32 values a thread, of long ones up to 128 rather than more than 8 warps.

    Measured on an H200 at M = 8192 from bfloat16, share of a copy's rate: N = 4096 with 4 warps 94 %, 14336
    with 8 warps 100 % (16: 90 %), 28672 with 8 warps 88 % (16: 85 %, 32: 82 %).
    """
    block_n = next_power_of_2(N)
    block_m = max(1, 4096 // block_n)
    return RowTile(block_m, block_n, 4 if block_n <= 4096 else 8 if block_n <= 32768 else 16)


def given_tile(N: int) -> RowTile:
    """With the scale known a program needs no whole row; 97 % of a copy's rate on an H200."""
    block_n = min(next_power_of_2(N), 2048)
    return RowTile(2048 // block_n, block_n, 4)


def has_kernel(x: Tensor) -> bool:
    """Whether a kernel takes x: not float64, and no GPU whose units do not convert to float8.

    x may have any shape.
    """
    return x.dtype in KERNEL_DTYPES and converts_float8(x)


def launch_rows(
    x: Tensor, q: Tensor, scale: Tensor, *, amax: Tensor | None = None, tile: RowTile | None = None
) -> None:
    """`quantize_rows_ref` of x (M, N) into q (M, N) and scale (M, 1)."""
    if amax is None and x.shape[1] > MAX_ROW:
        amax = largest_of_rows(x)
    if amax is None:
        _launch(x, x, q, scale, _NO_SCALE, False, tile or row_tile(x.shape[1]))
    else:
        _launch(x, amax, q, scale, _LARGEST_GIVEN, False, tile or given_tile(x.shape[1]))


def launch_tensor(
    x: Tensor, q: Tensor, scale: Tensor, *, factor: Tensor, is_scale: bool, tile: RowTile | None = None
) -> None:
    """x (M, N) under one scale, ``factor`` (1,) itself or as the largest magnitude; written to scale (1,)."""
    source = _SCALE_GIVEN if is_scale else _LARGEST_GIVEN
    _launch(x, factor, q, scale, source, True, tile or given_tile(x.shape[1]))


def largest_of_rows(x: Tensor) -> Tensor:
    """(M,) float32; torch reads x once and makes no copy."""
    low, high = torch.aminmax(x, dim=1)
    return torch.maximum(-low, high).float()


def _launch(
    x: Tensor, factor: Tensor, q: Tensor, scale: Tensor, source: int, shared: bool, tile: RowTile
) -> None:
    M, N = x.shape
    even = M % tile.block_m == 0 and N % tile.block_n == 0
    with on_device_of(x):
        start_kernel(
            _quantize_kernel, programs(M, N, tile.block_m, tile.block_n), (x, factor, q, scale),
            M, N, x.stride(0), q.stride(0), GIVEN=source, SHARED=shared, LARGEST=_largest(q.dtype),
            CUT=not x.is_cuda, EVEN=even, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_warps=tile.num_warps,
        )  # fmt: skip


def launch_blocks(x: Tensor, q: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    """`quantize_blocks_ref` of x (M, N) into q and scale, for blocks of (1, 128) or (128, 128)."""
    M, N = x.shape
    tile = block[0] > 1
    block_m = 128 if tile else 32
    with on_device_of(x):
        _quantize_blocks_kernel[programs(M, N, block_m, block[1])](
            x, q, scale, M, N, x.stride(0), q.stride(0), scale.stride(0),
            TILE=tile, LARGEST=_largest(q.dtype), CUT=not x.is_cuda,
            BLOCK_M=block_m, BLOCK_N=block[1], num_warps=8 if tile else 4,
        )  # fmt: skip


def _largest(dtype: torch.dtype) -> int:
    return int(torch.finfo(dtype).max)


_ROWS = {"x_ptr": "*bf16", "given_ptr": "*fp32", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
_ROWS |= dict.fromkeys(("M", "N", "stride_xm", "stride_qm"), "i32")
_ROWS_CONSTANTS: dict[str, Any] = {"GIVEN": 0, "SHARED": False, "LARGEST": 448, "CUT": False, "EVEN": True}
_ROWS_CONSTANTS |= {"BLOCK_M": 1, "BLOCK_N": 4096}
_BLOCKS = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
_BLOCKS |= dict.fromkeys(("M", "N", "stride_xm", "stride_qm", "stride_sm"), "i32")
_BLOCKS_CONSTANTS: dict[str, Any] = {"TILE": False, "LARGEST": 448, "CUT": False}
_BLOCKS_CONSTANTS |= {"BLOCK_M": 32, "BLOCK_N": 128}


def _case(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int, **changed: Any
) -> CompileCase:
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = tuple(n for n in types if n.endswith("_ptr") or n in ("N", "stride_xm", "stride_qm"))
    return CompileCase(kernel, signature, {**constants, **changed}, aligned, num_warps, 89)


COMPILE_CASES = (
    _case(_quantize_kernel, _ROWS, _ROWS_CONSTANTS, 4),
    _case(_quantize_kernel, _ROWS, _ROWS_CONSTANTS, 8, BLOCK_N=32768, EVEN=False),
    _case(_quantize_kernel, _ROWS, _ROWS_CONSTANTS, 4, GIVEN=1),
    _case(
        _quantize_kernel, _ROWS | {"x_ptr": "*fp32", "q_ptr": "*fp8e5"}, _ROWS_CONSTANTS, 4,
        GIVEN=2, SHARED=True, LARGEST=57344, BLOCK_M=4, BLOCK_N=1024, EVEN=False,
    ),
    _case(_quantize_blocks_kernel, _BLOCKS, _BLOCKS_CONSTANTS, 4),
    _case(_quantize_blocks_kernel, _BLOCKS, _BLOCKS_CONSTANTS, 8, TILE=True, BLOCK_M=128),
)  # fmt: skip
