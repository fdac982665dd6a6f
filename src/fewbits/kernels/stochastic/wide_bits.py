"""Prepared stochastic operands with many rows as bits, on Hopper: tables, plans and launches of wide_bits.cu.

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

from fewbits.device import Device, describe
from fewbits.formats.stochastic import Stochastic
from fewbits.formats.streams import prefix_tables, step_tables
from fewbits.formats.table_cache import keep_tables
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.grid import MAX_PROGRAMS
from fewbits.kernels.launch.jit import cdiv, next_power_of_2, on_device_of
from fewbits.kernels.stochastic import row_blocks
from fewbits.kernels.stochastic.parts import index_of, parts_of

SOURCE = "stochastic/wide_bits.cu"
CAPABILITY = (9, 0)  # and no other: later GPUs multiply no bits, earlier ones have no warpgroups
LONGEST = 128  # steps
CODES = 128
_VISIT = 64  # inner dimensions
_PIECE = 16  # of them that a thread reads at once: where rows and chunks begin
_GROUPS = 2  # warpgroups of a block
_OUTPUTS = 64  # of a warpgroup
_MOST_STAGES = 8
_SLOTS = 3  # for the codes of a unit of visits
_TILE_BYTES = _OUTPUTS * _VISIT  # of codes
_EXACT = 2**22  # counts below become floats by one subtraction
_MAPPING_BLOCKS = 2048
_MAPPING_BYTES = 96 * 1024  # of shared memory for codes of b by level
_WORKSPACE_BYTES = 2**30  # of a's bits

# What a block takes for a visit and for each of its steps, in clocks, by its columns: as measured on an H200.
_CLOCKS = {128: (800, 150), 64: (450, 123), 32: (375, 106)}
CODE_CLOCKS = 0.2  # of a multiprocessor, for a code of b
_WRITING_CLOCKS = 28  # for a row of a tile of y


class Tables(NamedTuple):
    """What codes become; see the text of wide_bits.cu."""

    words_a: Tensor  # (levels or 1, masks, 128, words) int32: of the operand whose bits are written
    ones_b: Tensor  # (1 or levels, masks, 128) int8: of the other
    counts_a: Tensor  # (levels or 1, masks, 128) uint8: how many bits of words_a are set
    masks: Tensor  # (chunk, rounded up to 64) uint8
    factors: Tensor  # (levels,) float32
    share: int  # codes in a word
    skip: int  # ones of b from here on are kept less one
    levels_of_b: bool  # whether a level index has rows of b's operand

    @property
    def words(self) -> int:
        """Of a code."""
        return self.words_a.shape[3]

    @property
    def width(self) -> int:
        """Steps that a code has bits for."""
        return 32 * self.words // self.share


@keep_tables(maxsize=256)
def tables_of(
    options: Stochastic, levels: tuple[int, ...], chunk: int, device: torch.device, *, of_b: bool = False
) -> Tables | None:
    """The tables of a product; None where streams or chunks are of another kind than the kernel's.

    With ``of_b`` the operands have changed places: bits are of b's codes, levels of the other's rows.
    """
    longest = max(levels)
    if not 0 < longest <= LONGEST or chunk % _PIECE or not options.streams.by_prefix:
        return None
    if chunk * width_of(longest) >= _EXACT:
        return None
    masks = options.masks(chunk)
    distinct, cpu, codes = tuple(dict.fromkeys(masks)), torch.device("cpu"), options.max_code + 1
    streams = options.with_length(longest).streams
    # Of each step and code, whether b's number lies below its boundary; and the steps of a's codes.
    below = prefix_tables(streams, distinct, cpu).diff(dim=1).bool()  # (masks, steps, codes)
    steps = step_tables(streams, distinct, levels, cpu).long()  # (levels, masks, codes)
    if of_b:
        ones, bits = steps, below.mT[None]
    else:
        ones, order = below.sum(1), below.sum(2).argsort(dim=1, descending=True, stable=True)
        in_order = below.gather(1, order[..., None].expand_as(below))  # lower numbers first
        if not torch.equal(in_order, torch.arange(longest)[:, None] < ones[:, None]):
            return None  # boundaries that do not rise with the codes
        ones, bits = ones[None], order[None, :, None] < steps[..., None]
    skip = _skip_of(ones)
    if skip is None or len(ones) * len(distinct) * CODES > _MAPPING_BYTES:
        return None
    written = torch.zeros(len(bits), len(distinct), CODES, width_of(longest), dtype=torch.bool)
    written[:, :, :codes, :longest] = bits
    codes_of_b = torch.zeros(len(ones), len(distinct), CODES, dtype=torch.int8)
    codes_of_b[..., :codes] = (ones - (ones >= skip).long()).to(torch.int8)
    position = {mask: i for i, mask in enumerate(distinct)}
    index = torch.zeros(_VISIT * cdiv(chunk, _VISIT), dtype=torch.uint8)
    index[:chunk] = torch.tensor([position[mask] for mask in masks], dtype=torch.uint8)
    factors = [options.max_code**2 / length if length else 0.0 for length in levels]
    of_levels = torch.tensor(factors, dtype=torch.float64).float()
    return Tables(
        _words(written).to(device),
        codes_of_b.to(device),
        written.sum(-1, dtype=torch.uint8).to(device),
        index.to(device),
        of_levels.to(device),
        share=max(1, 32 // width_of(longest)),
        skip=skip,
        levels_of_b=of_b and len(levels) > 1,
    )


tables_of_b = partial(tables_of, of_b=True)


def width_of(longest: int) -> int:
    """Steps that a code has bits for."""
    return max(8, next_power_of_2(longest))


def fits(capability: tuple[int, int] | None, inner: int, longest: int) -> bool:
    """Whether such a GPU takes streams of at most so many steps over so many inner dimensions."""
    return capability == CAPABILITY and inner % _PIECE == 0 and 0 < longest <= LONGEST


def _skip_of(ones: Tensor) -> int | None:
    """A number of ones that no code has, where some have 128 of them; else one beyond all."""
    if int(ones.max()) < CODES:
        return CODES
    absent = sorted({*range(1, CODES)} - {*ones.flatten().tolist()})
    return absent[0] if absent else None


def _words(bits: Tensor) -> Tensor:
    """(..., steps) bool to (..., words) int32, the first bit the lowest."""
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 32))
    powers = 2 ** torch.arange(32, dtype=torch.int64)
    words = (padded.unflatten(-1, (-1, 32)).long() * powers).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


class Product(ctypes.Structure):
    """The kernels' argument, field by field as in the source."""

    _fields_ = row_blocks.argument_fields(
        ("words_a", "ones_b", "counts_a"),
        ("bits_a", "codes_b", "scales_a", "order", "groups"),
        ("levels_b", "tiles_a", "tiles_b", "batch", "skip", "own_group"),
    )


