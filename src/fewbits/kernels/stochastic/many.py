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
from fewbits.kernels.launch.grid import MAX_PROGRAMS
from fewbits.kernels.launch.jit import cdiv, on_device_of
from fewbits.kernels.stochastic.lookup import Tables
from fewbits.kernels.stochastic.parts import index_of, parts_of, strides_of

SOURCE = "stochastic/many.cu"
ROWS = 16  # of a block
_SLICE = 16  # inner dimensions of a table
SHARED_BYTES = 4 * 256 * 128 + 256 * 144  # two tables of two planes, and rows that have arrived
_WORKSPACE_BYTES = 2**28  # of places in tables

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

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("qa", "sa", "qb", "sb", "levels", "tables", "slopes", "masks", "factors")
        ),
        *((name, ctypes.c_void_p) for name in ("weights", "places", "signs", "linear", "y")),
        *((name, ctypes.c_int) for name in ("N", "M", "D", "C", "chunk", "per_chunk", "num_masks")),
        *((name, ctypes.c_int) for name in ("shared_b", "level_b", "level_n", "level_c", "quads")),
    ]


@dataclass(frozen=True)
class Plan:
    """How a product is launched."""

    tiles: int  # of 8 outputs, a warp's
    threads: int
    slices: int
    quads: int  # of tiles, in whole blocks
    grid: tuple[int, int, int]

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

    def grid_b(self, batch: int) -> tuple[int, int, int]:
        """Blocks of stochastic_pack_b."""
        return cdiv(self.slices, 8), self.quads, batch


def plan(
    batch: int, rows: int, outputs: int, chunks: int, chunk: int, *, multiprocessors: int, threads: int = 512
) -> Plan:
    """As many outputs a block as make the least time in whole rounds of the GPU."""
    groups, of_tile = cdiv(rows, ROWS), threads // 32 * 8  # outputs of a block that has one tile a warp

    def planned(tiles: int) -> Plan:
        grid = (groups, cdiv(outputs, of_tile * tiles), batch)
        return Plan(tiles, threads, chunks * cdiv(chunk, _SLICE), grid[1] * of_tile * tiles // 32, grid)

    return min((planned(tiles) for tiles in (16, 12, 8, 4)), key=lambda plan: clocks(plan, multiprocessors))


def clocks(plan: Plan, multiprocessors: int) -> int:
    """About what a plan takes: whole rounds of the GPU."""
    x, y, z = plan.grid
    return cdiv(x * y * z, multiprocessors) * plan.slices * (plan.tiles * _CLOCKS_OF_TILE + _CLOCKS_OF_TABLE)


def workspace(plan: Plan, batch_b: int, device: torch.device) -> Workspace:
    """Memory for a plan."""
    groups, _, batch = plan.grid
    weights = torch.empty(batch_b, plan.slices, plan.quads, 128, dtype=torch.int32, device=device)
    places = torch.empty(batch, groups, plan.slices, 256, dtype=torch.int32, device=device)
    signs = torch.empty(batch, groups, plan.slices, 64, dtype=torch.uint8, device=device)
    linear = torch.empty(batch, groups, plan.slices, 256, dtype=torch.int8, device=device)
    return Workspace(weights, places, signs, linear)


def product_of(
    operands: Sequence[Tensor],
    tables: Tables,
    level_index: Tensor | None,
    plan: Plan,
    chunk: int,
    memory: Workspace,
) -> Product:
    """The kernels' argument for qa, sa, qb, sb as (B or 1, C, M), and y, all contiguous."""
    qa, sa, qb, sb, y = operands
    pointers = [None if x is None else x.data_ptr() for x in (qa, sa, qb, sb, level_index)]
    pointers += [x.data_ptr() for x in (tables.bytes, tables.slopes, tables.masks, tables.factors)]
    pointers += [x.data_ptr() for x in (*memory, y)]
    sizes = (qa.shape[1], qb.shape[1], qa.shape[2], sa.shape[2], chunk, cdiv(chunk, _SLICE))
    return Product(
        *pointers, *sizes, tables.bytes.shape[1], int(qb.shape[0] == 1), *strides_of(level_index), plan.quads
    )


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """y of contiguous qa, sa, qb and sb on a GPU, on its current stream.

    qa is (B, N, D), sa (B, N, C), qb (B or 1, M, D), sb (B or 1, M, C), y (B, N, M); ``level_index`` is None
    or (B or 1, N or 1, C or 1).
    """
    qa, sa, qb, sb = operands
    (B, N), (C, M) = qa.shape[:2], (sa.shape[2], qb.shape[1])
    sb = sb.transpose(1, 2).contiguous()
    multiprocessors = describe(qa.device).multiprocessors
    for batch, rows in _parts(B, N, C * cdiv(chunk, _SLICE)):
        own_b = slice(None) if qb.shape[0] == 1 else batch
        part = (qa[batch, rows], sa[batch, rows], qb[own_b], sb[own_b], y[batch, rows])
        how = plan(part[0].shape[0], part[0].shape[1], M, C, chunk, multiprocessors=multiprocessors)
        memory = workspace(how, part[2].shape[0], qa.device)
        argument = product_of(part, tables, index_of(level_index, batch, rows), how, chunk, memory)
        with on_device_of(qa):
            defines, device = how.defines(tables), qa.device.index
            for name, grid in (
                ("stochastic_pack_b", how.grid_b(part[2].shape[0])),
                ("stochastic_pack_a", how.grid_a),
            ):
                nvrtc.launch(nvrtc.kernel(SOURCE, name, defines, device, 0), grid, 256, 0, argument)
            main = nvrtc.kernel(SOURCE, "stochastic_many", defines, device, SHARED_BYTES)
            nvrtc.launch(main, how.grid, how.threads, SHARED_BYTES, argument)


def _parts(B: int, N: int, slices: int) -> list[tuple[slice, slice]]:
    """Batches and rows whose places fit the workspace; all at once where they do."""
    of_group = slices * 4 * ROWS * _SLICE
    groups = max(1, min(_WORKSPACE_BYTES // of_group, MAX_PROGRAMS[1]))  # at once
    return parts_of(B, N, ROWS, groups)
