"""The numbers that a block of a weight may take under a format, for methods that choose codes themselves.

A method such as GPTQ rounds one column after another under scales that it fixed before, so it cannot ask the
format to quantise a tensor. It asks for a `Grid`: the values of the codes, a scale and a zero for each row of
a block. `finish` makes the packed weight of the chosen codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.base import Format, Packed
from fewbits.formats.bits import pack_bits
from fewbits.formats.blocks import SMALLEST_SCALE
from fewbits.formats.codebook import Codebook
from fewbits.formats.integer import WholeNumbers
from fewbits.formats.microscaling import Microscaling
from fewbits.formats.minifloat import E2M1, exponential
from fewbits.formats.nvfp4 import NVFP4Blocks

_SHRINK = tuple(1.0 - 0.04 * number for number in range(16))  # scales tried, as parts of the plain one


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


class Grids:
    """The grids of one weight under one format.

    Args:
        format: whole numbers in groups of a row or a row, an MX format, NVFP4 in rows, or a table of 16
            values.
        weight: (N, K) float32.

    Raises:
        Unsupported: another format, or one whose blocks the rows do not fill.
    """

    def __init__(self, format: Format, weight: Tensor) -> None:
        self.format, self.shape = format, (weight.shape[0], weight.shape[1])
        K = weight.shape[1]
        block = getattr(format, "block", None)
        self.size = (block if isinstance(block, int) else block[1] if block else 0) or K
        rows = 1 if isinstance(block, int) else block[0] if block else 0
        known = isinstance(format, WholeNumbers | Microscaling | NVFP4Blocks) or (
            isinstance(format, Codebook) and not format.double
        )
        if not known or rows != 1:
            raise Unsupported(
                f"{format.name} is not rounded by calibration; choose whole numbers in groups (int4_g128), "
                "an MX format, nvfp4, nf4 or fp4, or leave out --calibrate."
            )
        if K % self.size:
            raise Unsupported(
                f"{format.name} has blocks of {self.size} values, which rows of {K} do not fill; choose a "
                "smaller block."
            )
        self._whole = None
        if isinstance(format, NVFP4Blocks):
            self._whole = format.quantize(weight).parts[format.whole_scale]
        self._values = _ascending(format, weight.device)

    def plain(self, block: Tensor) -> Grid:
        """The grid that the format itself would take for a block (N, size)."""
        return next(self._candidates(block))

    def best(self, block: Tensor, importance: Tensor) -> Grid:
        """The grid with the least squared error over a block (N, size), columns weighted by importance."""
        chosen: Grid | None = None
        least = torch.zeros(0)
        for grid in self._candidates(block):
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

    def finish(self, codes: Tensor, grids: Sequence[Grid], dtype: torch.dtype) -> Packed:
        """The packed weight of codes (N, K) uint8 under a grid for each block."""
        format, stored = self.format, torch.cat([grid.stored for grid in grids], 1)
        if isinstance(format, WholeNumbers):
            narrow = pack_bits(codes & (2**format.bits - 1), format.bits)
            made = {"codes": codes.view(torch.int8) if format.bits == 8 else narrow, "scales": stored}
            if format.zero_point:
                made["zero_points"] = torch.cat([grid.zero for grid in grids], 1).to(torch.int8)
        else:
            bits = format.bits if isinstance(format, Microscaling) else 4
            made = {"codes": pack_bits(codes, bits), "scales": stored}
            if isinstance(format, NVFP4Blocks) and self._whole is not None:
                made[format.whole_scale] = self._whole
        layout = format.layout(self.shape)
        parts = {n: made[n].to(spec.dtype).reshape(spec.shape).contiguous() for n, spec in layout.items()}
        return Packed(format, self.shape, dtype, parts)

    def _candidates(self, block: Tensor) -> Iterator[Grid]:
        """The plain grid first, then smaller ones."""
        format, (values, codes) = self.format, self._values
        absmax = block.abs().amax(-1, keepdim=True)
        zero = torch.zeros_like(absmax)
        if isinstance(format, WholeNumbers) and format.zero_point:
            yield from _affine(format, block, values, codes)
        elif isinstance(format, Microscaling):
            plain = format.quantize(block).scales.view(-1, 1).float()
            for step in (0, -1, 1):
                stored = (plain + step).clamp(0, 254)
                yield Grid(values, codes, exponential(stored - 127), zero, stored)
        elif isinstance(format, NVFP4Blocks):
            assert self._whole is not None
            whole = 1 / self._whole if format.divides else self._whole
            for part in _SHRINK:
                wanted = (absmax * part / 6 / whole).clamp(2.0**-6, 448.0)
                stored = wanted.to(torch.float8_e4m3fn).float()
                yield Grid(values, codes, stored * whole, zero, stored)
        else:
            top = float(values[-1])
            for part in _SHRINK:
                scale = (absmax * part / top).clamp_min(SMALLEST_SCALE)
                yield Grid(values, codes, scale, zero, scale)


def _affine(format: WholeNumbers, block: Tensor, values: Tensor, codes: Tensor) -> Iterator[Grid]:
    low, high = block.amin(-1, keepdim=True).clamp(max=0), block.amax(-1, keepdim=True).clamp(min=0)
    most = 2 * format.max_code + 1
    for part in _SHRINK:
        scale = ((high - low) * part / most).clamp_min(SMALLEST_SCALE)
        zero = (-(low * part / scale).round()).clamp(0, most) - (format.max_code + 1)
        yield Grid(values, codes, scale, zero, scale)


def _ascending(format: Format, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every value that a code stands for, ascending and once, with its code."""
    if isinstance(format, WholeNumbers):
        lowest = -format.max_code - int(format.zero_point)
        numbers = torch.arange(lowest, format.max_code + 1, device=device)
        return numbers.float(), numbers.to(torch.int8).view(torch.uint8)
    table = format.values if isinstance(format, Codebook | Microscaling) else E2M1.values
    once: dict[float, int] = {}
    for code, value in enumerate(table):
        if value == value:
            once.setdefault(value + 0.0, code)
    ordered = sorted(once)
    codes = torch.tensor([once[v] for v in ordered], dtype=torch.uint8, device=device)
    return torch.tensor(ordered, dtype=torch.float32, device=device), codes
