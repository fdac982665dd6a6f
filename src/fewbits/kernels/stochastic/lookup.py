"""Prepared stochastic operands by lookups in shared memory: tables and launches of lookup.cu.

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
from fewbits.formats.table_cache import keep_tables
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv, on_device_of
from fewbits.kernels.stochastic.parts import index_of, parts_of, strides_of

SOURCE = "stochastic/lookup.cu"
CODES = 128  # magnitudes of codes, 0 ... 127
SLICE = 128  # inner dimensions of a table
_PLANE_BYTES = 256 * 32 * 4
_SLOPE_BYTES = 36 * 4
_TILE = 16
_TILE_BYTES = _TILE * SLICE
_RESERVED_BYTES = 1024  # of shared memory for each block
_OUTPUTS_OF_BUILDING = 500  # that a block could serve in the time it takes to build its tables
_WORKSPACE = 2**26  # counts
_WIDTH_BYTES = 33 * 4  # of 32 outputs' terms in shared memory
_MOST_AT_ONCE = 128  # chunks of a block that adds: four for each half of 16 warps
_COMBINE_BYTES = 46 * 1024  # of such a block at most, and 2 KiB of its own: more than 48 must be asked for
_COMBINE, _ADD_ROW = "stochastic_combine", "stochastic_add_row"
_ADDERS = 256  # threads of stochastic_add_row
_KINDS = {torch.float32: 1, torch.bfloat16: 2}  # of values and results, as the source numbers them
_EARLY = (9, 0)  # the first GPUs that start a kernel's blocks before the one before has ended


class Tables(NamedTuple):
    """What the kernel looks up; see the text of lookup.cu."""

    bytes: Tensor  # (levels, masks, 128, 128) uint8: 128 / added + T - slope * |qb|
    slopes: Tensor  # (levels, masks, 128) int8
    masks: Tensor  # (chunk,) uint8
    factors: Tensor  # (levels,) float32
    linear: bool  # whether a slope is not 0
    wide: bool  # whether a count of 256 occurs
    added: int  # bytes whose sum always fits a byte: 1 to 4


@keep_tables(maxsize=256)
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
    """Counts less ``slope * |qb|``, the slope of each row 0, 1 or 2: the least whose rest fits 8 bits."""
    line = torch.arange(CODES, dtype=torch.int32)
    rests = torch.stack([counts - slope * line for slope in range(3)])
    slopes = (rests.abs().amax(-1) <= 127).int().argmax(0).int()  # the first; 0 where none fits
    return torch.gather(rests, 0, slopes.long()[None, ..., None].expand(1, *counts.shape))[0], slopes


class Product(ctypes.Structure):
    """The kernels' argument, field by field as in the source."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("qa", "smooth", "sa", "qb", "sb", "levels", "tables", "slopes", "masks")
        ),
        *((name, ctypes.c_void_p) for name in ("factors", "counts", "y")),
        *((name, ctypes.c_int) for name in ("N", "M", "D", "C", "chunk", "per_chunk", "num_masks")),
        *(
            (name, ctypes.c_int)
            for name in (
                "shared_b",
                "level_b",
                "level_n",
                "level_c",
                "outputs",
                "splits",
                "row_groups",
                "items",
                "stride",
                "rows_added",
            )
        ),
        ("at_once", ctypes.c_int),
        ("max_code", ctypes.c_float),
    ]


class Rows(NamedTuple):
    """The operand a: codes that are there, or values to be quantised, each slice a chunk."""

    values: Tensor  # (B, N, D): int8 codes, or what a key of _KINDS says
    scales: Tensor  # (B, N, C): read, or written
    smooth: Tensor | None = None  # (D,) float32: values are divided by it first
    max_code: int = 127

    def part(self, batch: slice, rows: slice) -> Rows:
        """Some of the rows."""
        return self._replace(values=self.values[batch, rows], scales=self.scales[batch, rows])