@dataclass(frozen=True)
class WideTiling:
    """How a product is launched."""

    columns: int  # rows of a in a tile
    groups: int  # warpgroups of a block that multiply
    words: int
    share: int
    unit: int  # visits whose bits stand before their bytes
    depth: int  # stages
    visits: int  # of 64 inner dimensions
    tiles_b: int  # of 64 outputs
    clocks: int  # that it takes, about

    @property
    def steps(self) -> int:
        """Of a visit, 32 bytes of a row each."""
        return _steps_of(self.words, self.share)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * self.groups + 128

    @property
    def defines(self) -> nvrtc.Defines:
        """The source's macros."""
        return (
            ("WORDS", self.words),
            ("SHARE", self.share),
            ("COLUMNS", self.columns),
            ("GROUPS", self.groups),
            ("UNIT", self.unit),
            ("STAGE_STEPS", _stage_steps_of(self.unit, self.steps)),
            ("DEPTH", self.depth),
            ("SLOTS", _SLOTS),
        )

    @property
    def shared_bytes(self) -> int:
        """Stages, slots and their barriers."""
        stages = self.depth * (_stage_steps_of(self.unit, self.steps) * self.columns * 32 + 16)
        return stages + _SLOTS * (_slot_bytes_of(self.unit, self.columns) + 16)

    @property
    def bytes_of_tile(self) -> int:
        """Of the bits of a tile of rows."""
        return self.visits * self.steps * self.columns * 32


