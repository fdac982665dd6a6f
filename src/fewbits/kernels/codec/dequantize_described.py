"""The arguments, the macros and the launch of dequantize_described.cu: formats decoded by their description.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.base import Format
from fewbits.formats.description import Description, text_of
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv, on_device_of
from fewbits.kernels.launch.prepared import keep_plans

SOURCE, NAME = "codec/dequantize_described.cu", "dequantize_described"
_THREADS, _ITEMS = 256, 2  # the first as in the source
_NONE = "{0,0,1,1,0,0,0,0,0}"
_KINDS = ("whole", "float", "table", "digit", "trellis")
_STORED = ("float32", "e8m0", "e4m3", "e4m3_divided", "half", "exponent")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Arguments(ctypes.Structure):
    """The kernel's argument, field by field as in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zero_points", "whole", "out")),
        *((name, ctypes.c_int) for name in ("N", "K", "pitch", "scale_pitch", "stride")),
        *((name, ctypes.c_uint) for name in ("multiplier", "shift")),
        ("table", ctypes.c_float * 16),
    ]


class Call(NamedTuple):
    """What is launched."""

    argument: Arguments
    defines: nvrtc.Macros
    grid: tuple[int, int, int]


@keep_plans
def description_of(format: Format) -> Description | None:
    """What the kernel is generated from; None where a format has no description."""
    contract = format.contract
    coding = contract.coding
    if contract.description is not None or coding is None:
        return contract.description
    if coding.kind != "whole" or coding.through or coding.scale_block:
        return None
    return Description(bits=coding.bits, is_signed=True, block=coding.block, zero_point=coding.zero_point)


@keep_plans
def is_described(format: Format, shape: tuple[int, ...]) -> bool:
    """Whether the kernel decodes a tensor of ``shape`` (..., K): where eight values always share a scale."""
    described = description_of(format)
    if described is None or not shape or prod(shape[:-1]) >= 2**31 or not shape[-1] < 2**31:
        return False
    rows, columns = described.block
    if described.bits and (columns % 8 or (rows > 1 and len(shape) > 2 and shape[-2] % rows)):
        return False
    return not (described.kind == "trellis" and shape[-1] % 8)


def can_launch(out: Tensor, dtype: torch.dtype) -> bool:
    """Whether `dequantize` takes it where ``out`` (N, K) is, for a result of this dtype."""
    return out.is_cuda and dtype in DTYPES and nvrtc.missing() is None


@keep_plans
def _defines(format: Format, dtype: torch.dtype) -> nvrtc.Macros:
    d = description_of(format)
    assert d is not None
    widths = [piece.bits + piece.into for piece in d.codes]
    numbers = {
        "BITS": d.bits,
        "CODE_BITS": d.bits or max(widths),
        "SIZE": d.size,
        "NBYTES": d.nbytes,
        "SUB": d.sub,
        "HALF_AT": max(d.half, 0),
        "LOW_AT": d.low,
        "ADDS_LOW": int(d.adds_low),
        "KIND": _KINDS.index(d.kind),
        "CENTER": 1 if d.kind == "digit" else d.center,
        "SIGNED": int(d.is_signed),
        "INVERSE_UNIT": int(1 / d.unit),
        "MANTISSA": d.mantissa_bits,
        "BIAS": d.bias,
        "LARGEST": d.largest_code,
        "STATE": d.state_bits,
        "SCALE_CENTER": d.scale_center,
        "SCALE_SIGNED": int(d.scale_is_signed),
        "STORED": _STORED.index(d.stored),
        "ROWS": d.block[0],
        "COLUMNS": d.block[1],
        "ZERO_POINT": int(d.zero_point),
        "WIDTH": dtype.itemsize,
        "IS_HALF": int(dtype == torch.float16),
    }
    pieces = {"CODE_PIECES": d.codes, "SCALE_PIECES": d.scales, "MINIMUM_PIECES": d.minima}
    return (*numbers.items(), *((name, text_of(own) or _NONE) for name, own in pieces.items()))


def call_of(format: Format, parts: Mapping[str, Tensor], shape: tuple[int, ...], out: Tensor) -> Call:
    """The call that decodes the parts of a tensor of ``shape``, which `is_described`, into ``out`` (N, K)."""
    d = description_of(format)
    assert d is not None
    N, K = prod(shape[:-1]), shape[-1]
    scales, zeros, whole = (parts.get(n) for n in ("scales", "zero_points", d.whole_part or "none"))
    pointers = [None if part is None else part.data_ptr() for part in (scales, zeros, whole)]
    pitch = parts["codes"].numel() * parts["codes"].element_size() // max(N, 1)
    scale_pitch = 0 if scales is None or scales.dim() == 0 else scales.shape[-1]
    table = (ctypes.c_float * 16)(*(d.table or (0.0,) * 16))
    codes, eights = parts["codes"].data_ptr(), cdiv(K, 8)
    bits = max(eights - 1, 0).bit_length()
    # (x * multiplier) >> (31 + bits) is x // eights for every x below 2 ** 31, but where a row has one.
    division = (cdiv(2 ** (31 + bits), eights), bits - 1) if bits else (0, 0)
    numbers = (N, K, pitch, scale_pitch, out.stride(0), *division)
    argument = Arguments(codes, *pointers, out.data_ptr(), *numbers, table)
    place = {
        "ITEMS": _ITEMS,
        "CODES_AT": gcd(codes, pitch, 8),
        "OUT_AT": gcd(out.data_ptr(), out.stride(0) * out.element_size(), 16),
        "HAS_REST": int(K % 8 > 0),
        "IS_STAGED": int(bool(d.scales) and K % d.size == 0),
        "IS_LARGE": int(N * eights >= 2**31 or not bits),
    }
    grid = (cdiv(N * eights, _THREADS * _ITEMS), 1, 1)
    return Call(argument, (*_defines(format, out.dtype), *place.items()), grid)


def launch(format: Format, parts: Mapping[str, Tensor], shape: tuple[int, ...], out: Tensor) -> None:
    """Decode the parts of a tensor of ``shape`` into ``out`` (N, K) on its GPU; its rows are contiguous."""
    call = call_of(format, parts, shape, out)
    with on_device_of(out):
        kernel = nvrtc.kernel(SOURCE, NAME, call.defines, out.device.index, 0)
        nvrtc.launch(kernel, call.grid, _THREADS, 0, call.argument)
