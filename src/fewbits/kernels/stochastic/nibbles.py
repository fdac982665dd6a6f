"""Prepared stochastic operands with many rows: tables of 4 bits and launches of nibbles.cu.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.device import describe
from fewbits.formats.stochastic import Stochastic
from fewbits.formats.streams import product_tables
from fewbits.formats.table_cache import keep_tables
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.stochastic.row_blocks import (
    SLICE,
    BlockPlan,
    Part,
    argument_fields,
    argument_values,
    cut,
    launch_part,
)

SOURCE = "stochastic/nibbles.cu"
ROWS = 32  # of a block
LONGEST_CHUNK = 2**16  # inner dimensions whose sums in 64ths fit 32 bits
_CODES = 128  # magnitudes of codes, 0 ... 127
_TABLES_BYTES = 2 * 256 * 32 * 4  # of two planes
_ARRIVED_BYTES = ROWS * SLICE * 64  # rows of tables on their way, of two planes
_LARGEST = 7  # of what is left of a count beside its line
_SHIFTS = (1, 2, 4, 6)  # of a magnitude, for each slope
# Of the first two slopes and the last; the third follows from them. The small ones suffice nearly always.
_COMBINATIONS = sorted(product(range(4), range(-4, 7), range(-5, 6)), key=lambda g: abs(g[1]) + abs(g[2]))

# What a block takes for a slice, in clocks of an H200, by its threads and tiles a warp.
_SHAPES = {(256, 16): 5560, (512, 4): 4100, (256, 4): 3200}


class Tables(NamedTuple):
    """What the kernel looks up; see the text of nibbles.cu."""

    nibbles: Tensor  # (levels, masks, 256, 64) uint8: by code of a, 8 magnitudes in 4 bytes
    slopes: Tensor  # (levels, masks, 256, 4) int8: coefficients
    masks: Tensor  # (chunk,) uint8
    factors: Tensor  # (levels,) float32


@keep_tables(maxsize=256)
def tables_of(
    options: Stochastic, levels: tuple[int, ...], chunk: int, device: torch.device, *, of_b: bool = False
) -> Tables | None:
    """The tables of a product; None if a count is too far from a line of four slopes for 3 bits.

    With ``of_b`` they are of b's codes, to be looked up by a's.
    """
    masks = options.masks(chunk)
    distinct = tuple(dict.fromkeys(masks))
    fitted = [_fitted(options, length, distinct, of_b) for length in levels]
    if chunk > LONGEST_CHUNK or any(fit is None for fit in fitted):
        return None
    position = {mask: i for i, mask in enumerate(distinct)}
    index = torch.tensor([position[mask] for mask in masks], dtype=torch.uint8)
    factors = [options.max_code**2 / length if length else 0.0 for length in levels]
    return Tables(
        torch.stack([fit[0] for fit in fitted if fit is not None]).to(device),
        torch.stack([fit[1] for fit in fitted if fit is not None]).to(device),
        index.to(device),
        torch.tensor(factors, dtype=torch.float64).float().to(device),
    )


tables_of_b = partial(tables_of, of_b=True)


@keep_tables(maxsize=256)
def _fitted(
    options: Stochastic, length: int, masks: tuple[int, ...], of_b: bool
) -> tuple[Tensor, Tensor] | None:
    """Of streams of one length: nibbles (masks, 256, 64) and slopes (masks, 256, 4)."""
    codes = options.max_code + 1
    counts = torch.zeros(len(masks), _CODES, _CODES, dtype=torch.int16)
    if length:
        streams = options.with_length(length).streams
        counts[:, :codes, :codes] = product_tables(streams, masks, torch.device("cpu"))
    if of_b:
        counts = counts.mT
    slopes = _slopes_of(counts[:, :, :codes])
    if slopes is None:
        return None
    line = (slopes[..., None] * _steps()).sum(2)
    rest = (2 * counts - line + _LARGEST) // 2
    rest[:, :, codes:] = 0
    rest = rest.view(*rest.shape[:2], -1, 2, 4)  # words, halves of a byte, 4 bytes
    nibbles = (rest[..., 0, :] + 16 * rest[..., 1, :]).to(torch.uint8).view(len(masks), _CODES, 64)
    steps = (slopes * 2 ** (max(_SHIFTS) - torch.tensor(_SHIFTS))).to(torch.int8)
    # Codes of a as bytes: the negative ones after 127, and -128, which there is not.
    negative = 0x77 - nibbles
    nibbles = torch.cat([nibbles, negative[:, :1], negative[:, 1:].flip(1)], 1)
    return nibbles, torch.cat([steps, -steps[:, :1], -steps[:, 1:].flip(1)], 1)


def _slopes_of(counts: Tensor) -> Tensor | None:
    """Slopes (masks, codes of a, 4) whose line is within 7/2 of each count; None if a row has none."""
    rows, last = 2 * rows_of(counts), counts.shape[-1] - 1
    steps = _steps()[:, : last + 1]
    slopes, left = torch.zeros(len(rows), 4, dtype=torch.int16), torch.arange(len(rows))
    for first, second, fourth in _COMBINATIONS:
        rest = rows - first * steps[0] - second * steps[1] - fourth * steps[3]
        about = torch.round(rest[:, last] / steps[2, last]).to(torch.int16)
        for third in (about, about + 1, about - 1):
            near = (rest - third[:, None] * steps[2]).abs().amax(1) <= _LARGEST
            fits = near & ((first + second + third + fourth) % 2 == 1) & (third.abs() < 32)
            columns = [torch.full_like(third, slope) for slope in (first, second, fourth)]
            slopes[left[fits]] = torch.stack([columns[0], columns[1], third, columns[2]], 1)[fits]
        missing = (slopes[left] == 0).all(1)
        rows, left = rows[missing], left[missing]
        if not len(left):
            return slopes.view(*counts.shape[:2], 4)
    return None


@keep_tables(maxsize=1)
def _steps() -> Tensor:
    """Twice what a slope of one adds to a count, (4, 128)."""
    return (2 * (torch.arange(_CODES) >> torch.tensor(_SHIFTS)[:, None]) + 1).to(torch.int16)


class Workspace(NamedTuple):
    """What the kernels hand to one another."""

    weights: Tensor  # (B or 1, slices, quads, 32, 4) int32: codes in the order of the lanes
    places: Tensor  # (B, row groups, slices, 512) int32: rows of the tables
    linear: Tensor  # (B, row groups, slices, 2048) int8: slopes


class Product(ctypes.Structure):
    """The kernels' argument, field by field as in the source."""

    _fields_ = argument_fields(("tables", "slopes"), ("weights", "places", "linear"), ("quads",))


