"""A packed tensor back to a dense one, for any format with a value a code and a scale a block.

    w[n, k] = value(code[n, k]) * scale[block of (n, k)]             W (N, K); the axes before K count as N

Codebooks (NF4, FP4) look the code up in 16 values; integers take it as it is, less the block's zero point
where there is one; 8-bit floating point is its own value. With double quantisation the scale is a code too:

    scale = scale_table[code] * scale_scale[second-level block] + scale_offset

Two more things can be done on the way out: W is written transposed, as (K, N); and it is brought to 8-bit
floating point, ``float8(cut(w * inverse_scale))``, cut to the largest number of that type.

All in float32 in the order in which it stands here, each step rounded (no fused multiply-add), then one
rounding to the output's dtype: bit for bit what `Format.dequantize` gives. There is no gradient: packed
weights are frozen.

Floor: the packed tensor is read once and the dense one written once. 14336 x 4096 in NF4 with double
quantisation are 30.3 MB, in bfloat16 117.4 MB: 34.5 us at the 4.28 TB/s that a copy reaches on an H200; to
8 bits 20.8 us.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats import FORMATS
from fewbits.formats.base import Format, Packed, format_from_config
from fewbits.formats.codebook import Codebook
from fewbits.formats.float8 import Float8
from fewbits.formats.integer import Integer
from fewbits.formats.tables import table
from fewbits.kernels import _dequantize_cuda
from fewbits.kernels._launch import (
    CompileCase,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
)
from fewbits.kernels._tuning import tile_for

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *_FLOAT8)


# 1. The definition.


def dequantize_ref(
    packed: Packed, dtype: torch.dtype, transposed: bool = False, inverse_scale: Tensor | None = None
) -> Tensor:
    """The formula above through the format's own `dequantize`; see `dequantize` for the arguments."""
    if dtype not in _FLOAT8 and inverse_scale is None:
        w = packed.dequantize(dtype)
    else:
        w = packed.dequantize(torch.float32)
        if inverse_scale is not None:
            R, C = inverse_scale.shape
            rows = w.view(prod(packed.shape[:-1]), packed.shape[-1])
            tiles = rows.view(R, rows.shape[0] // R, C, rows.shape[1] // C)
            w = (tiles * inverse_scale.view(R, 1, C, 1)).view(w.shape)
        w = w.clamp(-_largest(dtype), _largest(dtype)).to(dtype) if dtype in _FLOAT8 else w.to(dtype)
    return w.t().contiguous() if transposed else w


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


# 2. The kernel.


@jit
def _block_of(
    row, column, K, pitch, FLAT_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
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
def _value_of(code, values_ptr, BITS: tl.constexpr, VALUES: tl.constexpr):
    """float32 values of codes: from the table, or for 4 bits two's complement, or the code itself."""
    if VALUES:  # a gather from 16 registers goes through shared memory, without conflicts: 16 banks hold all
        table = tl.load(values_ptr + tl.arange(0, 16))
        flat = tl.reshape(code, (code.shape[0] * code.shape[1],))
        return tl.reshape(tl.gather(table, flat, 0), code.shape)
    if BITS == 4:
        code = (code ^ 8) - 8
    return code.to(tl.float32)


@jit
def _dequantize_kernel(
    codes_ptr, scales_ptr, zero_points_ptr, scale_scales_ptr, scale_offset_ptr, scale_table_ptr, values_ptr,
    inverse_ptr, out_ptr, N, K, code_pitch, scale_pitch, inverse_pitch, stride_out,
    VALUES: tl.constexpr, BITS: tl.constexpr, FLAT_BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, SCALE_BLOCK: tl.constexpr, ZERO_POINT: tl.constexpr, INVERSE: tl.constexpr,
    INVERSE_ROWS: tl.constexpr, INVERSE_COLUMNS: tl.constexpr, LARGEST: tl.constexpr,
    TRANSPOSED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program decodes ROWS rows of GROUPS groups; a group is GROUP values of a row under one scale.

    The pitches are those of a row: code_pitch in bytes (in nibbles if GROUP is 1), the others in values.
    INVERSE is 0 without an inverse scale, 1 with one for a whole group, 2 with one for each value. LARGEST
    cuts what is stored; 0 where the conversion does so itself, as a GPU's to float8 (cvt.rn.satfinite).
    """
    lane = tl.arange(0, ROWS * GROUPS)
    row = tl.program_id(0).to(tl.int64) * ROWS + lane // GROUPS
    first = (tl.program_id(1) * GROUPS + lane % GROUPS) * GROUP
    mask = (row < N) & (first < K)
    block = _block_of(row, first, K, scale_pitch, FLAT_BLOCK, SCALE_ROWS, SCALE_COLUMNS)
    scale = tl.load(scales_ptr + block, mask=mask, other=0)
    if SCALE_BLOCK:
        second = tl.load(scale_scales_ptr + block // SCALE_BLOCK, mask=mask, other=0.0)
        scale = tl.load(scale_table_ptr + scale.to(tl.int32)) * second + tl.load(scale_offset_ptr)
    code = _codes_of(codes_ptr, row, first, code_pitch, mask, BITS, GROUP)
    value = _value_of(code, values_ptr, BITS, VALUES)
    if ZERO_POINT:
        value -= tl.load(zero_points_ptr + block, mask=mask, other=0).to(tl.float32)[:, None]
    w = value * scale[:, None]
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


# 3. The launch.


class DecodeTile(NamedTuple):
    """A program decodes ``rows`` rows of ``groups`` groups, each under one scale."""

    rows: int
    groups: int
    num_warps: int


def decode_tile(group: int, K: int, transposed: bool, itemsize: int) -> DecodeTile:
    """About 4096 values a program; a transposed one needs whole 128-byte lines along the rows.

    Measured on an H200 for 14336 x 4096 NF4: 64 groups of 64, 4 warps for 16 bits, 1 warp for 8.
    To 8 bits that is 88 % of a copy's rate for 28672 x 4096, with 2 warps 77 %; transposed 47 %, where that
    of _dequantize_cuda.py, for 4-bit codes under one inverse scale, reaches 57 %.
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


@lru_cache(maxsize=256)
def _layout_of(format: Format, shape: tuple[int, ...]) -> _Layout | None:
    """None if the kernel cannot say it: the definition then decodes."""
    if isinstance(format, Codebook):
        return _Layout(True, 4, format.block, 0, 0, format.scale_block if format.double else 0, False)
    if not isinstance(format, Integer | Float8) or not shape:
        return None
    r, c = format.block
    if r > 1 and len(shape) > 2 and shape[-2] % r:
        return None  # the last tiles of each matrix are short
    bits, zero_point = (format.bits, format.zero_point) if isinstance(format, Integer) else (8, False)
    return _Layout(False, bits, 0, r, c, 0, zero_point)


def _group(layout: _Layout, K: int, inverse_columns: int) -> int:
    """The most values, a power of two up to 128, that always lie in one row, block and inverse scale."""
    sizes = [K, layout.flat_block, layout.scale_columns, inverse_columns if inverse_columns > 1 else 0]
    group = 128
    while any(size % group for size in sizes):
        group //= 2
    return group


def launch(
    parts: Sequence[Tensor],
    format: Format,
    shape: Sequence[int],
    inverse_scale: Tensor | None,
    out: Tensor,
    transposed: bool,
    tile: DecodeTile | None = None,
) -> None:
    """`dequantize_ref` into ``out`` by the Triton kernel; else by the definition."""
    named = dict(zip(format.layout(tuple(shape)), parts, strict=True))
    layout, K = _layout_of(format, tuple(shape)), shape[-1] if shape else 1
    N = prod(shape) // max(K, 1)
    if layout is None or out.dtype not in _KERNEL_DTYPES:
        packed = Packed(format, tuple(shape), out.dtype, named)
        out.copy_(dequantize_ref(packed, out.dtype, transposed, inverse_scale).view(out.shape))
        return
    if N * K == 0:
        return
    if transposed and tile is None and _dequantize_cuda.turned(format, named, (N, K), inverse_scale, out):
        return
    inverse_rows, inverse_columns = (0, 0) if inverse_scale is None else _tile_size(inverse_scale, N, K)
    group = _group(layout, K, inverse_columns)
    code_pitch = K if isinstance(format, Codebook) else named["codes"].shape[-1] * (8 // layout.bits)
    if layout.bits == 4 and group > 1:
        code_pitch //= 2
    codes, scales = named["codes"], named["scales"]
    second = named.get("scale_scales", scales)
    tables = (scales, scales)
    if isinstance(format, Codebook):
        tables = (
            table(format.scale_table, codes.device) if format.double else scales,
            table(format.values, codes.device),
        )
    rule = decode_tile(group, K, transposed, out.element_size())
    tile = tile or tile_for("dequantize", (group, out.element_size(), transposed), codes, rule)
    with on_device_of(codes):
        _dequantize_kernel[(cdiv(N, tile.rows), cdiv(K, group * tile.groups))](
            codes, scales, named.get("zero_points", scales), second, named.get("scale_offset", second),
            *tables, scales if inverse_scale is None else inverse_scale, out, N, K, code_pitch,
            scales.shape[-1], 1 if inverse_scale is None else inverse_scale.shape[1], out.stride(-2),
            VALUES=layout.values, BITS=layout.bits, FLAT_BLOCK=layout.flat_block,
            SCALE_ROWS=layout.scale_rows, SCALE_COLUMNS=layout.scale_columns, SCALE_BLOCK=layout.scale_block,
            ZERO_POINT=layout.zero_point,
            INVERSE=0 if inverse_scale is None else 2 if inverse_columns % group else 1,
            INVERSE_ROWS=inverse_rows, INVERSE_COLUMNS=inverse_columns,
            LARGEST=int(_largest(out.dtype)) if out.dtype in _FLOAT8 and not codes.is_cuda else 0,
            TRANSPOSED=transposed,
            GROUP=group, ROWS=tile.rows, GROUPS=tile.groups, num_warps=tile.num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def _tile_size(inverse_scale: Tensor, N: int, K: int) -> tuple[int, int]:
    """Rows and columns under one inverse scale; 0 for all."""
    R, C = inverse_scale.shape
    return 0 if R == 1 else N // R, 0 if C == 1 else K // C


_PLAIN = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "zero_points_ptr": "*i8", "scale_scales_ptr": "*fp32"}
_PLAIN |= {"scale_offset_ptr": "*fp32", "scale_table_ptr": "*fp32", "values_ptr": "*fp32"}
_PLAIN |= {"inverse_ptr": "*fp32", "out_ptr": "*bf16", "N": "i32", "K": "i32", "code_pitch": "i32"}
_PLAIN |= {"scale_pitch": "i32", "inverse_pitch": "i32", "stride_out": "i32"}
_CONSTANTS = {
    "VALUES": True, "BITS": 4, "FLAT_BLOCK": 64, "SCALE_ROWS": 0, "SCALE_COLUMNS": 0, "SCALE_BLOCK": 256,
    "ZERO_POINT": False, "INVERSE": 0, "INVERSE_ROWS": 0, "INVERSE_COLUMNS": 0, "LARGEST": 0,
    "TRANSPOSED": False, "GROUP": 64, "ROWS": 1, "GROUPS": 64,
}  # fmt: skip
_PLAIN |= dict.fromkeys(_CONSTANTS, "constexpr")
_DOUBLE = {**_PLAIN, "scales_ptr": "*u8"}
_INT4 = {**_CONSTANTS, "VALUES": False, "FLAT_BLOCK": 0, "SCALE_BLOCK": 0}
_INT4 |= {"SCALE_ROWS": 1, "SCALE_COLUMNS": 64}
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
        {**_INT4, "BITS": 8, "SCALE_COLUMNS": 0, "GROUP": 128, "GROUPS": 32},
        _ALIGNED,
    ),
)


# 4. The ops: on a CPU they run the definition, on CUDA the kernel.


@torch.library.custom_op("fewbits::dequantize", mutates_args=())
def _dequantize(
    parts: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    transposed: bool,
    inverse_scale: Tensor | None,
) -> Tensor:
    named = _named(parts, format, shape)
    return dequantize_ref(named, dtype, transposed, inverse_scale).contiguous()


@torch.library.custom_op("fewbits::dequantize_into", mutates_args=("out",))
def _dequantize_into(
    parts: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    out: Tensor,
    transposed: bool,
    inverse_scale: Tensor | None,
) -> None:
    out.copy_(dequantize_ref(_named(parts, format, shape), out.dtype, transposed, inverse_scale))


def _named(parts: Sequence[Tensor], format: str, shape: Sequence[int]) -> Packed:
    value = _from_text(format)
    names = value.layout(tuple(shape))
    return Packed(value, tuple(shape), torch.float32, dict(zip(names, parts, strict=True)))


def _to_text(format: Format) -> str:
    """A format as an op's argument."""
    return format.text


@lru_cache(maxsize=64)
def _from_text(text: str) -> Format:
    return format_from_config(json.loads(text), FORMATS)


def _out_shape(shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    return tuple(reversed(shape)) if transposed else tuple(shape)


@_dequantize.register_kernel("cuda")
def _(
    parts: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    transposed: bool,
    inverse_scale: Tensor | None,
) -> Tensor:
    out = torch.empty(_out_shape(shape, transposed), dtype=dtype, device=parts[0].device)
    _launch_whole(parts, _from_text(format), shape, out, transposed, inverse_scale)
    return out


def _launch_whole(
    parts: Sequence[Tensor],
    format: Format,
    shape: Sequence[int],
    out: Tensor,
    transposed: bool,
    inverse_scale: Tensor | None,
) -> None:
    """`launch` into a new tensor of any number of axes."""
    rows = out.view(-1, out.shape[-1]) if out.dim() else out.view(1, 1)
    launch(parts, format, shape, inverse_scale, rows if out.numel() else out, transposed)


@_dequantize_into.register_kernel("cuda")
def _(
    parts: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    out: Tensor,
    transposed: bool,
    inverse_scale: Tensor | None,
) -> None:
    launch(parts, _from_text(format), shape, inverse_scale, out, transposed)


@_dequantize.register_fake
def _(
    parts: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    transposed: bool,
    inverse_scale: Tensor | None,
) -> Tensor:
    return parts[0].new_empty(_out_shape(shape, transposed), dtype=dtype)


# 5. The one public function.


def dequantize(
    packed: Packed,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    transposed: bool = False,
    inverse_scale: Tensor | None = None,
) -> Tensor:
    """The dense tensor that ``packed`` stands for.

    Args:
        packed: (..., K) in any format; one that the kernel does not know is decoded by its definition.
        dtype: of the result; None takes out's, or the one that the tensor had before.
        out: (N, K), or with ``transposed`` (K, N), to write to: its rows may lie apart, as in the left part
            of a wider buffer. None allocates.
        transposed: W^T, for a tensor of two axes.
        inverse_scale: float32, what each value is multiplied by before the last rounding: one for all, with
            shape () or (1,); or (R, C), each one for a tile of N / R rows and K / C columns of W, not of W^T.
            Meant for 8-bit outputs, ``float8(w * inverse_scale)``.

    Returns:
        ``out``, or a new contiguous tensor of packed.shape.

    Raises:
        BadInput: shapes that do not fit.
    """
    shape, parts = packed.shape, list(packed.parts.values())
    if transposed and len(shape) != 2:
        raise BadInput(
            f"dequantize transposes tensors of two axes, not of shape {tuple(shape)}: leave it out."
        )
    scale = None if inverse_scale is None else _checked_inverse(inverse_scale, shape)
    # The dispatcher costs 0.2 ms a call on the host, as much as decoding a large weight takes on the device.
    direct = packed.codes.is_cuda and not torch.compiler.is_compiling()
    if out is None and direct:
        out = torch.empty(
            _out_shape(shape, transposed), dtype=dtype or packed.dtype, device=packed.codes.device
        )
        _launch_whole(parts, packed.format, shape, out, transposed, scale)
        return out
    format = _to_text(packed.format)
    if out is None:
        return _dequantize(parts, format, shape, dtype or packed.dtype, transposed, scale)
    need = _out_shape(shape, transposed)
    if len(shape) != 2 or out.shape != need or out.stride(1) != 1 or dtype not in (None, out.dtype):
        raise BadInput(
            f"dequantize writes {need} with contiguous rows in out's dtype; out has {tuple(out.shape)}, "
            f"strides {out.stride()} and {out.dtype}: pass a matching one, or none."
        )
    if direct:
        launch(parts, packed.format, shape, scale, out, transposed)
    else:
        _dequantize_into(parts, format, shape, out, transposed, scale)
    return out


def _checked_inverse(inverse_scale: Tensor, shape: Sequence[int]) -> Tensor:
    N, K = prod(shape[:-1]), shape[-1] if shape else 1
    scale = inverse_scale.reshape(1, 1) if inverse_scale.numel() == 1 else inverse_scale
    fits = scale.dim() == 2 and scale.numel() and N % scale.shape[0] == 0 and K % scale.shape[1] == 0
    if scale.dtype != torch.float32 or not fits:
        raise BadInput(
            f"inverse_scale must be float32 of shape (1,), or (R, C) that divide ({N}, {K}); it is "
            f"{scale.dtype} {tuple(inverse_scale.shape)}."
        )
    return scale.contiguous()
