"""Products by wide_bits.py whose rows have several stream lengths: each row costs what its own length does.

A block multiplies 32 to 128 rows and takes as long as the longest of their streams, in powers of two. So rows
are put in the order of their lengths first, and lengths that have one power of two are a group: a launch for
each group computes the tiles of its own and leaves the others at once. Nothing is asked of the device. How
many rows each group has is not known, so whether this is quicker is decided as if all had as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.device import Device, describe
from fewbits.formats.stochastic import Stochastic
from fewbits.formats.table_cache import keep_tables
from fewbits.kernels.stochastic import wide_bits

# Of an H200: what ordering takes, for each row too, and a group beside its products.
_ORDERING_CLOCKS, _ROW_CLOCKS, _GROUP_CLOCKS = 60_000, 4, 30_000


class TablesOfLengths(NamedTuple):
    """Tables of each group of lengths."""

    groups: Tensor  # (levels,) uint8: the group of each
    of_groups: tuple[wide_bits.Tables, ...]  # the tables of a group have its lengths and all shorter ones


@keep_tables(maxsize=256)
def tables_of(
    options: Stochastic, levels: tuple[int, ...], chunk: int, device: torch.device
) -> TablesOfLengths | None:
    """The tables of a product; None where `wide_bits.tables_of` has none."""
    widths = sorted({wide_bits.width_of(length) for length in levels if length})
    of_groups = []
    for width in widths:
        own = tuple(length if wide_bits.width_of(length) <= width else 0 for length in levels)
        tables = wide_bits.tables_of(options, own, chunk, device)
        if tables is None:
            return None
        of_groups.append(tables)
    if not of_groups:
        return None
    groups = [widths.index(wide_bits.width_of(length)) if length else 0 for length in levels]
    return TablesOfLengths(torch.tensor(groups, dtype=torch.uint8, device=device), tuple(of_groups))


def launch(
    operands: Sequence[Tensor], tables: TablesOfLengths, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """A `Launch`."""
    own, widths = wide_bits.aligned(operands), tuple(tables.width for tables in tables.of_groups)
    gpu = describe(y.device)
    (B, N, M), C = y.shape, own.sa.shape[2]
    sizes = wide_bits.WideSizes(B, N, M, C, chunk, widths[-1])
    of_rows = level_index is not None and level_index.shape[1:] == (y.shape[1], 1)
    if level_index is None or not of_rows or not is_quicker(sizes, widths, gpu):
        wide_bits.multiply(own, tables.of_groups[-1], level_index, chunk, y)
        return
    groups = tables.groups[level_index[..., 0].int()].expand(*y.shape[:2])
    groups, order = groups.sort(dim=1, stable=True)
    columns = wide_bits.plan(sizes, gpu).columns  # one for all, so that every tile is of one group
    of_tiles = [groups[:, columns - 1 :: columns]]
    of_tiles += [groups[:, -1:]] if groups.shape[1] % columns else []
    standing = wide_bits.TilePlaces(order.int(), torch.cat(of_tiles, 1), 0, columns)
    for number, of_group in enumerate(tables.of_groups):
        wide_bits.multiply(own, of_group, level_index, chunk, y, standing._replace(own=number))


def is_quicker(sizes: wide_bits.WideSizes, widths: tuple[int, ...], gpu: Device) -> bool:
    """Whether rows in the order of their lengths are, which are of these powers of two."""
    if len(widths) == 1:
        return False
    batch, rows, outputs, chunks, chunk, _ = sizes
    codes = batch * outputs * chunks * chunk * wide_bits.CODE_CLOCKS / gpu.multiprocessors
    longest = wide_bits.plan(sizes, gpu)
    of_groups = [wide_bits.plan(sizes._replace(longest=w), gpu, longest.columns).clocks for w in widths]
    ordering = _ORDERING_CLOCKS + batch * rows * _ROW_CLOCKS
    apart = sum(of_groups) / len(widths) + ordering + len(widths) * (codes + _GROUP_CLOCKS)
    return apart < longest.clocks + codes
