"""Codes to features and values of emulated.py on a GPU: launches of features.cu.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same plans.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.device import describe
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import capability_of, cdiv, on_device_of

SOURCE = "stochastic/features.cu"
CODES = 128
AT_ONCE = 32  # rows of a block


class Operand(ctypes.Structure):
    """The kernel's argument, field by field as in the source."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("codes", "scales", "inverse", "table", "masks", "features", "values")
        ),
        *((name, ctypes.c_int) for name in ("rows", "D", "C", "chunk", "first", "width", "per_block")),
    ]


class FeatureTiling(NamedTuple):
    """How the kernel is launched."""

    dimensions: int  # of a block
    per_block: int  # rows
    grid: tuple[int, int, int]
    shared_bytes: int

    def defines(self, rank: int) -> nvrtc.Defines:
        """The source's macros."""
        return (("RANK", rank), ("DIMENSIONS", self.dimensions))


def takes(device: torch.device) -> bool:
    """Whether the kernel runs there: it needs NVRTC and units that convert E4M3."""
    if device.type != "cuda" or capability_of(device) < (8, 9):
        return False
    return nvrtc.missing() is None


def padded(rank: int) -> int:
    """The rank of tables: features are written 8 at a time."""
    return 8 * cdiv(rank, 8)


def plan(rows: int, width: int, rank: int, *, multiprocessors: int, shared: int) -> FeatureTiling:
    """As many dimensions in a block as shared memory holds; rows for about one wave of blocks."""
    entry = CODES * rank * 2
    dimensions = next((n for n in (32, 16, 8) if n * entry <= shared), 8)
    columns = cdiv(width, dimensions)
    parts = max(1, min(cdiv(rows, 4 * AT_ONCE), multiprocessors * (32 // dimensions) // columns))
    per_block = cdiv(cdiv(rows, parts), AT_ONCE) * AT_ONCE
    return FeatureTiling(dimensions, per_block, (columns, cdiv(rows, per_block), 1), dimensions * entry)


def operand_of(
    codes: Tensor,
    scales: Tensor,
    inverse: Tensor,
    table: Tensor,
    masks: Tensor,
    results: tuple[Tensor, Tensor],
) -> Operand:
    """The kernel's argument for all of codes (rows, D), without a part and a plan."""
    pointed = (codes, scales, inverse, table, masks, *results)
    return Operand(*(x.data_ptr() for x in pointed), *codes.shape, scales.shape[1])


def launch(
    operand: tuple[Tensor, Tensor, Tensor],
    table: Tensor,
    masks: Tensor,
    chunk: int,
    part: range,
    values: Tensor,
) -> Tensor:
    """Features (rows, codes of the chunks in ``part`` * rank) in E4M3; writes these codes' values too.

    Args:
        operand: codes (rows, D) int8, scales (rows, chunks) float32 and the inverse of each row's largest
            scale (rows,), contiguous.
        table: (masks, 128, rank) float16, the rank a multiple of 8.
        masks: (chunk,) int64: which mask.
        chunk: inner dimensions of a chunk.
        part: which chunks.
        values: (rows, D) bfloat16.
    """
    codes, rank = operand[0], table.shape[2]
    (rows, D), gpu = codes.shape, describe(codes.device)
    first = part.start * chunk
    width = min(D, part.stop * chunk) - first
    out = torch.empty(rows, width * rank, dtype=torch.float8_e4m3fn, device=codes.device)
    how = plan(rows, width, rank, multiprocessors=gpu.multiprocessors, shared=gpu.shared_memory_bytes)
    argument = operand_of(*operand, table, masks, (out, values))
    argument.chunk, argument.first, argument.width, argument.per_block = chunk, first, width, how.per_block
    with on_device_of(codes):
        device = codes.device.index
        kernel = nvrtc.kernel(SOURCE, "stochastic_features", how.defines(rank), device, how.shared_bytes)
        nvrtc.launch(kernel, how.grid, AT_ONCE * how.dimensions, how.shared_bytes, argument)
    return out
