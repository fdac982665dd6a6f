"""Ternary weights (BitNet b1.58, Ma et al. 2024): -1, 0 or 1 times the mean magnitude.

``scale = mean(|x|)`` of the block, at least 1e-5; ``code = round(x * (1 / scale))``, cut to -1 ... 1 (to
nearest, ties to even); ``x ~ code * scale``, all in float32 (the mean is summed in float64). Values beyond
the scale are cut to it: that is the format, and a model is trained for it.

A block with a NaN or an infinity has a NaN as its scale and codes 0. Requantising a decoded tensor gives the
same codes, but a smaller scale, because the zeros count in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats.base import Packed
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.blocks import Block, to_blocks
from fewbits.formats.contract import Contract
from fewbits.formats.description import Description
from fewbits.formats.rounding import round_to_integer

_SMALLEST = 1e-5


@dataclass(frozen=True, kw_only=True)
class Ternary(BlockFormat):
    """-1, 0 or 1 times a scale.

    Attributes:
        block: (rows, columns) that share a scale, see `fewbits.formats.blocks`; (0, 0) is BitNet's.

    Parts: ``codes`` (..., ceil(K / 4)) uint8, four two-bit codes a byte, value + 1, the first in the lowest
        bits; ``scales`` float32.
    """

    block: Block = (0, 0)

    def promise(self) -> Contract:
        """See `Format.promise`: a value beyond the mean magnitude is cut to it, however large it is."""
        description = Description(bits=2, center=1, block=self.block)
        return Contract(largest_error=1.0, block=self.block, description=description, cuts=True)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 2

    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """See `BlockFormat.rounded`."""
        values = x.values.float()
        counts = to_blocks(torch.ones(x.shape, device=values.device, dtype=torch.float32), self.block).sum(
            (1, 3), keepdim=True
        )
        mean = values.abs().sum(dim=(1, 3), keepdim=True, dtype=torch.float64) / counts
        scales = mean.float().clamp_(min=_SMALLEST)
        scales = scales.masked_fill_(scales.isinf(), torch.nan)
        codes = round_to_integer(values * (1.0 / scales), x.uniform).clamp_(-1, 1).nan_to_num_(0.0) + 1
        return {"codes": codes.to(torch.uint8), "scales": scales}

    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """See `BlockFormat.decoded`."""
        return (codes.to(torch.int8) - 1) * scales


TERNARY = Ternary(name="ternary")
TERNARY_ROW = Ternary(name="ternary_row", block=(1, 0))
TERNARY_G128 = Ternary(name="ternary_g128", block=(1, 128))

__all__ = ["TERNARY", "TERNARY_G128", "TERNARY_ROW", "Ternary"]
