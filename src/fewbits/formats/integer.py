"""Whole numbers of 2 to 8 bits times a scale, with or without a zero point.

Symmetric: ``scale = absmax / qmax`` with qmax ``2**(bits - 1) - 1``, ``code = round(x * (1 / scale))`` in
-qmax ... qmax. The code -qmax - 1 is left unused: the grid is then symmetric, and the largest value of a
block decodes to itself.

With a zero point: ``low = min(x, 0)``, ``high = max(x, 0)``, ``scale = (high - low) / (2**bits - 1)``,
``zero_point = -2**(bits - 1) - round(low / scale)``, ``code = round(x * (1 / scale)) + zero_point``, cut to
-2**(bits - 1) ... 2**(bits - 1) - 1; ``x ~ (code - zero_point) * scale``. Zero stays exact. This is torchao's
affine arithmetic.

All in float32; round is to nearest, ties to even. A scale is never below 2**-126, the smallest normal number:
a block of zeros decodes to zeros, and the inverse of a scale is finite. A block with a NaN or an infinity has
a NaN as its scale and codes 0.

Requantising a decoded tensor gives the same codes for symmetric formats if the tensor is kept with p bits of
precision and ``2 * qmax < 2**(p - 1)``: always in float32 and float16, for INT4 also in bfloat16; INT8 in
bfloat16 (p = 8) may move by one code. With a zero point the decoded range may be a step narrower or wider
than the first, the scale follows it, and codes may move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats.base import Packed, PartSpec, is_whole
from fewbits.formats.bits import pack_bits, packed_size, unpack_bits
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.blocks import SMALLEST_SCALE, Block, block_absmax, divide, scale_shape
from fewbits.formats.contract import Coding, Contract
from fewbits.formats.rounding import first_of_largest, round_to_integer
from fewbits.formats.scale_search import SHRINK, Grid, ScaleSearch, shrunk
from fewbits.formats.tables import lookup_nibbles

# Values of the 4-bit codes: two's complement.
INT4_VALUES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0)


@dataclass(frozen=True, kw_only=True)
class WholeNumbers(BlockFormat):
    """Whole numbers times a scale.

    Attributes:
        bits: 2 to 8.
        block: (rows, columns) that share a scale, see `fewbits.formats.blocks`: (0, 0) is per tensor, (1, 0)
            per row, (1, 64) 64 values along the last axis.
        zero_point: whether the grid is moved to cover an interval that is not symmetric.

    Parts: ``codes`` (..., K) int8, or for fewer than 8 bits (..., ceil(K * bits / 8)) uint8 with two's
        complement codes, the first in the lowest bits; ``scales`` float32; with a zero point ``zero_points``
        int8, of the scales' shape.
    """

    bits: int = 8
    block: Block = (1, 0)
    zero_point: bool = False

    @property
    def max_code(self) -> int:
        """The largest code: 127 for 8 bits, 7 for 4."""
        return int(2 ** (self.bits - 1) - 1)

    def problem(self) -> str | None:
        """See `Format.problem`."""
        if not is_whole(self.bits, 2, 8):
            return f"bits is {self.bits!r}, and it is a whole number from 2 to 8"
        if not isinstance(self.zero_point, bool):
            return f"zero_point is {self.zero_point!r}, not true or false"
        return super().problem()

    def promise(self) -> Contract:
        """See `Format.promise`."""
        coding = Coding(kind="whole", bits=self.bits, block=self.block, zero_point=self.zero_point)
        plain_rows = self.bits == 8 and not self.zero_point
        return Contract(
            # with a zero point the interval is moved to whole steps, so its ends lose up to half a step more
            largest_error=2 / (2 * self.max_code + 1) if self.zero_point else 1 / self.max_code / 2,
            block=self.block,
            coding=coding,
            rounds_plainly=True,
            again="moved" if self.zero_point else "codes",
            again_bits=self.bits + 1,  # 2 * max_code < 2 ** (bits - 1)
            names={"compressed-tensors": "int-quantized" if plain_rows else "pack-quantized"},
            stored_as={"codes": "weight", "scales": "weight_scale"} if plain_rows else {},
        )

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of ``shape``."""
        scales = scale_shape(shape, self.block)
        if self.bits == 8:
            codes = PartSpec(shape or (1,), torch.int8)
        else:
            *lead, K = shape or (1,)
            codes = PartSpec((*lead, packed_size(K, self.bits)), torch.uint8)
        parts = {"codes": codes, "scales": PartSpec(scales, torch.float32)}
        if self.zero_point:
            parts["zero_points"] = PartSpec(scales, torch.int8)
        return parts

    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """See `BlockFormat.rounded`."""
        scales, zero_points = self._scales(x.values)
        codes = round_to_integer(x.values.float() * (1.0 / scales), x.uniform)
        lowest = -self.max_code
        parts = {"scales": scales}
        if zero_points is not None:
            codes.add_(zero_points)
            lowest -= 1
            parts["zero_points"] = zero_points.to(torch.int8)
        parts["codes"] = codes.clamp_(lowest, self.max_code).nan_to_num_(0.0).to(torch.int8)
        return parts

    def to_bytes(self, codes: Tensor) -> Tensor:
        """Two's complement codes (..., K) as they are stored."""
        if self.bits == 8:
            return codes
        return pack_bits(codes.view(torch.uint8) & (2**self.bits - 1), self.bits)

    def from_bytes(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The inverse of `to_bytes`: whole numbers of ``shape`` (..., K), of any dtype."""
        if self.bits == 4:
            values = lookup_nibbles(stored.reshape(-1), INT4_VALUES)
            return values.view(*stored.shape[:-1], 2 * stored.shape[-1])[..., : shape[-1]]
        if self.bits == 8:
            return stored
        codes: Tensor = unpack_bits(stored, self.bits, shape[-1]).view(torch.int8)
        sign = self.max_code + 1
        return (codes ^ sign) - sign

    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """See `BlockFormat.decoded`; int8 codes are promoted to float32 on the way."""
        if self.zero_point:
            codes = codes.float() - packed.parts["zero_points"].view(scales.shape)
        return codes * scales

    def scale_search(self, weight: Tensor) -> ScaleSearch | None:
        """See `Format.scale_search`."""
        if self.block[0] != 1:
            return None
        # Without zero points `quantize` leaves the lowest code unused; a choice by its losses may take it.
        lowest = -self.max_code - (self.zero_point or self.bits < 8)
        numbers = torch.arange(lowest, self.max_code + 1, device=weight.device)
        return _Search(self, numbers.float(), numbers.to(torch.int8).view(torch.uint8))

    def _scales(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales, and zero points (whole float32 numbers) or None, of blocks (R, r, C, c): (R, 1, C, 1)."""
        if not self.zero_point:
            return divide(block_absmax(blocks), self.max_code).clamp_(min=SMALLEST_SCALE), None
        low = blocks.amin(dim=(1, 3), keepdim=True).float().clamp_(max=0.0)
        high = blocks.amax(dim=(1, 3), keepdim=True).float().clamp_(min=0.0)
        scales = divide(high - low, 2 * self.max_code + 1).clamp_(min=SMALLEST_SCALE)
        scales = scales.masked_fill_(scales.isinf(), torch.nan)
        zero_points = (-(low / scales).round()).nan_to_num_(0.0).clamp_(0, 2 * self.max_code + 1)
        return scales, zero_points - (self.max_code + 1)


class _Search(ScaleSearch):
    """A scale, and with zero points a zero, for each block of a row."""

    continuous = True

    def __init__(self, format: WholeNumbers, values: Tensor, codes: Tensor) -> None:
        super().__init__(values, codes)
        self.format, self.has_zeros = format, format.zero_point

    def candidates(self, block: Tensor) -> Iterator[Grid]:
        """See `ScaleSearch.candidates`."""
        if not self.format.zero_point:
            yield from shrunk(block, self.values, self.codes, SMALLEST_SCALE)
            if self.format.bits < 8:
                yield from self._to_lowest(block)
            return
        low, high = block.amin(-1, keepdim=True).clamp(max=0), block.amax(-1, keepdim=True).clamp(min=0)
        most = 2 * self.format.max_code + 1
        for part in SHRINK:
            scale = ((high - low) * part / most).clamp_min(SMALLEST_SCALE)
            zero = (-(low * part / scale).round()).clamp(0, most) - (self.format.max_code + 1)
            yield Grid(self.values, self.codes, scale, zero, scale)

    def _to_lowest(self, block: Tensor) -> Iterator[Grid]:
        """Scales, negative ones too, under which the value that lies farthest out is the lowest code.

        A code more on the other side makes steps finer: by an eighth in 4 bits, by half in 2.
        """
        farthest = block.gather(-1, first_of_largest(block.abs()))
        for part in SHRINK:
            scale = farthest * part / self.values[0]
            scale = torch.where(scale.abs() < SMALLEST_SCALE, SMALLEST_SCALE, scale)
            yield Grid(self.values, self.codes, scale, torch.zeros_like(scale), scale)

    def parts(self, codes: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """See `ScaleSearch.parts`."""
        bits = self.format.bits
        narrow = codes.view(torch.int8) if bits == 8 else pack_bits(codes & (2**bits - 1), bits)
        tensors = {"codes": narrow, "scales": torch.cat([grid.stored for grid in grids], 1)}
        if self.format.zero_point:
            tensors["zero_points"] = torch.cat([grid.zero for grid in grids], 1).to(torch.int8)
        return tensors


@dataclass(frozen=True, kw_only=True)
class Integer(WholeNumbers):
    """`WholeNumbers` of 8 or 4 bits, the widths that the kernels know."""


def _family(bits: int) -> dict[str, Integer]:
    """The registry's values of one width, by the part of the name after the width."""
    formats = {}
    for suffix, block in (
        ("", (1, 0)),
        ("_tensor", (0, 0)),
        ("_g32", (1, 32)),
        ("_g64", (1, 64)),
        ("_g128", (1, 128)),
    ):
        for zero_point in (False, True):
            end = suffix + ("_zp" if zero_point else "")
            formats[end] = Integer(name=f"int{bits}{end}", bits=bits, block=block, zero_point=zero_point)
    return formats


_INT8, _INT4 = _family(8), _family(4)
INT8, INT8_TENSOR, INT8_G32, INT8_G64, INT8_G128 = (
    _INT8[k] for k in ("", "_tensor", "_g32", "_g64", "_g128")
)
INT4, INT4_TENSOR, INT4_G32, INT4_G64, INT4_G128 = (
    _INT4[k] for k in ("", "_tensor", "_g32", "_g64", "_g128")
)
INT8_ZP, INT8_TENSOR_ZP, INT8_G32_ZP, INT8_G64_ZP, INT8_G128_ZP = (
    _INT8[k + "_zp"] for k in ("", "_tensor", "_g32", "_g64", "_g128")
)
INT4_ZP, INT4_TENSOR_ZP, INT4_G32_ZP, INT4_G64_ZP, INT4_G128_ZP = (
    _INT4[k + "_zp"] for k in ("", "_tensor", "_g32", "_g64", "_g128")
)

__all__ = [
    "INT4",
    "INT4_G32",
    "INT4_G32_ZP",
    "INT4_G64",
    "INT4_G64_ZP",
    "INT4_G128",
    "INT4_G128_ZP",
    "INT4_TENSOR",
    "INT4_TENSOR_ZP",
    "INT4_VALUES",
    "INT4_ZP",
    "INT8",
    "INT8_G32",
    "INT8_G32_ZP",
    "INT8_G64",
    "INT8_G64_ZP",
    "INT8_G128",
    "INT8_G128_ZP",
    "INT8_TENSOR",
    "INT8_TENSOR_ZP",
    "INT8_ZP",
    "Integer",
    "WholeNumbers",
]
