"""Prepared stochastic operands with many rows: tables of 4 bits and launches of _stochastic_nibbles.cu.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.device import describe
from fewbits.formats.stochastic import Stochastic
from fewbits.formats.streams import product_tables
from fewbits.kernels import _nvrtc
from fewbits.kernels._launch import cdiv, on_device_of

SOURCE = "_stochastic_nibbles.cu"
ROWS = 32  # of a block
LONGEST_CHUNK = 2**17  # inner dimensions whose sums in sixteenths fit 32 bits
_CODES = 128  # magnitudes of codes, 0 ... 127
_SLICE = 16  # inner dimensions of a table
_TABLES_BYTES = 2 * 128 * 32 * 4 * 2  # two tables of two planes
_ARRIVED_BYTES = ROWS * _SLICE * 64  # rows of tables on their way
_WORKSPACE_BYTES = 2**28  # of places in tables
_HALVES = 8  # a count lies within so many halves less one of its line
_SLOPES, _SMALL_SLOPES = range(-1, 6), range(-9, 10)

# What a block takes for a slice, in clocks of an H200: its 16 warps' tiles, and the tables and y.
_CLOCKS_OF_TILE, _CLOCKS_OF_TABLE = 426, 3670


class Tables(NamedTuple):
    """What the kernel looks up; see the text of _stochastic_nibbles.cu."""

    nibbles: Tensor  # (levels, masks, 256, 64) uint8: by code of a, 16 magnitudes in 8 bytes
    slopes: Tensor  # (levels, masks, 256, 2) int8: 8 g and h
    masks: Tensor  # (chunk,) uint8
    factors: Tensor  # (levels,) float32


@lru_cache(maxsize=256)
def tables_of(
    options: Stochastic, levels: tuple[int, ...], chunk: int, device: torch.device, *, turned: bool = False
) -> Tables | None:
    """The tables of a product; None if a count is too far from a line of two slopes for 4 bits.

    ``turned`` ones are of b's codes, to be looked up by a's.
    """
    masks = options.masks(chunk)
    distinct = tuple(dict.fromkeys(masks))
    fitted = [_fitted(options, length, distinct, turned) for length in levels]
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


turned_tables_of = partial(tables_of, turned=True)


@lru_cache(maxsize=256)
def _fitted(
    options: Stochastic, length: int, masks: tuple[int, ...], turned: bool
) -> tuple[Tensor, Tensor] | None:
    """Of streams of one length: nibbles (masks, 256, 64) and slopes (masks, 256, 2)."""
    codes = options.max_code + 1
    counts = torch.zeros(len(masks), _CODES, _CODES, dtype=torch.int16)
    if length:
        streams = options.with_length(length).streams
        counts[:, :codes, :codes] = product_tables(streams, masks, torch.device("cpu"))
    if turned:
        counts = counts.mT
    lines, slopes = _lines()
    nearest = torch.full(counts.shape[:2], 2**15 - 1, dtype=torch.int16)
    which = torch.zeros(counts.shape[:2], dtype=torch.int64)
    twice = 2 * counts[:, :, :codes]
    for i, line in enumerate(lines):
        distance = (twice - line[:codes]).abs_().amax(-1)
        closer = distance < nearest
        nearest[closer], which[closer] = distance[closer], i
    if int(nearest.max()) >= 2 * _HALVES:
        return None
    rest = (2 * counts - lines[which] + 2 * _HALVES - 1) // 2
    rest[:, :, codes:] = 0
    rest = rest.view(*rest.shape[:2], -1, 2, 2, 4)  # 8 bytes, 2 words of them, halves of a byte, 4 bytes
    nibbles = (rest[..., 0, :] + 16 * rest[..., 1, :]).to(torch.uint8).view(len(masks), _CODES, 64)
    found = slopes[which]
    # Codes of a as bytes: the negative ones after 127, and -128, which there is not.
    nibbles = torch.cat([nibbles, ~nibbles[:, :1], ~nibbles[:, 1:].flip(1)], 1)
    return nibbles, torch.cat([found, -found[:, :1], -found[:, 1:].flip(1)], 1)


@lru_cache(maxsize=1)
def _lines() -> tuple[Tensor, Tensor]:
    """Twice the lines (lines, 128) of all pairs of slopes, and the slopes as the kernel has them."""
    pairs = [(g, h) for g in _SLOPES for h in _SMALL_SLOPES if (g + h) % 2]
    code = torch.arange(_CODES)
    lines = [g * (2 * (code // 2) + 1) + h * (2 * (code // 16) + 1) for g, h in pairs]
    slopes = torch.tensor([(8 * g, h) for g, h in pairs], dtype=torch.int8)
    return torch.stack(lines).to(torch.int16), slopes


class Workspace(NamedTuple):
    """What the kernels hand to one another."""

    weights: Tensor  # (B or 1, slices, quads, 32, 4) int32: codes in the order of the lanes
    places: Tensor  # (B, row groups, slices, 512) int32: rows of the tables
    linear: Tensor  # (B, row groups, slices, 1024) int8: slopes


class Product(ctypes.Structure):
    """The kernels' argument, field by field as in the source."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("qa", "sa", "qb", "sb", "levels", "tables", "slopes", "masks", "factors")
        ),
        *((name, ctypes.c_void_p) for name in ("weights", "places", "linear", "y")),
        *((name, ctypes.c_int) for name in ("N", "M", "D", "C", "chunk", "per_chunk", "num_masks")),
        *((name, ctypes.c_int) for name in ("shared_b", "level_b", "level_n", "level_c", "quads")),
    ]