class Combine(NamedTuple):
    """How the slices of a product are added."""

    name: str  # of the kernel
    at_once: int  # chunks whose terms are in shared memory; 0: few chunks of many slices
    rows_added: int  # of a block; outputs for stochastic_add_row
    rows: int  # of them at a time
    threads: int
    shared_bytes: int
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class LookupTiling:
    """How a product is launched."""

    rows: int  # of a block
    stages: int  # tiles that a warp has in flight
    threads: int
    min_blocks: int  # of a multiprocessor
    ring: int
    outputs: int  # of a table
    splits: int  # of all outputs into such parts
    row_groups: int
    items: int  # tables
    slices: int
    grid: tuple[int, int, int]
    combine: Combine | None  # None: there is but one slice
    counts: int  # of the workspace

    @property
    def shared_bytes(self) -> int:
        """Tables, and the slopes of each row and of none."""
        shape = Shape(self.stages, self.threads, self.min_blocks, self.ring)
        return shape.bytes(self.rows)

    def defines(self, tables: Tables, aligned: int, rows: Rows, out: torch.dtype) -> nvrtc.Defines:
        """The source's macros."""
        return (
            ("X", _KINDS.get(rows.values.dtype, 0)),
            ("SMOOTH", int(rows.smooth is not None)),
            ("OUT", _KINDS[out]),
            ("ROWS", self.rows),
            ("STAGES", self.stages),
            ("MIDDLE", 128 // tables.added),
            ("LINEAR", int(tables.linear)),
            ("WIDE", int(tables.wide)),
            ("ONLY", int(self.combine is None)),
            ("COMBINED", self.combine.rows if self.combine else 1),
            ("ALIGNED", aligned),
            ("RING", int(self.ring > 0 and aligned == 16)),
            ("THREADS", self.threads),
            ("MIN_BLOCKS", self.min_blocks),
        )


def _shared_bytes(rows: int) -> int:
    return rows * (_PLANE_BYTES + 4 * SLICE + 2 * 4) + (rows + 1) * _SLOPE_BYTES


class Shape(NamedTuple):
    """What a block is."""

    stages: int
    threads: int
    min_blocks: int
    ring: int = 0  # 1: weights come by way of shared memory, where their rows are aligned

    def bytes(self, rows: int) -> int:
        """Of shared memory."""
        return _shared_bytes(rows) + self.ring * self.stages * self.threads * _TILE_BYTES // 32


# By the rows of a block, measured on an H200; the second where shared memory does not hold the first.
SHAPES = {
    1: (Shape(2, 256, 2, 1), Shape(4, 256, 2)),
    2: (Shape(3, 512, 1, 1), Shape(2, 256, 2)),
    4: (Shape(2, 512, 1, 1), Shape(3, 512, 1)),
}


@lru_cache(maxsize=4096)
def plan(
    batch: int,
    rows: int,
    outputs: int,
    chunks: int,
    chunk: int,
    *,
    multiprocessors: int,
    shared: int,
    wide: bool = False,
) -> LookupTiling:
    """Rows of a block by how many there are and what shared memory holds; then blocks for all of the GPU."""
    of_block = 1 if rows == 1 else 4 if rows > 2 and shared >= _shared_bytes(4) else 2
    slices = chunks * cdiv(chunk, SLICE)
    first, shape = SHAPES[of_block]
    if first.min_blocks * (first.bytes(of_block) + _RESERVED_BYTES) <= shared + _RESERVED_BYTES:
        shape = first
    resident = multiprocessors * max(1, min(shape.min_blocks, shared // shape.bytes(of_block)))
    row_groups = cdiv(rows, of_block)
    of_table, splits = _split(outputs, row_groups * batch * slices, resident)
    items = row_groups * batch * slices * splits
    combine = None
    if slices > 1 and rows == 1 and slices == chunks:
        blocks = resident // multiprocessors
        left = shared + _RESERVED_BYTES - blocks * (shape.bytes(1) + _RESERVED_BYTES) - _RESERVED_BYTES
        combine = _add_row(
            batch, outputs, chunks, multiprocessors=multiprocessors, left=left, count_bytes=4 if wide else 2
        )
    elif slices > 1:
        combine = _combine(batch, rows, outputs, chunks, slices // chunks, resident=2 * multiprocessors)
    counts = 0 if slices == 1 else batch * slices * rows * _stride(outputs)
    grid = (min(items, resident), 1, 1)
    return LookupTiling(of_block, *shape, of_table, splits, row_groups, items, slices, grid, combine, counts)


def _add_row(
    batch: int, outputs: int, chunks: int, *, multiprocessors: int, left: int, count_bytes: int
) -> Combine:
    """A block for each multiprocessor, in the shared memory that is left beside the blocks that look up."""
    own = min(_ADDERS, cdiv(cdiv(outputs * batch, multiprocessors), _TILE) * _TILE)

    def shared_bytes(at_once: int) -> int:
        return at_once * (own * count_bytes + 16) + 4 * (own * (at_once | 1) + 2 * at_once)

    parts = next(n for n in range(1, chunks + 1) if n == chunks or shared_bytes(cdiv(chunks, n)) <= left)
    at_once = cdiv(chunks, parts)
    grid = (cdiv(outputs, own), batch, 1)
    return Combine(_ADD_ROW, at_once, own, 1, _ADDERS, shared_bytes(at_once), grid)


def _combine(batch: int, rows: int, outputs: int, chunks: int, per_chunk: int, *, resident: int) -> Combine:
    """Half a warp has four chunks, or some slices of one; as many warps as rows at a time, which add."""
    tiles, together = batch * cdiv(outputs, 32), min(rows, 2)
    if per_chunk > 1 and chunks < 8:
        warps = min(16, max(together, cdiv(per_chunk, 4)))
        grid = (cdiv(outputs, 32), cdiv(rows, together), batch)
        return Combine(
            _COMBINE, 0, together, together, 32 * warps, 2 * together * 2 * warps * _WIDTH_BYTES, grid
        )
    added = min(rows, next((n for n in (16, 8, 4) if tiles * cdiv(rows, n) >= resident), 2))
    arrays = 1 + together  # arrays of at_once lines: scales, and terms of each row
    most = min(_MOST_AT_ONCE, _COMBINE_BYTES // (arrays * _WIDTH_BYTES))
    if chunks > most or added > together:  # a second one of each, for what comes next
        arrays, most = 2 * arrays, min(most, _COMBINE_BYTES // (2 * arrays * _WIDTH_BYTES))
    at_once = cdiv(chunks, cdiv(chunks, most))
    warps = max(together, cdiv(at_once, 8))
    grid = (cdiv(outputs, 32), cdiv(rows, added), batch)
    return Combine(_COMBINE, at_once, added, together, 32 * warps, at_once * arrays * _WIDTH_BYTES, grid)


def _stride(outputs: int) -> int:
    return cdiv(outputs, _TILE) * _TILE


def _split(outputs: int, blocks: int, resident: int) -> tuple[int, int]:
    """Outputs of a block, in whole tiles, and into how many parts that splits them: the least time."""

    def time(parts: int) -> int:
        return cdiv(blocks * parts, resident) * (cdiv(outputs, parts) + _OUTPUTS_OF_BUILDING)

    parts = min(range(1, min(cdiv(outputs, _TILE), resident) + 1), key=time)
    per_block = cdiv(cdiv(outputs, parts), _TILE) * _TILE
    return per_block, cdiv(outputs, per_block)


def product_of(
    a: Rows,
    b: Sequence[Tensor],
    y: Tensor,
    tables: Tables,
    level_index: Tensor | None,
    plan: LookupTiling,
    chunk: int,
) -> tuple[Product, Tensor | None]:
    """The kernels' argument for a, qb and sb, and y, all contiguous; and the workspace that it points to.

    b holds qb (B or 1, M, D) and sb (B or 1, M, C); y is (B, N, M).
    """
    (N, D), (M, C), device = a.values.shape[1:], b[1].shape[1:], y.device
    counts = None
    if plan.counts:
        counts = torch.empty(plan.counts, dtype=torch.int32 if tables.wide else torch.int16, device=device)
    pointed = (a.values, a.smooth, a.scales, *b, level_index, *tables[:4], counts, y)
    sizes = (N, M, D, C, chunk, cdiv(chunk, SLICE), tables.bytes.shape[1], int(b[0].shape[0] == 1))
    of_plan = (plan.outputs, plan.splits, plan.row_groups, plan.items, _stride(M))
    of_combine = (plan.combine.rows_added, plan.combine.at_once) if plan.combine else (0, 0)
    return Product(
        *(None if x is None else x.data_ptr() for x in pointed),
        *sizes,
        *strides_of(level_index),
        *of_plan,
        *of_combine,
        a.max_code,
    ), counts


def alignment(qb: Tensor, chunk: int) -> int:
    """How many codes can be read at once: 16, 4 or 1.

    qb is (B or 1, M, D) int8.
    """
    places = (qb.shape[-1], chunk, qb.data_ptr())
    return next(n for n in (16, 4, 1) if all(x % n == 0 for x in places))


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """A `Launch`."""
    qa, sa, qb, sb = operands
    launch_rows(Rows(qa, sa), (qb, sb), tables, level_index, chunk, y)


def launch_rows(
    a: Rows, b: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """y (B, N, M) in float32 or bfloat16 of a and contiguous qb and sb on a GPU, on its current stream."""
    gpu, C = describe(y.device), a.scales.shape[2]
    parts = _parts(y, C, chunk, gpu)
    if len(parts) == 1:
        _launch_part(a, b, tables, level_index, chunk, y, gpu)
        return
    for batch, rows in parts:
        own_b = slice(None) if b[0].shape[0] == 1 else batch
        index, own = index_of(level_index, batch, rows), [x[own_b] for x in b]
        _launch_part(a.part(batch, rows), own, tables, index, chunk, y[batch, rows], gpu)


def _launch_part(
    a: Rows, b: Sequence[Tensor], tables: Tables, index: Tensor | None, chunk: int, y: Tensor, gpu: Device
) -> None:
    how = _plan(y, a.scales.shape[2], chunk, gpu, wide=tables.wide)
    early = gpu.capability is not None and gpu.capability >= _EARLY
    argument, _counts = product_of(a, b, y, tables, index, how, chunk)
    defines = how.defines(tables, alignment(b[0], chunk), a, y.dtype)
    beside = how.combine is not None and how.combine.name == _ADD_ROW
    with on_device_of(y):
        device, bytes_of_block = y.device.index, how.shared_bytes
        main = nvrtc.kernel(SOURCE, "stochastic_lookup", defines, device, bytes_of_block, beside=beside)
        nvrtc.launch(main, how.grid, how.threads, bytes_of_block, argument, early=early)
        if how.combine is not None:
            name, *_, threads, shared, grid = how.combine
            combine = nvrtc.kernel(SOURCE, name, defines, device, shared, beside=beside)
            nvrtc.launch(combine, grid, threads, shared, argument, early=early)


def _plan(y: Tensor, chunks: int, chunk: int, gpu: Device, *, wide: bool = False) -> LookupTiling:
    B, N, M = y.shape
    multiprocessors, shared = gpu.multiprocessors, gpu.shared_memory_bytes
    return plan(B, N, M, chunks, chunk, multiprocessors=multiprocessors, shared=shared, wide=wide)


def _parts(y: Tensor, chunks: int, chunk: int, gpu: Device) -> list[tuple[slice, slice]]:
    """Batches and rows whose counts fit the workspace; all at once where they do."""
    B, N = y.shape[:2]
    of_group = min(N, 8)  # rows
    counts = _plan(y, chunks, chunk, gpu).counts // (B * N) * of_group
    return parts_of(B, N, of_group, max(1, _WORKSPACE // max(1, counts)))
