"""What many.py and nibbles.py share: both multiply blocks of rows in slices of 16 inner dimensions.

Weights and rows are packed first (stochastic_pack_b, stochastic_pack_a), then multiplied; what the packing
leaves for the product lies in a workspace, and products whose workspace would be too large are cut.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.grid import MAX_PROGRAMS
from fewbits.kernels.launch.jit import cdiv, on_device_of
from fewbits.kernels.stochastic.parts import index_of, parts_of, strides_of

SLICE = 16  # inner dimensions of a table
_WORKSPACE_BYTES = 2**28  # of places in tables


def argument_fields(
    tables: Sequence[str], memory: Sequence[str], counts: Sequence[str]
) -> list[tuple[str, type]]:
    """The fields of a source's Product, in its order: `argument_values` gives the values up to ``counts``."""
    pointers = ("qa", "sa", "qb", "sb", "levels", *tables, "masks", "factors", *memory, "y")
    sizes = ("N", "M", "D", "C", "chunk", "per_chunk", "num_masks")
    numbers = (*sizes, "shared_b", "level_b", "level_n", "level_c", *counts)
    return [(name, ctypes.c_void_p) for name in pointers] + [(name, ctypes.c_int) for name in numbers]


class Part(NamedTuple):
    """Rows of a product that are multiplied at once, all contiguous."""

    qa: Tensor  # (B, N, D)
    sa: Tensor  # (B, N, C)
    qb: Tensor  # (B or 1, M, D)
    sb: Tensor  # (B or 1, C, M)
    y: Tensor  # (B, N, M)
    levels: Tensor | None  # (B or 1, N or 1, C or 1)


def argument_values(
    part: Part, tables: Sequence[Tensor], memory: Sequence[Tensor], chunk: int, per_chunk: int, num_masks: int
) -> list[int | None]:
    """Pointers to tensors of any shapes, sizes and strides, in the order of `argument_fields`."""
    qa, sa, qb, sb, y, levels = part
    pointed = (qa, sa, qb, sb, levels, *tables, *memory, y)
    sizes = (qa.shape[1], qb.shape[1], qa.shape[2], sa.shape[2], chunk, per_chunk, num_masks)
    pointers = [None if x is None else x.data_ptr() for x in pointed]
    return [*pointers, *sizes, int(qb.shape[0] == 1), *strides_of(levels)]


def cut(
    operands: Sequence[Tensor], level_index: Tensor | None, chunk: int, y: Tensor, rows: int
) -> Iterator[Part]:
    """A product whose blocks have ``rows`` rows, in parts that fit the workspace; shapes as of `Launch`."""
    qa, sa, qb, sb = operands
    sb = sb.transpose(1, 2).contiguous()
    for batch, some in fitting(qa.shape[0], qa.shape[1], sa.shape[2] * cdiv(chunk, SLICE), rows):
        own_b = slice(None) if qb.shape[0] == 1 else batch
        index = index_of(level_index, batch, some)
        yield Part(qa[batch, some], sa[batch, some], qb[own_b], sb[own_b], y[batch, some], index)


def fitting(batch: int, rows: int, slices: int, of_block: int) -> list[tuple[slice, slice]]:
    """Batches and rows whose places fit the workspace; all at once where they do."""
    of_group = slices * 4 * of_block * SLICE
    groups = max(1, min(_WORKSPACE_BYTES // of_group, MAX_PROGRAMS[1]))  # at once
    return parts_of(batch, rows, of_block, groups)


@dataclass(frozen=True)
class BlockPlan(ABC):
    """How a product is launched."""

    tiles: int  # of 8 outputs, a warp's
    threads: int
    slices: int
    quads: int  # of tiles, in whole blocks
    grid: tuple[int, int, int]

    @property
    @abstractmethod
    def grid_a(self) -> tuple[int, int, int]:
        """Blocks of stochastic_pack_a."""

    def grid_b(self, batch: int) -> tuple[int, int, int]:
        """Blocks of stochastic_pack_b."""
        return cdiv(self.slices, 8), self.quads, batch


def launch_part(
    source: str,
    name: str,
    how: BlockPlan,
    defines: nvrtc.Defines,
    shared_bytes: int,
    part: Part,
    argument: ctypes.Structure,
) -> None:
    """Pack the weights and the rows, then multiply by the kernel ``name``, on the current stream."""
    with on_device_of(part.qa):
        device = part.qa.device.index
        for packing, grid in (
            ("stochastic_pack_b", how.grid_b(part.qb.shape[0])),
            ("stochastic_pack_a", how.grid_a),
        ):
            nvrtc.launch(nvrtc.kernel(source, packing, defines, device, 0), grid, 256, 0, argument)
        main = nvrtc.kernel(source, name, defines, device, shared_bytes)
        nvrtc.launch(main, how.grid, how.threads, shared_bytes, argument)