@dataclass(frozen=True)
class Plan:
    """How a product is launched."""

    tiles: int  # of 8 outputs, a warp's
    threads: int
    keep: bool  # y in shared memory until it is whole
    arrivals: int
    slices: int
    quads: int  # of tiles, in whole blocks
    grid: tuple[int, int, int]

    @property
    def defines(self) -> _nvrtc.Defines:
        """The source's macros."""
        return (
            ("TILES", self.tiles),
            ("THREADS", self.threads),
            ("KEEP", int(self.keep)),
            ("ARRIVALS", self.arrivals),
        )

    @property
    def shared_bytes(self) -> int:
        """Tables, rows that arrive, and y."""
        kept = self.tiles * 8 * self.threads * 4 if self.keep else 0
        return _TABLES_BYTES + self.arrivals * _ARRIVED_BYTES + kept

    @property
    def grid_a(self) -> tuple[int, int, int]:
        """Blocks of stochastic_pack_a."""
        return 2 * self.slices, self.grid[0], self.grid[2]

    def grid_b(self, batch: int) -> tuple[int, int, int]:
        """Blocks of stochastic_pack_b."""
        return cdiv(self.slices, 8), self.quads, batch


SHARED_BYTES = _TABLES_BYTES + _ARRIVED_BYTES  # at least


