"""The Triton kernels of quantize.py and fake_quantize.py, which have the formulas, and their launches.

How a value becomes a code is in rounding_triton.py; here is which program rounds which values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.base import Format
from fewbits.formats.contract import Coding
from fewbits.kernels.codec.codebook_tables import code_of_zero, codebook_tables
from fewbits.kernels.codec.codings import is_known
from fewbits.kernels.codec.rounding_triton import (
    codebook_codes,
    codebook_values,
    high_bits,
    integer_block_codes,
    integer_codes,
    integer_scale,
    low_bits,
    nibbles_to_bytes,
)
from fewbits.kernels.launch.grid import programs, split_program
from fewbits.kernels.launch.jit import (
    CompileCase,
    cdiv,
    jit,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    tl,
)

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_BLOCK = 1024  # values of a block that one program holds


# 1. The kernels.


@jit
def _store_codes(
    out_ptr, code, block, at, mask, blocks_per_row, K, code_pitch, num_blocks,
    BITS: tl.constexpr, SHORT: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of whole blocks, or with SHORT of blocks that end with their row; PAD fills up the last byte."""
    if BITS == 8:
        tl.store(out_ptr + at, code.to(tl.int8), mask=mask)
    else:
        byte = tl.arange(0, BLOCK // 2)[None, :]
        byte_at = block[:, None] * (BLOCK // 2) + byte
        byte_mask = tl.broadcast_to((block < num_blocks)[:, None], byte_at.shape)
        if SHORT:
            code = tl.where(mask, code, PAD)
            first = (block % blocks_per_row * BLOCK)[:, None]
            byte_at = (block // blocks_per_row)[:, None] * code_pitch + first // 2 + byte
            byte_mask = byte_mask & (first + 2 * byte < K)
        tl.store(out_ptr + byte_at, nibbles_to_bytes(code).to(tl.uint8), mask=byte_mask)


@jit
def _round_blocks_kernel(
    x_ptr, out_ptr, scales_ptr, zero_points_ptr, midpoints_ptr, values_ptr,
    num_blocks, blocks_per_row, K, code_pitch,
    CODEBOOK: tl.constexpr, ORDER: tl.constexpr, BITS: tl.constexpr, ZERO_POINT: tl.constexpr,
    PACKED: tl.constexpr, SHORT: tl.constexpr, PAD: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program takes ROWS blocks of BLOCK values each: their codes and scales, or their rounded values.

    Without SHORT all blocks are whole and lie one after the other. With it, a row of K values has
    blocks_per_row blocks, the last of which may be short; code_pitch is a row's bytes of codes. DIVIDE is
    for a codebook's short last block, whose tensor counts as one row.
    """
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (block < num_blocks)[:, None]
    inner = tl.arange(0, BLOCK)[None, :]
    at = block[:, None] * BLOCK + inner
    mask = tl.broadcast_to(inside, (ROWS, BLOCK))
    if SHORT:
        row, first = block // blocks_per_row, block % blocks_per_row * BLOCK
        at = row[:, None] * K + first[:, None] + inner
        mask = inside & (first[:, None] + inner < K)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if CODEBOOK:
        code, scale = codebook_codes(x, midpoints_ptr, ORDER, False)
        if DIVIDE:
            divided, guarded = codebook_codes(x, midpoints_ptr, ORDER, True)
            last = (block + 1) * BLOCK > K
            code = tl.where(last[:, None], divided, code)
            scale = tl.where(last, guarded, scale)
        zero_point = scale
    else:
        whole, scale, zero_point = integer_block_codes(x, BITS, ZERO_POINT)
        code = whole.to(tl.int32)
    if PACKED:
        tl.store(scales_ptr + block, scale, mask=block < num_blocks)
        if ZERO_POINT:
            tl.store(zero_points_ptr + block, zero_point.to(tl.int8), mask=block < num_blocks)
        _store_codes(
            out_ptr, code, block, at, mask, blocks_per_row, K, code_pitch, num_blocks, BITS, SHORT, PAD, BLOCK
        )
    else:
        if CODEBOOK:
            value = codebook_values(code, values_ptr)
        else:
            value = code.to(tl.float32)
            if ZERO_POINT:
                value -= zero_point[:, None]
        tl.store(out_ptr + at, (value * scale[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _store_integers(
    x, out_ptr, row, column, K, code_pitch, scale, zero_point, inverse,
    BITS: tl.constexpr, ZERO_POINT: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes or rounded values of x, (BLOCK,) of a row from ``column`` on."""
    offs = column + tl.arange(0, BLOCK)
    mask = offs < K
    code = integer_codes(x, inverse, zero_point, BITS, ZERO_POINT)
    if not PACKED:
        value = code
        if ZERO_POINT:
            value = code - zero_point
        tl.store(out_ptr + row * K + offs, (value * scale).to(out_ptr.dtype.element_ty), mask=mask)
    elif BITS == 8:
        tl.store(out_ptr + row * code_pitch + offs, code.to(tl.int8), mask=mask)
    else:
        nibble = tl.where(mask, code.to(tl.int32), 0)
        byte = tl.arange(0, BLOCK // 2)
        packed = tl.reshape(nibbles_to_bytes(tl.reshape(nibble, (1, BLOCK))), (BLOCK // 2,))
        at = row * code_pitch + column // 2 + byte
        tl.store(out_ptr + at, packed.to(tl.uint8), mask=column + 2 * byte < K)


@jit
def _round_rows_kernel(
    x_ptr, out_ptr, scales_ptr, zero_points_ptr, K, code_pitch,
    BITS: tl.constexpr, ZERO_POINT: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program takes a row of K values under one scale; the second reading finds it in a cache."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.zeros((BLOCK,), tl.int32)
    lowest = tl.zeros((BLOCK,), tl.int32)
    for column in range(0, K, BLOCK):
        offs = column + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + offs, mask=offs < K, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, high_bits(x, ZERO_POINT))
        if ZERO_POINT:
            lowest = tl.maximum(lowest, low_bits(x))
    scale, zero_point = integer_scale(tl.max(highest, 0), tl.max(lowest, 0), BITS, ZERO_POINT)
    inverse = tl.div_rn(1.0, scale)
    for column in range(0, K, BLOCK):
        offs = column + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + offs, mask=offs < K, other=0.0).to(tl.float32)
        _store_integers(
            x, out_ptr, row, column, K, code_pitch, scale, zero_point, inverse, BITS, ZERO_POINT, PACKED,
            BLOCK,
        )  # fmt: skip
    if PACKED:
        tl.store(scales_ptr + row, scale)
        if ZERO_POINT:
            tl.store(zero_points_ptr + row, zero_point.to(tl.int8))


@jit
def _range_kernel(x_ptr, range_ptr, n, ZERO_POINT: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest magnitudes above (all without ZERO_POINT) and below zero, by integer maxima."""
    highest = tl.zeros((BLOCK,), tl.int32)
    lowest = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, high_bits(x, ZERO_POINT))
        if ZERO_POINT:
            lowest = tl.maximum(lowest, low_bits(x))
    tl.atomic_max(range_ptr, tl.max(highest, 0))
    if ZERO_POINT:
        tl.atomic_max(range_ptr + 1, tl.max(lowest, 0))


@jit
def _round_tensor_kernel(
    x_ptr, out_ptr, scales_ptr, zero_points_ptr, range_ptr, rows, K, code_pitch,
    BITS: tl.constexpr, ZERO_POINT: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK values of a row of K, under the scale of the whole tensor that `_range_kernel` found."""
    row, part = split_program(rows)
    row = row.to(tl.int64)
    scale, zero_point = integer_scale(tl.load(range_ptr), tl.load(range_ptr + 1), BITS, ZERO_POINT)
    column = part * BLOCK
    offs = column + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + offs, mask=offs < K, other=0.0).to(tl.float32)
    _store_integers(
        x, out_ptr, row, column, K, code_pitch, scale, zero_point, tl.div_rn(1.0, scale), BITS, ZERO_POINT,
        PACKED, BLOCK,
    )  # fmt: skip
    if PACKED and (row == 0) & (part == 0):
        tl.store(scales_ptr, scale)
        if ZERO_POINT:
            tl.store(zero_points_ptr, zero_point.to(tl.int8))


@jit
def _round_scales_kernel(
    absmax_ptr, offset_ptr, grid_ptr, codes_ptr, scales_ptr, n,
    SCALE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Second-level scales: SCALE_BLOCK (at most BLOCK) first-level ones, less their mean, in 8 bits."""
    program = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    offs = program * SCALE_BLOCK + inner
    mask = (inner < SCALE_BLOCK) & (offs < n)
    x = tl.load(absmax_ptr + offs, mask=mask, other=0.0) - tl.load(offset_ptr)
    x = tl.where(mask, x, 0.0)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    absmax = bits.to(tl.float32, bitcast=True)
    scaled = x * tl.div_rn(1.0, absmax)
    scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -1.0), 1.0), scaled)
    point = (scaled + 1.0) * (0.5 * GRID) + 0.5
    point = tl.where(point == point, point, 0.0).to(tl.int32)
    code = tl.load(grid_ptr + point, mask=mask, other=0)
    tl.store(codes_ptr + offs, code, mask=mask)
    tl.store(scales_ptr + program, absmax)


# 2. The launches.


class RoundTile(NamedTuple):
    """Values that one program takes, and its warps."""

    values: int
    num_warps: int


DEFAULT_TILE = RoundTile(4096, 4)


def takes(format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the kernels know ``format`` for a tensor of this shape; else its definition computes."""
    if dtype not in KERNEL_DTYPES or not shape or shape[-1] >= 2**31:
        return False
    coding = format.contract.coding
    if not is_known(coding) or not format.contract.rounds_plainly or coding.is_float8:
        return False
    r, c = coding.block
    if coding.kind == "table":
        return coding.scale_block <= MAX_BLOCK and _is_block(c) and len(coding.values) == 16
    return (r, c) in ((0, 0), (1, 0)) or (r == 1 and _is_block(c))


def _is_block(size: int) -> bool:
    return 2 <= size <= MAX_BLOCK and size & (size - 1) == 0


def launch_round(
    x: Tensor,
    format: Format,
    out: Tensor,
    scales: Tensor | None = None,
    zero_points: Tensor | None = None,
    tile: RoundTile = DEFAULT_TILE,
) -> None:
    """Round contiguous x (..., K), which `takes` allows, in one reading (a scale per tensor: in two).

    Args:
        x: the tensor, with at least one value.
        format: with two levels of scales, only the first is written.
        out: contiguous; codes as the format packs them if there are scales, else x's rounded values.
        scales: float32, one a block; None asks for values.
        zero_points: int8 of the scales' shape, for codes of a format that has them.
        tile: values a program.
    """
    coding, packed = format.contract.coding, scales is not None
    assert coding is not None
    scales = x if scales is None else scales
    zero_points = scales if zero_points is None else zero_points
    K = x.shape[-1]
    rows = x.numel() // K
    with on_device_of(x):
        if coding.through or coding.block[1]:
            _launch_blocks(x, coding, out, scales, zero_points, packed, tile)
            return
        pitch = out.shape[-1] if packed else K
        constants = {"BITS": coding.bits, "ZERO_POINT": coding.zero_point, "PACKED": packed}
        block = min(next_power_of_2(max(K, 32)), tile.values)
        if coding.block == (1, 0):
            _round_rows_kernel[(rows,)](
                x, out, scales, zero_points, K, pitch, **constants, BLOCK=block, num_warps=tile.num_warps,
                enable_fp_fusion=False,
            )  # fmt: skip
            return
        extremes = torch.zeros(2, dtype=torch.int32, device=x.device)
        readers = min(cdiv(x.numel(), 8192), 8 * multiprocessors(x.device))
        _range_kernel[(readers,)](
            x, extremes, x.numel(), ZERO_POINT=coding.zero_point, BLOCK=8192, num_warps=8
        )
        _round_tensor_kernel[programs(rows, K, 1, block)](
            x, out, scales, zero_points, extremes, rows, K, pitch, **constants, BLOCK=block,
            num_warps=tile.num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def _launch_blocks(
    x: Tensor, coding: Coding, out: Tensor, scales: Tensor, zero_points: Tensor, packed: bool, tile: RoundTile
) -> None:
    n, K = x.numel(), x.shape[-1]
    order, pad, thresholds, values = 0, 0, x, x
    is_table, block, bits = coding.kind == "table", coding.block[1], coding.bits
    if is_table:
        order, thresholds, values = codebook_tables(coding.values, x.device)
        pad, K = code_of_zero(coding.values), n
    blocks_per_row = cdiv(K, block)
    num_blocks = n // K * blocks_per_row
    rows = max(tile.values // block, 1)
    _round_blocks_kernel[(cdiv(num_blocks, rows),)](
        x, out, scales, zero_points, thresholds, values, num_blocks, blocks_per_row, K, cdiv(K * bits, 8),
        CODEBOOK=is_table, ORDER=order, BITS=bits, ZERO_POINT=coding.zero_point, PACKED=packed,
        SHORT=K % block != 0, PAD=pad, DIVIDE=is_table and K % block != 0, BLOCK=block,
        ROWS=rows, num_warps=tile.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def launch_scales(
    absmax: Tensor, offset: Tensor, grid: Tensor, block: int, codes: Tensor, scales: Tensor
) -> None:
    """First-level scales (n,) in 8 bits: ``codes`` (n,) uint8, ``scales`` one for ``block`` of them."""
    with on_device_of(absmax):
        _round_scales_kernel[(cdiv(absmax.numel(), block),)](
            absmax, offset, grid, codes, scales, absmax.numel(), SCALE_BLOCK=block,
            BLOCK=next_power_of_2(block), GRID=grid.numel() - 1, num_warps=1 if block <= 256 else 4,
            enable_fp_fusion=False,
        )  # fmt: skip


_BLOCKS = {"x_ptr": "*bf16", "out_ptr": "*u8", "scales_ptr": "*fp32", "zero_points_ptr": "*i8"}
_BLOCKS |= {"midpoints_ptr": "*fp32", "values_ptr": "*fp32", "num_blocks": "i32", "blocks_per_row": "i32"}
_BLOCKS |= {"K": "i32", "code_pitch": "i32"}
_CONSTANTS = {
    "CODEBOOK": True, "ORDER": 0xFEDCBA9876543210, "BITS": 4, "ZERO_POINT": False, "PACKED": True,
    "SHORT": False, "PAD": 7, "DIVIDE": False, "BLOCK": 64, "ROWS": 64,
}  # fmt: skip
_BLOCKS |= dict.fromkeys(_CONSTANTS, "constexpr")
_ALIGNED = ("x_ptr", "out_ptr", "scales_ptr", "zero_points_ptr", "midpoints_ptr", "values_ptr", "K")
_INT4 = {**_CONSTANTS, "CODEBOOK": False, "ORDER": 0, "ZERO_POINT": True}
_ROWS = {"x_ptr": "*bf16", "out_ptr": "*i8", "scales_ptr": "*fp32", "zero_points_ptr": "*i8"}
_FORMAT = {"BITS": 8, "ZERO_POINT": False, "PACKED": True, "BLOCK": 4096}
_SIZES = {"K": "i32", "code_pitch": "i32", **dict.fromkeys(_FORMAT, "constexpr")}
_ROWS_ALIGNED = ("x_ptr", "out_ptr", "K", "code_pitch")

_RANGE = {"x_ptr": "*bf16", "range_ptr": "*i32", "n": "i64", "ZERO_POINT": "constexpr", "BLOCK": "constexpr"}
_SCALES = {"absmax_ptr": "*fp32", "offset_ptr": "*fp32", "grid_ptr": "*u8", "codes_ptr": "*u8"}
_SCALES |= {"scales_ptr": "*fp32", "n": "i32"}
_SCALE_CONSTANTS = {"SCALE_BLOCK": 256, "BLOCK": 256, "GRID": 65535}
_SCALES |= dict.fromkeys(_SCALE_CONSTANTS, "constexpr")
_TENSOR = {**_ROWS, "range_ptr": "*i32", "rows": "i32", **_SIZES}
_VALUES = {"out_ptr": "*bf16"}

COMPILE_CASES = (
    CompileCase(_round_blocks_kernel, _BLOCKS, _CONSTANTS, _ALIGNED),
    CompileCase(_round_blocks_kernel, _BLOCKS, {**_CONSTANTS, "SHORT": True, "DIVIDE": True}, _ALIGNED),
    CompileCase(_round_blocks_kernel, _BLOCKS | _VALUES, {**_CONSTANTS, "PACKED": False}, _ALIGNED),
    CompileCase(_round_blocks_kernel, _BLOCKS, _INT4, _ALIGNED),
    CompileCase(_round_rows_kernel, _ROWS | _SIZES, _FORMAT, _ROWS_ALIGNED),
    CompileCase(_round_rows_kernel, _ROWS | _SIZES | _VALUES, {**_FORMAT, "PACKED": False}, _ROWS_ALIGNED),
    CompileCase(_range_kernel, _RANGE, {"ZERO_POINT": True, "BLOCK": 8192}, ("x_ptr", "n"), 8),
    CompileCase(_round_tensor_kernel, _TENSOR, {**_FORMAT, "BITS": 4}, _ROWS_ALIGNED),
    CompileCase(_round_scales_kernel, _SCALES, _SCALE_CONSTANTS, ("absmax_ptr", "codes_ptr"), 1),
)
