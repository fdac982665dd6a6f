"""Prepared stochastic operands with many rows as bits, on Hopper: tables, plans and launches of wide_bits.cu.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.device import describe
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
_MAPPING_BLOCKS = 1024
_WORKSPACE_BYTES = 2**30  # of a's bits

# What a block takes for a step, in clocks of an H200, by its columns: the products of two warpgroups
# (measured alone: 64 clocks each of 128 columns) and what surrounds them (a guess).
_STEP_CLOCKS = {128: 165, 64: 90, 32: 60}


class Tables(NamedTuple):
    """What codes become; see the text of wide_bits.cu."""

    words_a: Tensor  # (levels, masks, 128, words) int32: of the operand whose bits are written
    ones_b: Tensor  # (masks, 128) int8: of the other
    masks: Tensor  # (chunk,) uint8
    factors: Tensor  # (levels,) float32
    share: int  # codes in a word
    skip: int  # ones of b from here on are kept less one

    @property
    def words(self) -> int:
        """Of a code."""
        return self.words_a.shape[3]


@keep_tables(maxsize=256)
def tables_of(
    options: Stochastic, levels: tuple[int, ...], chunk: int, device: torch.device, *, of_b: bool = False
) -> Tables | None:
    """The tables of a product; None where streams or chunks are of another kind than the kernel's.

    With ``of_b``, for streams of one length, the operands have changed places: bits are written of b's codes.
    """
    longest = max(levels)
    if not 0 < longest <= LONGEST or chunk % _PIECE or not options.streams.by_prefix:
        return None
    masks = options.masks(chunk)
    distinct, cpu, codes = tuple(dict.fromkeys(masks)), torch.device("cpu"), options.max_code + 1
    streams = options.with_length(longest).streams
    # Of each step and code, whether b's number lies below its boundary; and the steps of a's codes.
    below = prefix_tables(streams, distinct, cpu).diff(dim=1).bool()  # (masks, steps, codes)
    steps = step_tables(streams, distinct, levels, cpu).long()  # (levels, masks, codes)
    if of_b:
        ones, bits = steps[0], below.mT[None]
    else:
        ones, order = below.sum(1), below.sum(2).argsort(dim=1, descending=True, stable=True)
        in_order = below.gather(1, order[..., None].expand_as(below))  # lower numbers first
        if not torch.equal(in_order, torch.arange(longest)[:, None] < ones[:, None]):
            return None  # boundaries that do not rise with the codes
        bits = order[None, :, None] < steps[..., None]
    skip = _skip_of(ones)
    if skip is None:
        return None
    written = torch.zeros(len(levels), len(distinct), CODES, width_of(longest), dtype=torch.bool)
    written[:, :, :codes, :longest] = bits
    codes_of_b = torch.zeros(len(distinct), CODES, dtype=torch.int8)
    codes_of_b[:, :codes] = (ones - (ones >= skip).long()).to(torch.int8)
    position = {mask: i for i, mask in enumerate(distinct)}
    index = torch.tensor([position[mask] for mask in masks], dtype=torch.uint8)
    factors = [options.max_code**2 / length if length else 0.0 for length in levels]
    of_levels = torch.tensor(factors, dtype=torch.float64).float()
    return Tables(
        _words(written).to(device),
        codes_of_b.to(device),
        index.to(device),
        of_levels.to(device),
        share=max(1, 32 // width_of(longest)),
        skip=skip,
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
        ("words_a", "ones_b"), ("bits_a", "codes_b", "scales_a"), ("tiles_a", "skip")
    )


@dataclass(frozen=True)
class WideTiling:
    """How a product is launched."""

    columns: int  # rows of a in a block
    groups: int  # warpgroups of a block
    words: int
    share: int
    depth: int  # stages
    visits: int  # of 64 inner dimensions
    grid: tuple[int, int, int]
    clocks: int  # that it takes, about

    @property
    def steps(self) -> int:
        """Of a visit, 32 bytes of a row each."""
        return 8 * self.words // self.share + 4

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * self.groups + 32

    @property
    def stage_steps(self) -> int:
        """Steps that are copied at once."""
        return stage_steps_of(self.steps)

    @property
    def defines(self) -> nvrtc.Defines:
        """The source's macros."""
        return (
            ("WORDS", self.words),
            ("SHARE", self.share),
            ("COLUMNS", self.columns),
            ("GROUPS", self.groups),
            ("STAGE_STEPS", self.stage_steps),
            ("DEPTH", self.depth),
        )

    @property
    def shared_bytes(self) -> int:
        """Stages and their barriers."""
        return self.depth * (self.stage_steps * self.columns * 32 + 16)

    @property
    def bytes_of_tile(self) -> int:
        """Of the bits of a tile of rows."""
        return self.visits * self.steps * self.columns * 32


