"""Prepared stochastic operands with many rows and short streams: tables and launches of bits.cu.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.stochastic import Stochastic
from fewbits.formats.streams import prefix_tables, step_tables
from fewbits.formats.table_cache import keep_tables
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.grid import MAX_PROGRAMS
from fewbits.kernels.launch.jit import cdiv, next_power_of_2, on_device_of
from fewbits.kernels.stochastic import row_blocks
from fewbits.kernels.stochastic.parts import index_of

SOURCE = "stochastic/bits.cu"
CODES = 128
RECORD_BYTES = 4 * 32 * 32
SHARED_BYTES = 2 * 16 * RECORD_BYTES + 128 * 128 * 4
_TILE = 128  # rows and outputs of a block
_WORDS = 32  # of a row in a record
_PAIRS = 4  # of 8 outputs, a warp's: 8 warps in a block, quicker than 16
_WORKSPACE_BYTES = 2**30  # of a's and of b's bits


class Tables(NamedTuple):
    """What codes become; see the text of bits.cu."""

    words_a: Tensor  # (levels, masks, 128, words) int32
    words_b: Tensor  # (masks, 128, words) int32
    masks: Tensor  # (chunk,) uint8
    factors: Tensor  # (levels,) float32
    share: int = 1  # inner dimensions that share a word

    @property
    def words(self) -> int:
        """Of a code."""
        return self.words_b.shape[2]


@keep_tables(maxsize=256)
def tables_of(options: Stochastic, levels: tuple[int, ...], chunk: int, device: torch.device) -> Tables:
    """The tables of a product."""
    longest = max(levels)
    masks = options.masks(chunk)
    distinct, cpu, codes = tuple(dict.fromkeys(masks)), torch.device("cpu"), options.max_code + 1
    streams = options.with_length(longest).streams
    steps = torch.zeros(len(levels), len(distinct), CODES, dtype=torch.int64)
    steps[..., :codes] = step_tables(streams, distinct, levels, cpu)
    width = 32 * words_of(longest)
    ones = torch.zeros(len(distinct), CODES, width, dtype=torch.bool)
    ones[:, :codes, :longest] = prefix_tables(streams, distinct, cpu).diff(dim=1).mT.bool()
    enabled = torch.arange(width) < steps[..., None]
    position = {mask: i for i, mask in enumerate(distinct)}
    index = torch.tensor([position[mask] for mask in masks], dtype=torch.uint8)
    factors = [options.max_code**2 / length if length else 0.0 for length in levels]
    of_levels = torch.tensor(factors, dtype=torch.float64).float()
    words_a, words_b, index, of_levels = (
        x.to(device) for x in (_words(enabled), _words(ones), index, of_levels)
    )
    return Tables(words_a, words_b, index, of_levels, share_of(longest))


def _words(bits: Tensor) -> Tensor:
    """(..., 32 * words) bool to (..., words) int32, the first bit the lowest."""
    powers = 2 ** torch.arange(32, dtype=torch.int64)
    words = (bits.unflatten(-1, (-1, 32)).long() * powers).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


class Product(ctypes.Structure):
    """The kernels' argument, field by field as in the source."""

    _fields_ = row_blocks.argument_fields(
        ("words_a", "words_b"), ("bits_a", "bits_b"), ("tiles_a", "tiles_b")
    )


class Part(NamedTuple):
    """Some of a product: entries of the batch, rows and outputs that are multiplied at once."""

    batch: slice
    rows: slice
    outputs: slice


def words_of(longest: int) -> int:
    """Words of a code for streams of so many steps."""
    return next_power_of_2(cdiv(longest, 32))


def share_of(longest: int) -> int:
    """Inner dimensions that share a word of streams of so many steps."""
    return 4 if longest <= 8 else 2 if longest <= 16 else 1


def stages_of_chunk(chunk: int, words: int, share: int) -> int:
    """Records that a chunk of so many inner dimensions takes of each row."""
    return cdiv(cdiv(chunk, share) * words, _WORDS)


def defines_of(words: int, share: int = 1) -> nvrtc.Defines:
    """The source's macros for codes of so many words, or for so many dimensions in one."""
    return (("WORDS", words), ("SHARE", share), ("PAIRS", _PAIRS))


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """A `Launch`."""
    qa, sa, qb, sb = operands
    per_chunk = stages_of_chunk(chunk, tables.words, tables.share)
    stages = per_chunk * sa.shape[2]
    for part in _parts(qa.shape[0], qa.shape[1], qb.shape[0], qb.shape[1], stages):
        of_b = slice(None) if qb.shape[0] == 1 else part.batch
        own_a, own_b = (part.batch, part.rows), (of_b, part.outputs)
        index = index_of(level_index, part.batch, part.rows)
        whole = part.outputs == slice(0, qb.shape[1])
        out = y[own_a] if whole else y.new_empty(*qa[own_a].shape[:2], qb[own_b].shape[1])
        scales_b = sb[own_b].transpose(1, 2).contiguous()
        _launch_part((qa[own_a], sa[own_a], qb[own_b], scales_b, out), tables, index, chunk, stages)
        if not whole:
            y[part.batch, part.rows, part.outputs] = out


def _launch_part(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, stages: int
) -> None:
    """The same for operands whose bits fit the workspace, sb as (B or 1, C, M)."""
    qa, sa, qb, sb, y = (x.contiguous() for x in operands)
    blocks = [cdiv(x.shape[1], _TILE) for x in (qa, qb)]
    bits = [
        torch.empty(x.shape[0], 8 * n, stages, RECORD_BYTES // 4, dtype=torch.int32, device=qa.device)
        for x, n in zip((qa, qb), blocks, strict=True)
    ]
    part, per_chunk = row_blocks.Part(qa, sa, qb, sb, y, level_index), stages // sa.shape[2]
    values = row_blocks.argument_values(part, tables[:4], bits, chunk, per_chunk, tables.words_b.shape[0])
    argument = Product(*values, *(8 * n for n in blocks))
    defines = defines_of(tables.words, tables.share)
    with on_device_of(qa):
        for name, x, n in (("a", qa, blocks[0]), ("b", qb, blocks[1])):
            kernel = nvrtc.kernel(SOURCE, f"stochastic_bits_{name}", defines, qa.device.index, 0)
            nvrtc.launch(kernel, (cdiv(stages, 8), 8 * n, x.shape[0]), 256, 0, argument)
        kernel = nvrtc.kernel(SOURCE, "stochastic_bits", defines, qa.device.index, SHARED_BYTES)
        nvrtc.launch(kernel, (blocks[0], blocks[1], qa.shape[0]), 1024 // _PAIRS, SHARED_BYTES, argument)


def _parts(B: int, N: int, B_b: int, M: int, stages: int) -> list[Part]:
    """Entries of the batch, rows and outputs whose bits fit the workspace."""
    of_tile = 8 * stages * RECORD_BYTES
    tiles = max(1, min(_WORKSPACE_BYTES // of_tile, MAX_PROGRAMS[1] // 8))  # 8 programs make one's bits
    of_a, of_b = cdiv(N, _TILE), cdiv(M, _TILE)
    entries = max(1, min(B, tiles // of_a, B if B_b == 1 else tiles // of_b))
    rows, outputs = min(tiles, of_a) * _TILE, min(tiles, of_b) * _TILE
    return [
        Part(slice(b, min(b + entries, B)), slice(n, min(n + rows, N)), slice(m, min(m + outputs, M)))
        for b in range(0, B, entries)
        for n in range(0, N, rows)
        for m in range(0, M, outputs)
    ]
