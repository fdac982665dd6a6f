"""Prepared stochastic operands by lookups in shared memory: tables and launches of _stochastic_lookup.cu.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.device import Device, describe
from fewbits.formats.stochastic import Stochastic
from fewbits.formats.streams import product_tables
from fewbits.kernels import _nvrtc
from fewbits.kernels._launch import cdiv, on_device_of

SOURCE = "_stochastic_lookup.cu"
CODES = 128  # magnitudes of codes, 0 ... 127
_PLANE_BYTES = 256 * 32 * 4
_TILE = 16
_WORKSPACE_BYTES = 2**28
_DIRECT_OUTPUTS = 4096  # of a block: enough to pay for its tables, few enough that their sums stay in the L2


class Tables(NamedTuple):
    """What the kernel looks up; see the text of _stochastic_lookup.cu."""

    bytes: Tensor  # (levels, masks, 128, 128) uint8: 128 / added + T - slope * |qb|
    slopes: Tensor  # (levels, masks, 128) int8
    masks: Tensor  # (chunk,) uint8
    factors: Tensor  # (levels,) float32
    linear: bool  # whether a slope is not 0
    wide: bool  # whether a count of 256 occurs
    added: int  # bytes whose sum always fits a byte: 1 to 4


@lru_cache(maxsize=16)
def tables_of(
    options: Stochastic, levels: tuple[int, ...], chunk: int, device: torch.device
) -> Tables | None:
    """The tables of a product; None if counts are too far from a straight line for 8 bits."""
    masks = options.masks(chunk)
    distinct = tuple(dict.fromkeys(masks))
    codes = options.max_code + 1
    counts = torch.zeros(len(levels), len(distinct), CODES, CODES, dtype=torch.int32)
    for i, length in enumerate(levels):
        if length:
            of_length = product_tables(options.with_length(length).streams, distinct, torch.device("cpu"))
            counts[i, :, :codes, :codes] = of_length
    rest, slopes = _straightened(counts)
    largest = int(rest.abs().amax())
    if largest > 127:
        return None
    added = max(1, min(4, 127 // max(largest, 1)))  # bytes up to 2 * largest, and their sum up to 255
    position = {mask: i for i, mask in enumerate(distinct)}
    index = torch.tensor([position[mask] for mask in masks], dtype=torch.uint8)
    factors = [options.max_code**2 / length if length else 0.0 for length in levels]
    return Tables(
        (rest + 128 // added).to(torch.uint8).to(device),
        slopes.to(torch.int8).to(device),
        index.to(device),
        torch.tensor(factors, dtype=torch.float64).float().to(device),
        bool(slopes.any()),
        int(counts.max()) > 255,
        added,
    )


def _straightened(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Counts less ``slope * |qb|``, the slope of each row 0, 1 or 2: whichever leaves the smallest rest."""
    if int(counts.max()) <= 127:
        return counts, torch.zeros(counts.shape[:-1], dtype=torch.int32)
    line = torch.arange(CODES, dtype=torch.int32)
    rests = torch.stack([counts - slope * line for slope in range(3)])
    slopes = rests.abs().amax(-1).argmin(0)
    return torch.gather(rests, 0, slopes[None, ..., None].expand(1, *counts.shape))[0], slopes


class Product(ctypes.Structure):
    """The kernels' argument, field by field as in the source."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("qa", "sa", "qb", "sb", "levels", "tables", "slopes", "masks")
        ),
        *((name, ctypes.c_void_p) for name in ("factors", "counts", "y")),
        *((name, ctypes.c_int) for name in ("N", "M", "D", "C", "chunk", "per_chunk", "num_masks")),
        *((name, ctypes.c_int) for name in ("shared_b", "level_b", "level_n", "level_c", "outputs")),
    ]


@dataclass(frozen=True)
class Plan:
    """How a product is launched."""

    rows: int  # of a block
    direct: bool  # whether a block adds the chunks itself
    threads: int
    min_blocks: int  # of a multiprocessor
    outputs: int  # of a block
    grid: tuple[int, int, int]
    combine_grid: tuple[int, int, int] | None
    count_bytes: int  # of the workspace

    @property
    def slice(self) -> int:
        """Inner dimensions of a table."""
        return slice_of(self.rows)

    @property
    def shared_bytes(self) -> int:
        """Tables, and the slopes of each lane's dimensions."""
        return _shared_bytes(self.rows)

    def defines(self, tables: Tables, aligned: bool) -> _nvrtc.Defines:
        """The source's macros."""
        return (
            ("ROWS", self.rows),
            ("ADDED", tables.added),
            ("LINEAR", int(tables.linear)),
            ("WIDE", int(tables.wide and self.rows < 8)),  # 64 dimensions count to 2**14 at most
            ("DIRECT", int(self.direct)),
            ("ALIGNED", int(aligned)),
            ("THREADS", self.threads),
            ("MIN_BLOCKS", self.min_blocks),
        )


def slice_of(rows: int) -> int:
    """Inner dimensions of a table for blocks of so many rows."""
    return 64 if rows == 8 else 128


def _shared_bytes(rows: int) -> int:
    return min(rows, 4) * _PLANE_BYTES + 128 * rows


