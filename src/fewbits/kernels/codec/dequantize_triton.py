"""The Triton kernel of dequantize.py, which has the formulas, and its launch.

Codes of 8-bit floating point come as bytes: a GPU before compute capability 8.9 has no instruction for E4M3,
and its compiler knows no pointer to it. There the bits are put together by hand, exactly, for all 256 codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.formats.base import Format
from fewbits.formats.tables import table
from fewbits.kernels.codec.codings import is_known
from fewbits.kernels.launch.grid import programs, split_program
from fewbits.kernels.launch.jit import (
    CompileCase,
    cdiv,
    converts_float8,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
)
from fewbits.kernels.launch.prepared import Launch, keep_plans
from fewbits.kernels.launch.tuning import tile_on

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FLOAT8)
_E4M3, _E5M2 = 1, 2  # FLOAT8 of the kernel; 0: codes are no floating-point numbers


# 1. The kernel.


@jit
def _block_of(
    row, column, K, pitch, FLAT_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Index of the block of (row, column); FLAT_BLOCK counts through the tensor, 0 is a whole axis."""
    if FLAT_BLOCK:
        return (row * K + column) // FLAT_BLOCK
    block = row * 0
    if BLOCK_ROWS:
        block += (row // BLOCK_ROWS) * pitch
    if BLOCK_COLUMNS:
        block += column // BLOCK_COLUMNS
    return block


@jit
def _codes_of(codes_ptr, row, column, pitch, mask, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Codes of the groups that begin at (row, column): (groups, GROUP), int32 unless BITS is 8."""
    if BITS == 8:
        at = row[:, None] * pitch + column[:, None] + tl.arange(0, GROUP)[None, :]
        code = tl.load(codes_ptr + at, mask=mask[:, None])
    elif GROUP == 1:
        nibble = row * pitch + column
        byte = tl.load(codes_ptr + nibble // 2, mask=mask).to(tl.int32)
        code = (byte >> ((nibble % 2) * 4).to(tl.int32))[:, None] & 15
    else:
        start = row[:, None] * pitch + column[:, None] // GROUP * (GROUP // 2)
        byte = tl.load(codes_ptr + start + tl.arange(0, GROUP // 2)[None, :], mask=mask[:, None])
        byte = byte.to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (byte.shape[0], GROUP))
    return code


@jit
def float8_value(byte, FLOAT8: tl.constexpr, NATIVE: tl.constexpr):
    """float32 values of bytes in E4M3 (FLOAT8 is 1) or E5M2 (2); NATIVE: by the GPU's own conversion."""
    if FLOAT8 == 2:
        if NATIVE:
            value = byte.to(tl.float8e5, bitcast=True).to(tl.float32)
        else:  # the upper half of a float16
            value = (byte.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        if NATIVE:
            value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:  # a float16 (also one below its normal numbers), whose exponent counts from 15 and not from 7
            bits = byte.to(tl.int32)
            half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
            value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return value


@jit
def _value_of(
    code, values_ptr, BITS: tl.constexpr, VALUES: tl.constexpr, FLOAT8: tl.constexpr, NATIVE: tl.constexpr
):
    """float32 values of codes: from the table, or for 4 bits two's complement, or the code itself."""
    if FLOAT8:
        return float8_value(code, FLOAT8, NATIVE)
    if VALUES:  # a gather from 16 registers goes through shared memory, without conflicts: 16 banks hold all
        table = tl.load(values_ptr + tl.arange(0, 16))
        flat = tl.reshape(code, (code.shape[0] * code.shape[1],))
        return tl.reshape(tl.gather(table, flat, 0), code.shape)
    if BITS == 4:
        code = (code ^ 8) - 8
    return code.to(tl.float32)


@jit
def decoded_groups(
    codes_ptr,
    scales_ptr,
    zero_points_ptr,
    scale_scales_ptr,
    scale_offset_ptr,
    scale_table_ptr,
    values_ptr,
    row,
    first,
    mask,
    K,
    code_pitch,
    scale_pitch,
    VALUES: tl.constexpr,
    BITS: tl.constexpr,
    FLAT_BLOCK: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FLOAT8: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Values (groups, GROUP) float32 of the groups that begin at (row, first), each under one scale."""
    block = _block_of(row, first, K, scale_pitch, FLAT_BLOCK, SCALE_ROWS, SCALE_COLUMNS)
    scale = tl.load(scales_ptr + block, mask=mask, other=0)
    if SCALE_BLOCK:
        second = tl.load(scale_scales_ptr + block // SCALE_BLOCK, mask=mask, other=0.0)
        scale = tl.load(scale_table_ptr + scale.to(tl.int32)) * second + tl.load(scale_offset_ptr)
    code = _codes_of(codes_ptr, row, first, code_pitch, mask, BITS, GROUP)
    value = _value_of(code, values_ptr, BITS, VALUES, FLOAT8, NATIVE)
    if ZERO_POINT:
        value -= tl.load(zero_points_ptr + block, mask=mask, other=0).to(tl.float32)[:, None]
    return value * scale[:, None]


@jit
def _dequantize_kernel(
    codes_ptr, scales_ptr, zero_points_ptr, scale_scales_ptr, scale_offset_ptr, scale_table_ptr, values_ptr,
    inverse_ptr, out_ptr, N, K, code_pitch, scale_pitch, inverse_pitch, stride_out,
    VALUES: tl.constexpr, BITS: tl.constexpr, FLAT_BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, SCALE_BLOCK: tl.constexpr, ZERO_POINT: tl.constexpr,
    FLOAT8: tl.constexpr, NATIVE: tl.constexpr, INVERSE: tl.constexpr,
    INVERSE_ROWS: tl.constexpr, INVERSE_COLUMNS: tl.constexpr, LARGEST: tl.constexpr,
    TRANSPOSED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program decodes ROWS rows of GROUPS groups; a group is GROUP values of a row under one scale.

    The pitches are those of a row: code_pitch in bytes (in nibbles if GROUP is 1), the others in values.
    INVERSE is 0 without an inverse scale, 1 with one for a whole group, 2 with one for each value. LARGEST
    cuts what is stored; 0 where the conversion does so itself, as a GPU's to float8 (cvt.rn.satfinite).
    """
    lane = tl.arange(0, ROWS * GROUPS)
    row_tile, column_tile = split_program(tl.cdiv(N, ROWS))
    row = row_tile.to(tl.int64) * ROWS + lane // GROUPS
    first = (column_tile * GROUPS + lane % GROUPS) * GROUP
    mask = (row < N) & (first < K)
    w = decoded_groups(
        codes_ptr, scales_ptr, zero_points_ptr, scale_scales_ptr, scale_offset_ptr, scale_table_ptr,
        values_ptr, row, first, mask, K, code_pitch, scale_pitch, VALUES, BITS, FLAT_BLOCK, SCALE_ROWS,
        SCALE_COLUMNS, SCALE_BLOCK, ZERO_POINT, FLOAT8, NATIVE, GROUP,
    )  # fmt: skip
    column = first[:, None] + tl.arange(0, GROUP)[None, :]
    if INVERSE == 1:
        tile = _block_of(row, first, K, inverse_pitch, 0, INVERSE_ROWS, INVERSE_COLUMNS)
        w *= tl.load(inverse_ptr + tile, mask=mask, other=0.0)[:, None]
    if INVERSE == 2:
        tile = _block_of(row[:, None], column, K, inverse_pitch, 0, INVERSE_ROWS, INVERSE_COLUMNS)
        w *= tl.load(inverse_ptr + tile, mask=mask[:, None], other=0.0)
    if LARGEST:
        w = tl.clamp(w, -LARGEST * 1.0, LARGEST * 1.0, propagate_nan=tl.PropagateNan.ALL)
    w = w.to(out_ptr.dtype.element_ty)
    if TRANSPOSED:
        at = tl.trans(column).to(tl.int64) * stride_out + tl.trans(row[:, None])
        tl.store(out_ptr + at, tl.trans(w), mask=tl.trans(mask[:, None]))
    else:
        tl.store(out_ptr + row[:, None] * stride_out + column, w, mask=mask[:, None])


# 2. The launch.


class DecodeTile(NamedTuple):
    """A program decodes ``rows`` rows of ``groups`` groups, each under one scale."""

    rows: int
    groups: int
    num_warps: int


def decode_tile(group: int, K: int, transposed: bool, itemsize: int) -> DecodeTile:
    """About 4096 values a program; a transposed one needs whole 128-byte lines along the rows.

    Measured on an H200 for 14336 x 4096 NF4: 64 groups of 64, 4 warps for 16 bits, 1 warp for 8.
    To 8 bits that is 88 % of a copy's rate for 28672 x 4096, with 2 warps 77 %; transposed 47 %, where that
    of dequantize_cuda.py, for 4-bit codes under one inverse scale, reaches 57 %.
    """
    lanes = max(4096 // group, 16)
    warps = 1 if itemsize == 1 else 4
    if transposed:
        return DecodeTile(min(lanes, 128), 1, 4)
    groups = min(next_power_of_2(cdiv(K, group)), lanes)
    return DecodeTile(lanes // groups, groups, warps)


class _Layout(NamedTuple):
    """Where a packed tensor's codes and scales lie, as the kernel's constants say it."""

    values: bool
    bits: int
    flat_block: int
    scale_rows: int
    scale_columns: int
    scale_block: int
    zero_point: bool
    float8: int = 0


@keep_plans
def _layout_of(format: Format, shape: tuple[int, ...]) -> _Layout | None:
    """None if the kernel cannot say it: the definition then decodes."""
    coding = format.contract.coding
    if not is_known(coding):
        return None
    r, c = coding.block
    if coding.through:
        return _Layout(True, coding.bits, c, 0, 0, coding.scale_block, False)
    if not shape or (r > 1 and len(shape) > 2 and shape[-2] % r):
        return None  # the last tiles of each matrix are short
    kinds = {"e4m3": _E4M3, "e5m2": _E5M2}
    return _Layout(False, coding.bits, 0, r, c, 0, coding.zero_point, kinds.get(coding.kind, 0))


def _group(layout: _Layout, K: int, inverse_columns: int) -> int:
    """The most values, a power of two up to 128, that always lie in one row, block and inverse scale."""
    sizes = [K, layout.flat_block, layout.scale_columns, inverse_columns if inverse_columns > 1 else 0]
    group = 128
    while any(size % group for size in sizes):
        group //= 2
    return group


class Decoding(NamedTuple):
    """What `decoded_groups` is told of a packed tensor.

    Attributes:
        tables: of scales and of values, where the format has some.
        pitches: of a row of codes (bytes; nibbles of groups of one) and of scales.
        constants: by their names.
    """

    tables: tuple[Tensor, Tensor] | None
    pitches: tuple[int, int]
    constants: dict[str, Any]


def decoding_of(
    format: Format,
    shape: tuple[int, ...],
    device: torch.device,
    pitches: tuple[int, int],
    *,
    inverse_columns: int = 0,
    native: bool,
) -> Decoding:
    """The facts of a tensor of ``shape`` for which `has_triton_kernel` says yes.

    ``pitches`` are the last axes of codes and scales; ``native``: the device converts float8.
    """
    layout, (_, K) = _layout_of(format, shape), matrix_of(shape)
    assert layout is not None
    group = _group(layout, K, inverse_columns)
    code_pitch = K if layout.flat_block else pitches[0] * (8 // layout.bits)
    if layout.bits == 4 and group > 1:
        code_pitch //= 2
    coding, tables = format.contract.coding, None
    if coding is not None and coding.values:
        values = table(coding.values, device)
        tables = (table(coding.scale_values, device) if coding.scale_block else values, values)
    constants = {
        "VALUES": layout.values,
        "BITS": layout.bits,
        "FLAT_BLOCK": layout.flat_block,
        "SCALE_ROWS": layout.scale_rows,
        "SCALE_COLUMNS": layout.scale_columns,
        "SCALE_BLOCK": layout.scale_block,
        "ZERO_POINT": layout.zero_point,
        "FLOAT8": layout.float8,
        "NATIVE": native,
        "GROUP": group,
    }
    return Decoding(tables, (code_pitch, pitches[1]), constants)


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """N and K of a packed tensor: the axes before the last count as N."""
    K = shape[-1] if shape else 1
    return prod(shape) // max(K, 1), K


def takes(format: Format, shape: tuple[int, ...], out: Tensor) -> bool:
    """Whether the kernel decodes this; the definition does what is left, such as rows of 2**31 values.

    ``out`` is (N, K) or (K, N), of a packed tensor of ``shape`` (..., K).
    """
    if out.dtype not in KERNEL_DTYPES or (out.dtype in FLOAT8 and not converts_float8(out)):
        return False
    return has_triton_kernel(format, shape)


def has_triton_kernel(format: Format, shape: tuple[int, ...]) -> bool:
    """Whether a GPU decodes a tensor of ``shape`` (..., K) by this kernel, to a dtype that it writes."""
    return _layout_of(format, shape) is not None and matrix_of(shape)[1] < 2**31


def launch_kernel(
    named: Mapping[str, Tensor],
    format: Format,
    shape: tuple[int, ...],
    inverse_scale: Tensor | None,
    out: Tensor,
    transposed: bool,
    tile: DecodeTile | None = None,
) -> None:
    """Decode the parts of a tensor of ``shape``, at least one value, that the kernel `takes`.

    ``named`` are its parts by name, for N rows of K values; ``out`` is (N, K), or transposed (K, N);
    ``inverse_scale`` None or (R, C) float32.
    """
    codes, scales = named["codes"], named["scales"]
    second = named.get("scale_scales", scales)
    launch, tables = _plan(
        format,
        _dequantize_kernel,
        shape,
        codes.device,
        (codes.shape[-1], scales.shape[-1]),
        None if inverse_scale is None else (inverse_scale.shape[0], inverse_scale.shape[1]),
        (out.dtype, out.stride(-2)),
        transposed,
        tile,
        codes.is_cuda and converts_float8(codes),
    )
    with on_device_of(codes):
        launch(
            codes.view(torch.uint8) if codes.dtype in FLOAT8 else codes,
            scales,
            named.get("zero_points", scales),
            second,
            named.get("scale_offset", second),
            *(tables or (scales, scales)),
            scales if inverse_scale is None else inverse_scale,
            out,
        )


@keep_plans
def _plan(
    format: Format,
    kernel: Any,
    shape: tuple[int, ...],
    device: torch.device,
    pitches: tuple[int, int],
    inverse_shape: tuple[int, int] | None,
    into: tuple[torch.dtype, int],
    transposed: bool,
    tile: DecodeTile | None,
    native: bool,
) -> tuple[Launch, tuple[Tensor, Tensor] | None]:
    """A launch for these facts, and the tables of scales and values that it takes where the format has some.

    ``pitches`` are the last axes of codes and scales; ``into`` the output's dtype and the stride of its rows.
    """
    N, K = matrix_of(shape)
    dtype, stride = into
    inverse_rows, inverse_columns = (0, 0) if inverse_shape is None else _tile_size(inverse_shape, N, K)
    facts = decoding_of(format, shape, device, pitches, inverse_columns=inverse_columns, native=native)
    group = facts.constants["GROUP"]
    rule = decode_tile(group, K, transposed, dtype.itemsize)
    tile = tile or tile_on(device, "dequantize", (group, dtype.itemsize, transposed), rule)
    constants = {
        **facts.constants,
        "INVERSE": 0 if inverse_shape is None else 2 if inverse_columns % group else 1,
        "INVERSE_ROWS": inverse_rows,
        "INVERSE_COLUMNS": inverse_columns,
        "LARGEST": int(torch.finfo(dtype).max) if dtype in FLOAT8 and device.type != "cuda" else 0,
        "TRANSPOSED": transposed,
        "ROWS": tile.rows,
        "GROUPS": tile.groups,
    }
    numbers = (N, K, *facts.pitches, 1 if inverse_shape is None else inverse_shape[1], stride)
    grid = programs(N, K, tile.rows, group * tile.groups)
    return (
        Launch(kernel, grid, numbers, constants, num_warps=tile.num_warps, enable_fp_fusion=False),
        facts.tables,
    )


def _tile_size(inverse_shape: tuple[int, int], N: int, K: int) -> tuple[int, int]:
    """Rows and columns under one inverse scale; 0 for all."""
    R, C = inverse_shape
    return 0 if R == 1 else N // R, 0 if C == 1 else K // C


_PLAIN = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "zero_points_ptr": "*i8", "scale_scales_ptr": "*fp32"}
_PLAIN |= {"scale_offset_ptr": "*fp32", "scale_table_ptr": "*fp32", "values_ptr": "*fp32"}
_PLAIN |= {"inverse_ptr": "*fp32", "out_ptr": "*bf16", "N": "i32", "K": "i32", "code_pitch": "i32"}
_PLAIN |= {"scale_pitch": "i32", "inverse_pitch": "i32", "stride_out": "i32"}
# Of a tensor in NF4 with doubly quantised scales, for cases that are compiled.
NF4_DECODING = {"VALUES": True, "BITS": 4, "FLAT_BLOCK": 64, "SCALE_ROWS": 0, "SCALE_COLUMNS": 0}
NF4_DECODING |= {"SCALE_BLOCK": 256, "ZERO_POINT": False, "FLOAT8": 0, "NATIVE": False, "GROUP": 64}
_CONSTANTS = {name: value for name, value in NF4_DECODING.items() if name != "GROUP"}  # in the kernel's order
_CONSTANTS |= {"INVERSE": 0, "INVERSE_ROWS": 0, "INVERSE_COLUMNS": 0, "LARGEST": 0, "TRANSPOSED": False}
_CONSTANTS |= {"GROUP": NF4_DECODING["GROUP"], "ROWS": 1, "GROUPS": 64}
_PLAIN |= dict.fromkeys(_CONSTANTS, "constexpr")
_DOUBLE = {**_PLAIN, "scales_ptr": "*u8"}
_INT4 = {**_CONSTANTS, "VALUES": False, "FLAT_BLOCK": 0, "SCALE_BLOCK": 0}
_INT4 |= {"SCALE_ROWS": 1, "SCALE_COLUMNS": 64}
_ROWS8 = {**_INT4, "BITS": 8, "GROUP": 128, "GROUPS": 32}
_ALIGNED = (*(name for name in _PLAIN if name.endswith("_ptr")), "N", "K", "code_pitch", "stride_out")

COMPILE_CASES = (
    CompileCase(
        _dequantize_kernel,
        {**_DOUBLE, "out_ptr": "*fp8e4nv"},
        {**_CONSTANTS, "INVERSE": 1, "INVERSE_ROWS": 1},
        _ALIGNED,
        1,
        89,
    ),
    CompileCase(_dequantize_kernel, _DOUBLE, _CONSTANTS, _ALIGNED),
    CompileCase(
        _dequantize_kernel, _DOUBLE, {**_CONSTANTS, "TRANSPOSED": True, "ROWS": 64, "GROUPS": 1}, _ALIGNED
    ),
    CompileCase(_dequantize_kernel, _PLAIN, {**_INT4, "ZERO_POINT": True}, _ALIGNED),
    CompileCase(
        _dequantize_kernel,
        {**_PLAIN, "codes_ptr": "*i8"},
        {**_ROWS8, "SCALE_COLUMNS": 0},
        _ALIGNED,
    ),
    CompileCase(_dequantize_kernel, _PLAIN, {**_ROWS8, "FLOAT8": _E4M3}, _ALIGNED),
    CompileCase(_dequantize_kernel, _PLAIN, {**_ROWS8, "FLOAT8": _E5M2}, _ALIGNED),
    CompileCase(_dequantize_kernel, _PLAIN, {**_ROWS8, "FLOAT8": _E4M3, "NATIVE": True}, _ALIGNED, 4, 89),
    CompileCase(_dequantize_kernel, _PLAIN, {**_ROWS8, "FLOAT8": _E5M2, "NATIVE": True}, _ALIGNED, 4, 89),
)
