"""What a method needs of a format that chooses codes itself, such as GPTQ: values, scales, and how to pack.

Such a method rounds one column after another under scales that it fixed before, so it cannot ask the format
to quantise a tensor. `Format.scale_search` gives it a `ScaleSearch`: the values of the codes, the scales that
a block may take, and the parts of the packed weight. Each format writes its own, in its own file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

SHRINK = tuple(1.0 - 0.04 * number for number in range(16))  # scales tried, as parts of the plain one


@dataclass(frozen=True)
class Grid:
    """What one block of columns may take: ``value = (values[i] - zero) * scale``.

    Attributes:
        values: (C,) float32, ascending.
        codes: (C,) uint8: the code of each.
        scale: (N, 1) float32.
        zero: (N, 1) float32.
        stored: (N, 1), the scale as the format stores it.
    """

    values: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor
    stored: Tensor

    def round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest codes (uint8) and values of x (N, n) float32."""
        middle = (self.values[1:] + self.values[:-1]) / 2
        index = torch.bucketize((x / self.scale + self.zero).contiguous(), middle)
        return self.codes[index], (self.values[index] - self.zero) * self.scale


class ScaleSearch(ABC):
    """The scales that blocks of one weight may take under one format.

    Args:
        values: (C,) float32, ascending and once each: what a code stands for.
        codes: (C,) uint8: the code of each.

    Attributes:
        continuous: whether any positive float32 can be a scale, and is stored as it is.
        size: columns under one `Grid`; None: those of the format's block.
        has_zeros: whether every whole number among the values can be a zero, and is stored as it is.
    """

    continuous: ClassVar[bool] = False
    size: int | None = None
    has_zeros: bool = False

    def __init__(self, values: Tensor, codes: Tensor) -> None:
        self.values, self.codes = values, codes

    def begin(self, start: int, columns: Tensor, importance: Tensor) -> None:  # noqa: B027 (most need nothing)
        """Told when a block of the format is reached, before the grids in it are asked for.

        Args:
            start: its first column.
            columns: (N, columns of a block) float32, the values there.
            importance: how much the squared error of each column counts, of their number.
        """

    @abstractmethod
    def candidates(self, block: Tensor) -> Iterator[Grid]:
        """The grid that the format itself would take for a block (N, size) float32, then smaller ones."""

    @abstractmethod
    def parts(self, codes: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """The packed weight's parts.

        Args:
            codes: (N, K) uint8, as `Grid.round` gives them.
            grids: one for each block of columns.
        """


class GivenScales(ScaleSearch):
    """For scales that several rows share: those that the format itself would take, and no others.

    Args:
        values: (C,) float32, ascending and once each: what a code stands for.
        codes: (C,) uint8: the code of each.
        scales: (N, blocks) float32, of each row's blocks.
        parts_of: makes the packed weight's parts of codes (N, K) uint8.
    """

    def __init__(
        self,
        values: Tensor,
        codes: Tensor,
        scales: Tensor,
        parts_of: Callable[[Tensor], dict[str, Tensor]],
    ) -> None:
        super().__init__(values, codes)
        self.scales, self.parts_of, self.number = scales, parts_of, 0

    def begin(self, start: int, columns: Tensor, importance: Tensor) -> None:
        """See `ScaleSearch.begin`, for (N, columns)."""
        self.number = start // columns.shape[1]

    def candidates(self, block: Tensor) -> Iterator[Grid]:
        """See `ScaleSearch.candidates`, for (N, size)."""
        scale = self.scales[: len(block), self.number : self.number + 1]
        yield Grid(self.values, self.codes, scale, torch.zeros_like(scale), scale)

    def parts(self, codes: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """See `ScaleSearch.parts`, for codes (N, K)."""
        return self.parts_of(codes)


def of_rows(scales: Tensor, block: tuple[int, int], rows: int) -> Tensor:
    """Scales of tiles (R, C) or of a whole tensor (1,) as those of each row's blocks: (rows, C)."""
    if block[0] == 0:
        return scales.view(1, 1).float().expand(rows, 1)
    return scales.float().repeat_interleave(block[0], 0)[:rows]


def ascending(table: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Every value of a table of codes, ascending and once (C,) float32, with its code (C,) uint8."""
    once: dict[float, int] = {}
    for code, value in enumerate(table):
        if value == value:
            once.setdefault(value + 0.0, code)
    ordered = sorted(once)
    codes = torch.tensor([once[v] for v in ordered], dtype=torch.uint8, device=device)
    return torch.tensor(ordered, dtype=torch.float32, device=device), codes


def shrunk(block: Tensor, values: Tensor, codes: Tensor, smallest_scale: float) -> Iterator[Grid]:
    """Grids without a zero point: the block's largest magnitude over the largest value, and smaller scales.

    Args:
        block: (N, size) float32.
        values: (C,) float32, ascending.
        codes: (C,) uint8.
        smallest_scale: no scale is below.
    """
    absmax = block.abs().amax(-1, keepdim=True)
    zero, top = torch.zeros_like(absmax), float(values[-1])
    for part in SHRINK:
        scale = (absmax * part / top).clamp_min(smallest_scale)
        yield Grid(values, codes, scale, zero, scale)