def plan(
    batch: int, rows: int, outputs: int, chunks: int, chunk: int, *, multiprocessors: int, shared: int
) -> Plan:
    """Rows of a block by how many there are and what shared memory holds; then blocks for all of the GPU.

    Many rows go through all slices in one block, which adds the chunks itself; few leave a slice to a block.
    """
    if (
        shared >= _shared_bytes(8)
        and cdiv(rows, 8) * batch * cdiv(outputs, _DIRECT_OUTPUTS) >= multiprocessors
    ):
        return _direct_plan(batch, rows, outputs, chunk, multiprocessors)
    of_block = 1 if rows == 1 else 4 if rows > 2 and shared >= _shared_bytes(4) else 2
    threads, min_blocks = (512, 1) if of_block == 4 else (256, 4 if of_block == 1 else 3)
    resident = multiprocessors * max(1, min(min_blocks, shared // _shared_bytes(of_block)))
    groups, slices = cdiv(rows, of_block), chunks * cdiv(chunk, slice_of(of_block))
    per_block, splits = _split(outputs, max(1, resident // (groups * batch * slices)))
    combine = (cdiv(outputs, 32), rows, batch)
    grid, count_bytes = (groups, splits * slices, batch), 4 * batch * slices * rows * outputs
    return Plan(of_block, False, threads, min_blocks, per_block, grid, combine, count_bytes)


def _direct_plan(batch: int, rows: int, outputs: int, chunk: int, multiprocessors: int) -> Plan:
    groups = cdiv(rows, 8) * batch
    per_block, splits = _split(outputs, max(cdiv(outputs, _DIRECT_OUTPUTS), cdiv(multiprocessors, groups)))
    count_bytes = 4 * batch * rows * outputs if chunk > slice_of(8) else 0
    return Plan(8, True, 512, 1, per_block, (cdiv(rows, 8), splits, batch), None, count_bytes)


def _split(outputs: int, parts: int) -> tuple[int, int]:
    """Outputs of a block, in whole tiles, and the number of blocks."""
    per_block = cdiv(cdiv(outputs, parts), _TILE) * _TILE
    return per_block, cdiv(outputs, per_block)


def product_of(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, plan: Plan, chunk: int
) -> tuple[Product, Tensor | None]:
    """The kernels' argument for qa, sa, qb, sb and y, all contiguous; and the workspace that it points to."""
    qa, sa, qb, sb, y = operands
    counts = None
    if plan.count_bytes:
        counts = torch.empty(plan.count_bytes // 4, dtype=torch.int32, device=qa.device)
    strides = [0, 0, 0]
    if level_index is not None:
        strides = [s if n > 1 else 0 for n, s in zip(level_index.shape, level_index.stride(), strict=True)]
    pointers = [None if x is None else x.data_ptr() for x in (qa, sa, qb, sb, level_index)]
    pointers += [x.data_ptr() for x in (tables.bytes, tables.slopes, tables.masks, tables.factors)]
    pointers += [None if counts is None else counts.data_ptr(), y.data_ptr()]
    sizes = (qa.shape[1], qb.shape[1], qa.shape[2], sa.shape[2], chunk, cdiv(chunk, plan.slice))
    return Product(
        *pointers, *sizes, tables.bytes.shape[1], int(qb.shape[0] == 1), *strides, plan.outputs
    ), counts


def is_aligned(qb: Tensor, chunk: int) -> bool:
    """Whether four codes can be read at once."""
    return qb.shape[-1] % 4 == 0 and chunk % 4 == 0 and qb.data_ptr() % 4 == 0


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """y of contiguous qa, sa, qb and sb on a GPU, on its current stream."""
    qa, sa, qb, sb = operands
    gpu = describe(qa.device)
    for batch, rows in _parts(qa, qb, sa.shape[2], chunk, gpu):
        own_b = slice(None) if qb.shape[0] == 1 else batch
        part = (qa[batch, rows], sa[batch, rows], qb[own_b], sb[own_b], y[batch, rows])
        how = _plan(part[0], qb, sa.shape[2], chunk, gpu)
        index = None
        if level_index is not None:
            of_batch = batch if level_index.shape[0] > 1 else slice(None)
            index = level_index[of_batch, rows if level_index.shape[1] > 1 else slice(None)]
        argument, _counts = product_of(part, tables, index, how, chunk)
        with on_device_of(qa):
            defines = how.defines(tables, is_aligned(part[2], chunk))
            main = _nvrtc.kernel(SOURCE, "stochastic_lookup", defines, qa.device.index, how.shared_bytes)
            _nvrtc.launch(main, how.grid, how.threads, how.shared_bytes, argument)
            if how.combine_grid is not None:
                combine = _nvrtc.kernel(SOURCE, "stochastic_combine", defines, qa.device.index, 0)
                _nvrtc.launch(combine, how.combine_grid, 256, 0, argument)


def _plan(qa: Tensor, qb: Tensor, chunks: int, chunk: int, gpu: Device) -> Plan:
    B, N, M = qa.shape[0], qa.shape[1], qb.shape[1]
    shared = gpu.shared_memory_bytes
    return plan(B, N, M, chunks, chunk, multiprocessors=gpu.multiprocessors, shared=shared)


def _parts(qa: Tensor, qb: Tensor, chunks: int, chunk: int, gpu: Device) -> list[tuple[slice, slice]]:
    """Batches and rows whose counts fit the workspace; all at once where they do."""
    B, N = qa.shape[:2]
    whole = _plan(qa, qb, chunks, chunk, gpu).count_bytes
    if whole <= _WORKSPACE_BYTES:
        return [(slice(None), slice(None))]
    of_entry = whole // B
    if of_entry <= _WORKSPACE_BYTES:
        entries = _WORKSPACE_BYTES // of_entry
        return [(slice(b, min(b + entries, B)), slice(None)) for b in range(0, B, entries)]
    rows = max(8, _WORKSPACE_BYTES * N // of_entry // 8 * 8)
    return [(slice(b, b + 1), slice(n, min(n + rows, N))) for b in range(B) for n in range(0, N, rows)]
