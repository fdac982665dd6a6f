"""Prepared stochastic operands with many rows: plans and launches of many.cu.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.device import describe
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv
from fewbits.kernels.stochastic.lookup import Tables
from fewbits.kernels.stochastic.row_blocks import (
    SLICE,
    BlockPlan,
    Part,
    argument_fields,
    argument_values,
    cut,
    launch_part,
)

SOURCE = "stochastic/many.cu"
ROWS = 16  # of a block
SHARED_BYTES = 4 * 256 * 128 + 256 * 144  # two tables of two planes, and rows that have arrived

# What a block takes for a slice, in clocks of an H200: its 16 warps' tiles, and the tables and y.
_CLOCKS_OF_TILE, _CLOCKS_OF_TABLE = 380, 2380


class Workspace(NamedTuple):
    """What the kernels hand to one another."""

    weights: Tensor  # (B or 1, slices, quads, 32, 4) int32: codes in the order of the lanes
    places: Tensor  # (B, row groups, slices, 256) int32: rows of the tables
    signs: Tensor  # (B, row groups, slices, 64) uint8: of a's codes, 4 at a time
    linear: Tensor  # (B, row groups, slices, 256) int8: slopes


class Product(ctypes.Structure):
    """The kernels' argument, field by field as in the source."""

    _fields_ = argument_fields(("tables", "slopes"), ("weights", "places", "signs", "linear"), ("quads",))


@dataclass(frozen=True)
class ManyTiling(BlockPlan):
    """How a product is launched."""

    def defines(self, tables: Tables) -> nvrtc.Defines:
        """The source's macros."""
        return (
            ("TILES", self.tiles),
            ("LINEAR", int(tables.linear)),
            ("MIDDLE", 128 // tables.added),
            ("THREADS", self.threads),
        )

    @property
    def grid_a(self) -> tuple[int, int, int]:
        """Blocks of stochastic_pack_a."""
        return cdiv(self.slices, 4), self.grid[0], self.grid[2]


def plan(
    batch: int, rows: int, outputs: int, chunks: int, chunk: int, *, multiprocessors: int, threads: int = 512
) -> ManyTiling:
    """As many outputs a block as make the least time in whole rounds of the GPU."""
    groups, of_tile = cdiv(rows, ROWS), threads // 32 * 8  # outputs of a block that has one tile a warp

    def planned(tiles: int) -> ManyTiling:
        grid = (groups, cdiv(outputs, of_tile * tiles), batch)
        return ManyTiling(tiles, threads, chunks * cdiv(chunk, SLICE), grid[1] * of_tile * tiles // 32, grid)

    return min((planned(tiles) for tiles in (16, 12, 8, 4)), key=lambda plan: clocks(plan, multiprocessors))


def clocks(plan: ManyTiling, multiprocessors: int) -> int:
    """About what a plan takes: whole rounds of the GPU."""
    x, y, z = plan.grid
    return cdiv(x * y * z, multiprocessors) * plan.slices * (plan.tiles * _CLOCKS_OF_TILE + _CLOCKS_OF_TABLE)


def workspace(plan: ManyTiling, batch_b: int, device: torch.device) -> Workspace:
    """Memory for a plan."""
    groups, _, batch = plan.grid
    weights = torch.empty(batch_b, plan.slices, plan.quads, 128, dtype=torch.int32, device=device)
    places = torch.empty(batch, groups, plan.slices, 256, dtype=torch.int32, device=device)
    signs = torch.empty(batch, groups, plan.slices, 64, dtype=torch.uint8, device=device)
    linear = torch.empty(batch, groups, plan.slices, 256, dtype=torch.int8, device=device)
    return Workspace(weights, places, signs, linear)


def product_of(part: Part, tables: Tables, plan: ManyTiling, chunk: int, memory: Workspace) -> Product:
    """The kernels' argument."""
    values = argument_values(part, tables[:4], memory, chunk, cdiv(chunk, SLICE), tables.bytes.shape[1])
    return Product(*values, plan.quads)


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """A `Launch`."""
    gpu = describe(y.device)
    for part in cut(operands, level_index, chunk, y, ROWS):
        (B, N, M), C = part.y.shape, part.sa.shape[2]
        how = plan(B, N, M, C, chunk, multiprocessors=gpu.multiprocessors)
        memory = workspace(how, part.qb.shape[0], y.device)
        argument = product_of(part, tables, how, chunk, memory)
        launch_part(SOURCE, "stochastic_many", how, how.defines(tables), SHARED_BYTES, part, argument)