def visits_of(chunks: int, chunk: int) -> int:
    """Visits of so many chunks of so many inner dimensions."""
    return chunks * cdiv(chunk, _VISIT)


def stage_steps_of(steps: int) -> int:
    """Steps of a stage, of a visit of so many."""
    return 4 if steps % 4 == 0 else steps


def plan(
    batch: int,
    rows: int,
    outputs: int,
    visits: int,
    longest: int,
    *,
    multiprocessors: int,
    shared: int,
    columns: Mapping[int, int] = MappingProxyType(_STEP_CLOCKS),
) -> WideTiling:
    """The columns whose blocks take the least time in whole rounds of the GPU."""
    width = width_of(longest)

    def planned(of_block: int) -> WideTiling:
        words, share = max(1, width // 32), max(1, 32 // width)
        steps = 8 * words // share + 4
        of_stage = stage_steps_of(steps) * of_block * 32 + 16
        depth = min(_MOST_STAGES, shared // of_stage)
        grid = (cdiv(outputs, _OUTPUTS * _GROUPS), cdiv(rows, of_block), batch)
        waves = cdiv(grid[0] * grid[1] * batch, multiprocessors)
        clocks = waves * visits * steps * columns[of_block]
        return WideTiling(of_block, _GROUPS, words, share, depth, visits, grid, clocks)

    return min((planned(n) for n in columns), key=lambda plan: plan.clocks)


SHARED_BYTES = 2 * 6 * 128 * 32 + 64  # two stages of the largest


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """A `Launch`."""
    qa, sa, qb, sb = operands
    qb = qb if qb.data_ptr() % _PIECE == 0 else qb.clone()
    gpu = describe(y.device)
    (B, N, M), C = y.shape, sa.shape[2]
    width = 32 * tables.words // tables.share
    multiprocessors, shared = gpu.multiprocessors, gpu.shared_memory_bytes
    how = plan(B, N, M, visits_of(C, chunk), width, multiprocessors=multiprocessors, shared=shared)
    codes_b = torch.empty_like(qb)
    scales_b = sb.transpose(1, 2).contiguous()
    tiles = max(1, min(_WORKSPACE_BYTES // how.bytes_of_tile, MAX_PROGRAMS[1]))
    for number, (batch, rows) in enumerate(parts_of(B, N, how.columns, tiles)):
        of_b = slice(None) if len(qb) == 1 else batch
        part = row_blocks.Part(
            qa[batch, rows].contiguous(),
            sa[batch, rows].contiguous(),
            qb[of_b],
            scales_b[of_b],
            y[batch, rows],
            index_of(level_index, batch, rows),
        )
        _launch_part(part, codes_b[of_b], tables, how, chunk, first=number == 0 or len(qb) > 1)


def launch_swapped(
    operands: Sequence[Tensor], tables: Tables, level_index: None, chunk: int, y: Tensor
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
    part: row_blocks.Part, codes_b: Tensor, tables: Tables, how: WideTiling, chunk: int, *, first: bool
) -> None:
    out = (
        part.y if part.y.is_contiguous() else torch.empty_like(part.y, memory_format=torch.contiguous_format)
    )
    B, N, M = out.shape
    tiles, visits, C = cdiv(N, how.columns), how.visits, part.sa.shape[2]
    bits = torch.empty(B, tiles, how.bytes_of_tile, dtype=torch.uint8, device=out.device)
    scales = torch.empty(B, tiles, C, how.columns, 2, device=out.device, dtype=torch.float32)
    own = part._replace(y=out)
    values = row_blocks.argument_values(
        own, tables[:4], (bits, codes_b, scales), chunk, cdiv(chunk, _VISIT), tables.ones_b.shape[0]
    )
    argument = Product(*values, tiles, tables.skip)
    grids = {"stochastic_wide_a": (visits, tiles, B)}
    if first:
        pieces = part.qb.shape[0] * M * part.qb.shape[2] // _PIECE
        grids["stochastic_wide_b"] = (min(_MAPPING_BLOCKS, cdiv(pieces, 256)), 1, part.qb.shape[0])
    with on_device_of(part.qa):
        device = part.qa.device.index
        for name, grid in grids.items():
            bytes_of_map = tables.ones_b.numel() if name == "stochastic_wide_b" else 0
            kernel = nvrtc.kernel(SOURCE, name, how.defines, device, bytes_of_map)
            nvrtc.launch(kernel, grid, 256, bytes_of_map, argument)
        main = nvrtc.kernel(SOURCE, "stochastic_wide_bits", how.defines, device, how.shared_bytes)
        grid = (how.grid[0], tiles, B)
        nvrtc.launch(main, grid, how.threads, how.shared_bytes, argument)
    if out is not part.y:
        part.y.copy_(out)
