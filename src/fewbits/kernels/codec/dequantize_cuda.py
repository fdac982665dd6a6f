"""The arguments and the launch of dequantize_transposed.cu: NF4 and FP4 to transposed E4M3.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.formats.base import Format
from fewbits.formats.tables import table
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.grid import MAX_PROGRAMS
from fewbits.kernels.launch.jit import capability_of, cdiv, on_device_of
from fewbits.kernels.launch.prepared import keep_plans

SOURCE = "codec/dequantize_transposed.cu"
_BLOCK, _ROWS, _WARPS, _THREADS = 64, 128, 8, 256  # as in the source


class Arguments(ctypes.Structure):
    """The kernel's argument, field by field as in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "scale_table", "scale_scales")),
        *((name, ctypes.c_void_p) for name in ("scale_offset", "inverse", "out")),
        *((name, ctypes.c_int) for name in ("N", "K", "pitch")),
        ("values", ctypes.c_float * 16),
    ]


def is_faster(device: torch.device) -> bool:
    """Whether the kernel is the one to take on this GPU: one that converts to float8.

    14336 x 4096 in NF4 with double quantisation on an H200: 36.5 us, where Triton's takes 44.5.
    """
    return capability_of(device) >= (8, 9) and nvrtc.missing() is None


class Call(NamedTuple):
    """What is launched."""

    argument: Arguments
    defines: nvrtc.Defines
    grid: tuple[int, int, int]


def fits(
    format: Format, parts: Mapping[str, Tensor], N: int, K: int, inverse_scale: Tensor | None, out: Tensor
) -> bool:
    """Whether the kernel writes this: out (K, N) of float8 under one inverse scale."""
    return (
        out.dtype == torch.float8_e4m3fn
        and inverse_scale is not None
        and inverse_scale.numel() == 1
        and _takes(format, N, K)
        and out.stride(1) == 1
        and out.stride(0) % 4 == 0
        and out.data_ptr() % 4 == 0
        and parts["codes"].data_ptr() % 16 == 0
    )


@keep_plans
def _takes(format: Format, N: int, K: int) -> bool:
    """Whether the kernel reads weights of N rows and K columns in this format."""
    coding = format.contract.coding
    return (
        coding is not None
        and coding.through
        and coding.block == (1, _BLOCK)
        and len(coding.values) == 16
        and N % 4 == 0
        and K % _BLOCK == 0
        and N * K < 2**31
        and cdiv(K // _BLOCK, _WARPS) <= MAX_PROGRAMS[1]
    )


def call_of(
    format: Format, parts: Mapping[str, Tensor], N: int, K: int, inverse_scale: Tensor, out: Tensor
) -> Call:
    """The call for what `fits` has passed."""
    scale_block, values, scale_table = _constants(format, out.device)
    double: list[int | None] = [None] * 3
    if scale_table is not None:
        double = [x.data_ptr() for x in (scale_table, parts["scale_scales"], parts["scale_offset"])]
    pointers = [parts["codes"].data_ptr(), parts["scales"].data_ptr(), *double, inverse_scale.data_ptr()]
    argument = Arguments(*pointers, out.data_ptr(), N, K, out.stride(0), values)
    grid = (cdiv(N, _ROWS), cdiv(K // _BLOCK, _WARPS), 1)
    return Call(argument, (("SCALE_BLOCK", scale_block),), grid)


@keep_plans
def _constants(format: Format, device: torch.device) -> tuple[int, Any, Tensor | None]:
    """Values under one second scale (0: scales are plain), the sixteen values, and the table of scales."""
    coding = format.contract.coding
    assert coding is not None
    scale_table = table(coding.scale_values, device) if coding.scale_block else None
    return coding.scale_block, (ctypes.c_float * 16)(*coding.values), scale_table


def write_transposed(
    format: Format,
    parts: Mapping[str, Tensor],
    shape: tuple[int, int],
    inverse_scale: Tensor | None,
    out: Tensor,
) -> bool:
    """W^T into ``out`` where this kernel is the one to take; False where it is not.

    ``parts`` are those of W (N, K), ``shape``; ``out`` is (K, N) float8; ``inverse_scale`` one float32.
    """
    if not (out.is_cuda and is_faster(out.device) and fits(format, parts, *shape, inverse_scale, out)):
        return False
    assert inverse_scale is not None
    launch(format, parts, *shape, inverse_scale, out)
    return True


def launch(
    format: Format, parts: Mapping[str, Tensor], N: int, K: int, inverse_scale: Tensor, out: Tensor
) -> None:
    """W^T of the packed W (N, K) into ``out`` (K, N), for what `fits` has passed."""
    call = call_of(format, parts, N, K, inverse_scale, out)
    with on_device_of(out):
        kernel = nvrtc.kernel(SOURCE, "dequantize_turned", call.defines, out.device.index, 0)
        nvrtc.launch(kernel, call.grid, _THREADS, 0, call.argument)
