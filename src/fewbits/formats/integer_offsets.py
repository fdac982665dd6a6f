"""Whole numbers from 0 on, less a zero point that is no whole number, times a scale: HQQ's numbers.

    low, high = the least and the largest value of a block, and 0
    scale     = (high - low) / (2**bits - 1)
    zero      = -low / scale
    code      = round(x / scale + zero), cut to 0 ... 2**bits - 1
    x         ~ (code - zero) * scale

Scales and zero points are numbers of ``arithmetic`` (float32, float16 or bfloat16), and the difference and
the product are rounded to it too, as HQQ computes in the dtype that a model was quantised for. Rounding
itself is in float32, to nearest, ties to even. A scale is never below the smallest normal number. A block
with a NaN or an infinity has a NaN as its scale and codes 0.

Blocks lie along rows (``axis`` 1), or across the whole tensor (``axis`` 0): the tensor's values, row after
row, are then ``block[1]`` rows of equal length, and a block is what stands in one column of those.

HQQ itself moves zero points until outliers cost less; what it found comes with a checkpoint
(`fewbits.formats.hqq`). Here each block's ends are its extremes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from fewbits.formats.base import Family, Packed, PartSpec, is_whole
from fewbits.formats.bits import pack_bits, packed_size, unpack_bits
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.blocks import Block, divide, scale_shape
from fewbits.formats.contract import Contract
from fewbits.formats.rounding import round_to_integer

ARITHMETICS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class OffsetInteger(BlockFormat):
    """Whole numbers under a scale and a zero point of the same dtype.

    Attributes:
        bits_of_codes: 1 to 8.
        block: (rows, columns) that share a scale, see `fewbits.formats.blocks`; (1, 64) for 64 values of a
            row. With ``axis`` 0 it is (1, values of a block).
        axis: 1, or 0 for blocks across the tensor.
        arithmetic: "float32", "float16" or "bfloat16".

    Parts: ``codes`` (..., ceil(K * bits / 8)) uint8, the first in the lowest bits; ``scales`` and
        ``offsets``, the zero points, in the arithmetic's dtype: of a shape that `scale_shape` gives, or with
        ``axis`` 0 (blocks,).
    """

    bits_of_codes: int = 4
    block: Block = (1, 64)
    axis: int = 1
    arithmetic: str = "float32"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.bits_of_codes

    @property
    def dtype(self) -> torch.dtype:
        """Of scales and zero points, and of what is computed with them."""
        return ARITHMETICS[self.arithmetic]

    def problem(self) -> str | None:
        """See `Format.problem`."""
        if not is_whole(self.bits_of_codes, 1, 8):
            return f"bits_of_codes is {self.bits_of_codes!r}, and it is a whole number from 1 to 8"
        if self.axis not in (0, 1) or self.arithmetic not in ARITHMETICS:
            return (
                f"axis={self.axis!r}, arithmetic={self.arithmetic!r}; they are 0 or 1, and one of "
                + ", ".join(ARITHMETICS)
            )
        if self.axis == 0 and not (self.block[0] == 1 and is_whole(self.block[1], 1)):
            return f"block is {self.block!r}, and with axis 0 it is (1, values of a block)"
        return super().problem()

    def promise(self) -> Contract:
        """See `Format.promise`: half a step, where a block's range is at most twice its largest magnitude."""
        whole = self.arithmetic == "float32"
        return Contract(
            largest_error=1 / (2**self.bits - 1),
            block=self.block if self.axis else (0, 0),
            exact_scale=whole,
            again="near" if whole else "nothing",
        )

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of ``shape``."""
        *lead, K = shape or (1,)
        scales = scale_shape(shape, self.block) if self.axis else (-(-prod(shape) // self.block[1]),)
        return {
            "codes": PartSpec((*lead, packed_size(K, self.bits)), torch.uint8),
            "scales": PartSpec(scales, self.dtype),
            "offsets": PartSpec(scales, self.dtype),
        }

    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """See `BlockFormat.rounded`."""
        values = x.values.float()
        low = values.amin(dim=(1, 3), keepdim=True).clamp_(max=0.0)
        high = values.amax(dim=(1, 3), keepdim=True).clamp_(min=0.0)
        most = 2**self.bits - 1
        scales = divide(high - low, most).clamp_(min=torch.finfo(self.dtype).tiny).to(self.dtype)
        scales = scales.masked_fill_(~scales.isfinite(), torch.nan)
        offsets = (-low / scales.float()).clamp_(0, most).nan_to_num_(0.0).to(self.dtype)
        codes = round_to_integer(values / scales.float() + offsets.float(), x.uniform)
        codes = codes.clamp_(0, most).nan_to_num_(0.0).to(torch.uint8)
        return {"codes": codes, "scales": scales, "offsets": offsets}

    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """See `BlockFormat.decoded`."""
        return (codes.to(self.dtype) - packed.parts["offsets"].view(scales.shape)) * scales

    def quantize_under(self, x: Tensor, absmax: float | None, *, seed: int | None = None) -> Packed:
        """See `Format.quantize_under`, for x of any shape."""
        if self.axis or not x.numel():
            return super().quantize_under(x, absmax, seed=seed)
        columns = self._columns(x.detach().reshape(-1))
        across = replace(self, axis=1, block=(self.block[1], 1)).quantize_under(columns, absmax, seed=seed)
        codes = unpack_bits(across.codes, self.bits, columns.shape[1]).reshape(-1)[: x.numel()]
        parts = {
            **across.parts,
            "codes": pack_bits(codes.reshape(x.shape if x.dim() else (1,)), self.bits).contiguous(),
        }
        layout = self.layout(tuple(x.shape))
        return Packed(
            self, tuple(x.shape), x.dtype, {n: parts[n].reshape(s.shape) for n, s in layout.items()}
        )

    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor itself; see `Format.dequantize`."""
        if self.axis or not packed.codes.numel():
            return super().dequantize(packed, dtype)
        whole = packed.shape or (1,)
        codes = self._columns(unpack_bits(packed.codes, self.bits, whole[-1]).reshape(-1)).to(self.dtype)
        values = (codes - packed.parts["offsets"]) * packed.scales
        return values.reshape(-1)[: prod(whole)].to(dtype or packed.dtype).view(packed.shape)

    def _columns(self, flat: Tensor) -> Tensor:
        """(numel,) as (values of a block, blocks), the last value again where there are too few."""
        rows = self.block[1]
        missing = -flat.numel() % rows
        return torch.cat([flat, flat[-1:].expand(missing)]).view(rows, -1)


OFFSET_INTEGERS = Family(
    (
        OffsetInteger(name=f"hqq{bits}_g{group}", bits_of_codes=bits, block=(1, group))
        for bits in (2, 3, 4, 8)
        for group in (64, 128)
    ),
    typical=["hqq4_g64"],
)

__all__ = ["OFFSET_INTEGERS", "OffsetInteger"]
