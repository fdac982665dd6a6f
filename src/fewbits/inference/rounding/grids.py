"""The numbers that a block of a weight may take under a format, for methods that choose codes themselves.

`fewbits.formats.scale_search` says what a format gives for that; here the best of its scales is chosen for a
block, and the packed weight is made of the chosen codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import gcd

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.base import Format, Packed
from fewbits.formats.scale_search import Grid as Grid


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A weight (N, K) as a method has rounded it.

    Attributes:
        codes: (N, K) uint8.
        grids: of each block of columns.
        wanted: (N, K) float32, what each value was when its code was chosen.
    """

    codes: Tensor
    grids: Sequence[Grid]
    wanted: Tensor


class Grids:
    """The grids of one weight under one format.

    Args:
        format: one with a `fewbits.formats.scale_search`.
        weight: (N, K) float32.

    Attributes:
        size: columns under one grid.
        whole: columns of a block of the format, which may hold several grids.

    Raises:
        Unsupported: another format, or one whose blocks the rows do not fill.
    """

    def __init__(self, format: Format, weight: Tensor) -> None:
        self.format, self.shape = format, (weight.shape[0], weight.shape[1])
        K = weight.shape[1]
        search = format.scale_search(weight)
        if search is None:
            raise Unsupported(
                f"{format.name} is not rounded by calibration; choose whole numbers in groups (int4_g128), "
                "FP8, an MX format, nvfp4, nf4, fp4 or a GGUF type, or leave out --calibrate."
            )
        self.whole = format.contract.block[1] or K
        self.size = search.size or self.whole
        if K % self.whole:
            raise Unsupported(
                f"{format.name} has blocks of {self.whole} values, which rows of {K} do not fill; choose "
                f"{_smaller(format, gcd(self.whole, K))}."
            )
        self.search = search

    def reach(self, column: int, weight: Tensor, importance: Tensor) -> None:
        """Called before the grid of a column is asked for, with the whole weight (N, K) as it then is."""
        if column % self.whole == 0:
            at = slice(column, column + self.whole)
            self.search.begin(column, weight[:, at], importance[at])

    def plain(self, block: Tensor) -> Grid:
        """The grid that the format itself would take for a block (N, size)."""
        return next(self.search.candidates(block))

    def best(self, block: Tensor, importance: Tensor) -> Grid:
        """The grid with the least squared error over a block (N, size), columns weighted by importance."""
        chosen: Grid | None = None
        least = torch.zeros(0, dtype=torch.float32)
        for grid in self.search.candidates(block):
            error = ((grid.round(block)[1] - block).square() * importance).sum(-1, keepdim=True)
            if chosen is None:
                chosen, least = grid, error
                continue
            better = error < least
            least = torch.where(better, error, least)
            chosen = Grid(
                grid.values,
                grid.codes,
                torch.where(better, grid.scale, chosen.scale),
                torch.where(better, grid.zero, chosen.zero),
                torch.where(better, grid.stored, chosen.stored),
            )
        assert chosen is not None
        return chosen

    def finish(self, choice: Choice, dtype: torch.dtype) -> Packed:
        """The packed weight of a choice for this weight."""
        format, tensors = self.format, self.search.parts(choice.codes, choice.grids)
        layout = format.layout(self.shape)
        parts = {n: tensors[n].to(spec.dtype).reshape(spec.shape).contiguous() for n, spec in layout.items()}
        return Packed(format, self.shape, dtype, parts)


def _smaller(format: Format, columns: int) -> str:
    """What to write for blocks of so many columns, in words; a type whose blocks are as they are has none."""
    if "block" not in {field.name for field in fields(format)}:
        return "another format"
    return f"a smaller block, in a recipe {{'name': {format.name!r}, 'block': [1, {columns}]}}"