def plan(
    batch: int, rows: int, outputs: int, chunks: int, chunk: int, *, multiprocessors: int, shared: int,
    threads: int = 512,
) -> Plan:  # fmt: skip
    """As many outputs a block as make the least time in whole rounds of the GPU."""
    groups, of_tile = cdiv(rows, ROWS), threads // 32 * 8  # outputs of a block that has one tile a warp

    def planned(tiles: int) -> Plan:
        grid = (groups, cdiv(outputs, of_tile * tiles), batch)
        slices = chunks * cdiv(chunk, _SLICE)
        how = Plan(tiles, threads, True, 1, slices, grid[1] * of_tile * tiles // 32, grid)
        if chunks > 1 and how.shared_bytes <= shared:
            return how
        arrivals = 2 if shared >= SHARED_BYTES + _ARRIVED_BYTES else 1
        return Plan(tiles, threads, False, arrivals, slices, how.quads, grid)

    return min((planned(tiles) for tiles in (8, 4)), key=lambda plan: clocks(plan, multiprocessors))


def clocks(plan: Plan, multiprocessors: int) -> int:
    """About what a plan takes: whole rounds of the GPU."""
    x, y, z = plan.grid
    return cdiv(x * y * z, multiprocessors) * plan.slices * (plan.tiles * _CLOCKS_OF_TILE + _CLOCKS_OF_TABLE)


def workspace(plan: Plan, batch_b: int, device: torch.device) -> Workspace:
    """Memory for a plan."""
    groups, _, batch = plan.grid
    weights = torch.empty(batch_b, plan.slices, plan.quads, 128, dtype=torch.int32, device=device)
    places = torch.empty(batch, groups, plan.slices, ROWS * _SLICE, dtype=torch.int32, device=device)
    linear = torch.empty(batch, groups, plan.slices, 2 * ROWS * _SLICE, dtype=torch.int8, device=device)
    return Workspace(weights, places, linear)


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
    strides = [0, 0, 0]
    if level_index is not None:
        strides = [s if n > 1 else 0 for n, s in zip(level_index.shape, level_index.stride(), strict=True)]
    pointers = [None if x is None else x.data_ptr() for x in (qa, sa, qb, sb, level_index)]
    pointers += [x.data_ptr() for x in (*tables, *memory, y)]
    sizes = (qa.shape[1], qb.shape[1], qa.shape[2], sa.shape[2], chunk, cdiv(chunk, _SLICE))
    return Product(*pointers, *sizes, tables.nibbles.shape[1], int(qb.shape[0] == 1), *strides, plan.quads)


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """y of contiguous qa, sa, qb and sb on a GPU, on its current stream."""
    qa, sa, qb, sb = operands
    (B, N), (C, M) = qa.shape[:2], (sa.shape[2], qb.shape[1])
    sb = sb.transpose(1, 2).contiguous()
    gpu = describe(qa.device)
    for batch, rows in _parts(B, N, C * cdiv(chunk, _SLICE)):
        own_b = slice(None) if qb.shape[0] == 1 else batch
        part = (qa[batch, rows], sa[batch, rows], qb[own_b], sb[own_b], y[batch, rows])
        how = plan(
            part[0].shape[0], part[0].shape[1], M, C, chunk,
            multiprocessors=gpu.multiprocessors, shared=gpu.shared_memory_bytes,
        )  # fmt: skip
        index = None
        if level_index is not None:
            of_batch = batch if level_index.shape[0] > 1 else slice(None)
            index = level_index[of_batch, rows if level_index.shape[1] > 1 else slice(None)]
        memory = workspace(how, part[2].shape[0], qa.device)
        argument = product_of(part, tables, index, how, chunk, memory)
        with on_device_of(qa):
            device = qa.device.index
            for name, grid in (
                ("stochastic_pack_b", how.grid_b(part[2].shape[0])),
                ("stochastic_pack_a", how.grid_a),
            ):
                _nvrtc.launch(_nvrtc.kernel(SOURCE, name, how.defines, device, 0), grid, 256, 0, argument)
            main = _nvrtc.kernel(SOURCE, "stochastic_nibbles", how.defines, device, how.shared_bytes)
            _nvrtc.launch(main, how.grid, how.threads, how.shared_bytes, argument)


def launch_turned(
    operands: Sequence[Tensor], tables: Tables, level_index: None, chunk: int, y: Tensor
) -> None:
    """The same by turned tables and with the operands' parts changed: quicker where a has the more rows."""
    qa, sa, qb, sb = operands
    if len(qb) < len(qa):
        qb, sb = (x.expand(len(qa), -1, -1).contiguous() for x in (qb, sb))
    turned = y.new_empty(y.shape[0], y.shape[2], y.shape[1])
    launch((qb, sb, qa, sa), tables, level_index, chunk, turned)
    y.copy_(turned.mT)


def _parts(B: int, N: int, slices: int) -> list[tuple[slice, slice]]:
    """Batches and rows whose places fit the workspace; all at once where they do."""
    of_group = slices * 4 * ROWS * _SLICE
    groups = max(1, _WORKSPACE_BYTES // of_group)  # at once
    of_entry = cdiv(N, ROWS)
    if groups >= of_entry:
        entries = groups // of_entry
        return [(slice(b, min(b + entries, B)), slice(None)) for b in range(0, B, entries)]
    rows = groups * ROWS
    return [(slice(b, b + 1), slice(n, min(n + rows, N))) for b in range(B) for n in range(0, N, rows)]