def _steps_of(words: int, share: int) -> int:
    return 8 * words // share + 4


def _stage_steps_of(unit: int, steps: int) -> int:
    """Steps that are copied at once: stages end where bits or bytes do."""
    return 4 if unit * (steps - 4) % 4 == 0 else 2


def _slot_bytes_of(unit: int, columns: int) -> int:
    """Of a unit's codes, and of a scale and a factor for each row."""
    return _GROUPS * unit * _TILE_BYTES + 8 * columns


class WideSizes(NamedTuple):
    """Of a product."""

    batch: int
    rows: int
    outputs: int
    chunks: int
    chunk: int
    longest: int  # stream


@lru_cache(maxsize=1024)
def plan(sizes: WideSizes, gpu: Device, columns: int | None = None) -> WideTiling:
    """The columns whose blocks take the least time in whole rounds of the GPU, or those that are given."""
    batch, rows, outputs, chunks, chunk, longest = sizes
    width, per_chunk = width_of(longest), cdiv(chunk, _VISIT)
    words, share, unit = max(1, width // 32), max(1, 32 // width), 1 if per_chunk % 2 else 2
    steps, visits, tiles_b = (
        _steps_of(words, share),
        chunks * per_chunk,
        _GROUPS * cdiv(outputs, _OUTPUTS * _GROUPS),
    )

    def planned(of_tile: int) -> WideTiling:
        of_stage = _stage_steps_of(unit, steps) * of_tile * 32 + 16
        left = gpu.shared_memory_bytes - _SLOTS * (_slot_bytes_of(unit, of_tile) + 16)
        depth = min(_MOST_STAGES, left // of_stage)
        waves = cdiv(tiles_b // _GROUPS * cdiv(rows, of_tile) * batch, gpu.multiprocessors)
        of_visit, of_step = _CLOCKS[of_tile]
        clocks = waves * (visits * (of_visit + steps * of_step) + of_tile * _WRITING_CLOCKS)
        return WideTiling(of_tile, _GROUPS, words, share, unit, depth, visits, tiles_b, clocks)

    choices = _CLOCKS if columns is None else (columns,)
    return min((planned(n) for n in choices), key=lambda plan: plan.clocks)


class WideOperands(NamedTuple):
    """Of a product, as the kernels read them."""

    qa: Tensor  # (B, N, D)
    sa: Tensor  # (B, N, C)
    qb: Tensor  # (B or 1, M, D)
    scales_b: Tensor  # (B or 1, C, M)


class TilePlaces(NamedTuple):
    """Which rows stand beside each other in tiles, and which of the tiles are computed."""

    order: Tensor  # (B, N) int32: the row at each place
    groups: Tensor  # (B, tiles) uint8
    own: int  # the group that is computed
    columns: int  # rows of a tile


SHARED_BYTES = 3 * 4 * 128 * 32 + _SLOTS * _slot_bytes_of(2, 128) + 128  # three stages of the largest


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """A `Launch`."""
    multiply(aligned(operands), tables, level_index, chunk, y)


def aligned(operands: Sequence[Tensor]) -> WideOperands:
    """Operands as of a `Launch`; codes begin at multiples of 16 bytes."""
    qa, sa, qb, sb = operands
    qa, qb = (q if q.data_ptr() % _PIECE == 0 else q.clone() for q in (qa, qb))
    return WideOperands(qa, sa, qb, sb.transpose(1, 2).contiguous())


def multiply(
    operands: WideOperands,
    tables: Tables,
    level_index: Tensor | None,
    chunk: int,
    y: Tensor,
    places: TilePlaces | None = None,
) -> None:
    """Write y (B, N, M), contiguous; with ``places`` some rows of it."""
    qa, sa, qb, scales_b = operands
    gpu = describe(y.device)
    (B, N, M), C = y.shape, sa.shape[2]
    planned = plan if places is None else partial(plan, columns=places.columns)
    how = planned(WideSizes(B, N, M, C, chunk, tables.width), gpu)
    codes_b = qb.new_empty(len(qb), how.tiles_b, how.visits, _TILE_BYTES)
    parts = parts_of(B, N, how.columns, max(1, min(_WORKSPACE_BYTES // how.bytes_of_tile, MAX_PROGRAMS[1])))
    if len(parts) == 1:  # the host's time counts
        part = row_blocks.Part(qa, sa, qb, scales_b, y, level_index)
        _launch_part(part, codes_b, tables, how, chunk, first=True, places=places)
        return
    for number, (batch, rows) in enumerate(parts):
        of_b = slice(None) if len(qb) == 1 else batch
        own = rows if places is None else slice(None)  # places point to rows of the whole entry
        index = index_of(level_index, batch, slice(None) if tables.levels_of_b else own)
        part = row_blocks.Part(qa[batch, own], sa[batch, own], qb[of_b], scales_b[of_b], y[batch, own], index)
        standing = None if places is None else _places_of(places, batch, rows)
        first = number == 0 or len(qb) > 1
        _launch_part(part, codes_b[of_b], tables, how, chunk, first=first, places=standing)


def _places_of(places: TilePlaces, batch: slice, rows: slice) -> TilePlaces:
    """Of a part of the rows, which begins and ends with tiles."""
    first = (rows.start or 0) // places.columns
    last = None if rows.stop is None else cdiv(rows.stop, places.columns)
    groups = places.groups[batch, first:last].contiguous()
    return places._replace(order=places.order[batch, rows].contiguous(), groups=groups)


def launch_swapped(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """The same with the operands in each other's place, by `tables_of_b`: quicker where a has more rows.

    qa is (B, N, D), sa (B, N, C), qb (B or 1, M, D), sb (B or 1, M, C), y (B, N, M).
    """
    qa, sa, qb, sb = operands
    if len(qb) < len(qa):
        qb, sb = (x.expand(len(qa), -1, -1).contiguous() for x in (qb, sb))
    transposed = y.new_empty(y.shape[0], y.shape[2], y.shape[1])
    launch((qb, sb, qa, sa), tables, level_index, chunk, transposed)
    y.copy_(transposed.mT)


def _launch_part(
    part: row_blocks.Part,
    codes_b: Tensor,
    tables: Tables,
    how: WideTiling,
    chunk: int,
    *,
    first: bool,
    places: TilePlaces | None,
) -> None:
    B, N = part.y.shape[:2] if places is None else places.order.shape
    tiles, visits, C = cdiv(N, how.columns), how.visits, part.sa.shape[2]
    bits = torch.empty(B, tiles, how.bytes_of_tile, dtype=torch.uint8, device=part.y.device)
    scales = torch.empty(B, tiles, C, how.columns, 2, device=part.y.device, dtype=torch.float32)
    values = row_blocks.argument_values(
        part,
        tables[:5],
        (bits, codes_b, scales, *(places[:2] if places is not None else (None, None))),
        chunk,
        cdiv(chunk, _VISIT),
        tables.ones_b.shape[1],
    )
    numbers = (len(tables.ones_b), tiles, how.tiles_b, B, tables.skip, 0 if places is None else places.own)
    argument, defines = Product(*values, *numbers), (*how.defines, ("LEVELS_OF_B", int(tables.levels_of_b)))
    argument.N = N
    grids = {"stochastic_wide_a": (visits, tiles, B)}
    if first:
        of_tile = min(visits, cdiv(_MAPPING_BLOCKS, how.tiles_b * len(part.qb)))
        grids["stochastic_wide_b"] = (of_tile, how.tiles_b, len(part.qb))
    with on_device_of(part.qa):
        device = part.qa.device.index
        for name, grid in grids.items():
            shared = tables.ones_b.numel() if name == "stochastic_wide_b" else how.columns * (_VISIT + 4)
            kernel = nvrtc.kernel(SOURCE, name, defines, device, shared)
            nvrtc.launch(kernel, grid, 256, shared, argument)
        main = nvrtc.kernel(SOURCE, "stochastic_wide_bits", defines, device, how.shared_bytes)
        blocks = min(how.tiles_b // how.groups * tiles * B, describe(part.y.device).multiprocessors)
        nvrtc.launch(main, (blocks, 1, 1), how.threads, how.shared_bytes, argument)