@dataclass(frozen=True)
class NibbleTiling(BlockPlan):
    """How a product is launched."""

    keep: bool  # y in shared memory until it is whole
    clocks: int  # that it takes, about

    @property
    def defines(self) -> nvrtc.Defines:
        """The source's macros."""
        return (
            ("TILES", self.tiles),
            ("THREADS", self.threads),
            ("KEEP", int(self.keep)),
        )

    @property
    def shared_bytes(self) -> int:
        """Tables, rows that arrive, and y."""
        of_sums = self.tiles * 8 * self.threads * 4 if self.keep else 0
        return SHARED_BYTES + of_sums

    @property
    def grid_a(self) -> tuple[int, int, int]:
        """Blocks of stochastic_pack_a."""
        return 2 * self.slices, self.grid[0], self.grid[2]


SHARED_BYTES = _TABLES_BYTES + _ARRIVED_BYTES + 2048  # at least: tables, rows on their way and coefficients


def plan(
    batch: int, rows: int, outputs: int, chunks: int, chunk: int, *, multiprocessors: int, shared: int,
    shapes: Mapping[tuple[int, int], int] = MappingProxyType(_SHAPES),
) -> NibbleTiling:  # fmt: skip
    """The blocks that take the least time in whole rounds of the GPU."""
    groups, slices = cdiv(rows, ROWS), chunks * cdiv(chunk, SLICE)

    def planned(threads: int, tiles: int) -> NibbleTiling:
        of_block = threads // 32 * 8 * tiles
        grid = (groups, cdiv(outputs, of_block), batch)
        clocks = cdiv(grid[0] * grid[1] * batch, multiprocessors) * slices * shapes[threads, tiles]
        how = NibbleTiling(tiles, threads, slices, grid[1] * of_block // 32, grid, chunks > 1, clocks)
        return how if how.shared_bytes <= shared else replace(how, keep=False)

    return min((planned(*shape) for shape in shapes), key=lambda plan: plan.clocks)


def workspace(plan: NibbleTiling, batch_b: int, device: torch.device) -> Workspace:
    """Memory for a plan."""
    groups, _, batch = plan.grid
    weights = torch.empty(batch_b, plan.slices, plan.quads, 128, dtype=torch.int32, device=device)
    places = torch.empty(batch, groups, plan.slices, ROWS * SLICE, dtype=torch.int32, device=device)
    linear = torch.empty(batch, groups, plan.slices, 4 * ROWS * SLICE, dtype=torch.int8, device=device)
    return Workspace(weights, places, linear)


def product_of(part: Part, tables: Tables, plan: NibbleTiling, chunk: int, memory: Workspace) -> Product:
    """The kernels' argument."""
    values = argument_values(part, tables, memory, chunk, cdiv(chunk, SLICE), tables.nibbles.shape[1])
    return Product(*values, plan.quads)


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """A `Launch`."""
    gpu = describe(y.device)
    multiprocessors, shared = gpu.multiprocessors, gpu.shared_memory_bytes
    for part in cut(operands, level_index, chunk, y, ROWS):
        (B, N, M), C = part.y.shape, part.sa.shape[2]
        how = plan(B, N, M, C, chunk, multiprocessors=multiprocessors, shared=shared)
        memory = workspace(how, part.qb.shape[0], y.device)
        argument = product_of(part, tables, how, chunk, memory)
        launch_part(SOURCE, "stochastic_nibbles", how, how.defines, how.shared_bytes, part, argument)


def launch_swapped(
    operands: Sequence[Tensor], tables: Tables, level_index: None, chunk: int, y: Tensor
) -> None:
    """The same with the two operands in each other's place, by `tables_of_b`: quicker where a has more rows.

    qa is (B, N, D), sa (B, N, C), qb (B or 1, M, D), sb (B or 1, M, C), y (B, N, M).
    """
    qa, sa, qb, sb = operands
    if len(qb) < len(qa):
        qb, sb = (x.expand(len(qa), -1, -1).contiguous() for x in (qb, sb))
    transposed = y.new_empty(y.shape[0], y.shape[2], y.shape[1])
    launch((qb, sb, qa, sa), tables, level_index, chunk, transposed)
    y.copy_(transposed.mT)
