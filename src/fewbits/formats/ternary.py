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

from fewbits.formats.base import Format, Packed, PartSpec
from fewbits.formats.bits import pack_bits, packed_size, unpack_bits
from fewbits.formats.blocks import Block, from_blocks, packed_nothing, scale_shape, to_blocks
from fewbits.formats.contract import Contract
from fewbits.formats.rounding import random_uniform, round_to_integer

_SMALLEST = 1e-5


@dataclass(frozen=True, kw_only=True)
class Ternary(Format):
    """-1, 0 or 1 times a scale.

    Attributes:
        block: (rows, columns) that share a scale, see `fewbits.formats.blocks`; (0, 0) is BitNet's.

    Parts: ``codes`` (..., ceil(K / 4)) uint8, four two-bit codes a byte, value + 1, the first in the lowest
        bits; ``scales`` float32.
    """

    block: Block = (0, 0)

    def promise(self) -> Contract:
        """See `Format.promise`: a value beyond the mean magnitude is cut to it, however large it is."""
        return Contract(largest_error=1.0, block=self.block, cuts=True)

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of ``shape``."""
        *lead, K = shape or (1,)
        return {
            "codes": PartSpec((*lead, packed_size(K, 2)), torch.uint8),
            "scales": PartSpec(scale_shape(shape, self.block), torch.float32),
        }

    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        """Write x in this format; see `Format.quantize`."""
        nothing = packed_nothing(self, x)
        if nothing is not None:
            return nothing
        shape = tuple(x.shape)
        layout = self.layout(shape)
        blocks = to_blocks(x.detach(), self.block).float()
        counts = to_blocks(torch.ones(shape, device=x.device), self.block).sum(dim=(1, 3), keepdim=True)
        mean = blocks.abs().sum(dim=(1, 3), keepdim=True, dtype=torch.float64) / counts
        scales = mean.float().clamp_(min=_SMALLEST)
        scales = scales.masked_fill_(scales.isinf(), torch.nan)
        uniform = None
        if seed is not None:
            uniform = to_blocks(random_uniform(shape, seed, x.device), self.block)
        codes = round_to_integer(blocks * (1.0 / scales), uniform).clamp_(-1, 1).nan_to_num_(0.0) + 1
        codes = from_blocks(codes.to(torch.uint8), shape or (1,), self.block)
        parts = {"codes": pack_bits(codes, 2), "scales": scales}
        return Packed(self, shape, x.dtype, {n: parts[n].reshape(s.shape) for n, s in layout.items()})

    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor itself; see `Format.dequantize`."""
        whole, codes = packed.shape or (1,), packed.codes
        if codes.numel() == 0:
            return torch.empty(packed.shape, dtype=dtype or packed.dtype, device=codes.device)
        values = unpack_bits(codes, 2, whole[-1]).view(whole).to(torch.int8) - 1
        blocks = to_blocks(values, self.block)
        x = blocks * packed.scales.view(blocks.shape[0], 1, blocks.shape[2], 1)
        return from_blocks(x, packed.shape, self.block).to(dtype or packed.dtype)


TERNARY = Ternary(name="ternary")
TERNARY_ROW = Ternary(name="ternary_row", block=(1, 0))
TERNARY_G128 = Ternary(name="ternary_g128", block=(1, 128))

__all__ = ["TERNARY", "TERNARY_G128", "TERNARY_ROW", "Ternary"]
