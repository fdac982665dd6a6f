"""NVFP4: E2M1 codes in blocks of 16, an E4M3 scale for each block and a float32 scale for the tensor.

    tensor_scale = absmax of the tensor / (448 * 6)
    scale        = E4M3(absmax of the block / 6 / tensor_scale), at least 2**-6
    code         = E2M1(x * ((1 / tensor_scale) / scale)), saturated
    x            ~ code * (scale * tensor_scale)

all in float32, to nearest, ties to even: torchao's arithmetic. With ``divides`` the tensor's scale is stored
as its inverse, ``448 * 6 / absmax``, by which a block's scale is divided, as compressed-tensors does:
``x ~ code * (scale / inverse_tensor_scale)``.

With ``four_over_six`` (Cook et al., arXiv 2512.02010) each block chooses whether its largest magnitude
becomes 6 or 4: with 4 the coarse step between them is not used. The choice with the smaller squared error is
taken, 6 where both are equal, and 448 becomes 256 above, so that the scale of the largest block can be half
as large again.

A block with a NaN or an infinity has a NaN as its scale and codes 0. In a tensor of zeros all scales are the
smallest ones. Requantising a decoded tensor gives the same codes, unless a block lies so far below the
tensor's largest value that its scale is cut to 2**-6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats.base import Packed, PartSpec
from fewbits.formats.bits import pack_bits, packed_size
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.blocks import SMALLEST_SCALE, Block, block_absmax, divide, scale_shape
from fewbits.formats.contract import Contract
from fewbits.formats.description import Description
from fewbits.formats.minifloat import E2M1
from fewbits.formats.rounding import sum_in_order
from fewbits.formats.scale_search import SHRINK, GivenScales, Grid, ScaleSearch, ascending, of_rows
from fewbits.formats.tables import table

_SCALE = torch.float8_e4m3fn
_LARGEST_SCALE, _SMALLEST_BLOCK_SCALE = 448.0, 2.0**-6
_LARGEST_SCALE_OF_SIX = 256.0  # with four_over_six: 1.5 times as much is still an E4M3 number


@dataclass(frozen=True, kw_only=True)
class NVFP4Blocks(BlockFormat):
    """E2M1 codes under two levels of scales.

    Attributes:
        block: (rows, columns) that share a scale, see `fewbits.formats.blocks`: (1, 16), or (16, 16) for a
            weight that is multiplied by from both sides.
        four_over_six: each block chooses between two scales.
        divides: the tensor's scale is stored as its inverse.

    Parts: ``codes`` (..., ceil(K / 2)) uint8, the first code in the low nibble; ``scales`` float8 E4M3;
    ``tensor_scale``, or with ``divides`` ``inverse_tensor_scale``, (1,) float32.
    """

    block: Block = (1, 16)
    four_over_six: bool = False
    divides: bool = False

    def problem(self) -> str | None:
        """See `Format.problem`."""
        if not isinstance(self.four_over_six, bool) or not isinstance(self.divides, bool):
            return f"four_over_six={self.four_over_six!r}, divides={self.divides!r}; both are true or false"
        return super().problem()

    def promise(self) -> Contract:
        """See `Format.promise`: half the step from 4 to 6, under a scale that was rounded up."""
        parts = {"codes": "weight_packed", "scales": "weight_scale", self.whole_scale: "weight_global_scale"}
        return Contract(
            largest_error=(1 + 2.0**-4) / 6,
            block=self.block,
            tensor_scale=True,
            description=Description(
                bits=4,
                block=self.block,
                stored="e4m3_divided" if self.divides else "e4m3",
                whole_part=self.whole_scale,
                **E2M1.described,
            ),
            cuts=True,
            names={"compressed-tensors": "nvfp4-pack-quantized"} if self.divides else {},
            stored_as=parts if self.divides else {},
        )

    @property
    def whole_scale(self) -> str:
        """The name of the part that holds the tensor's scale."""
        return "inverse_tensor_scale" if self.divides else "tensor_scale"

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of ``shape``."""
        *lead, K = shape or (1,)
        return {
            "codes": PartSpec((*lead, packed_size(K, 4)), torch.uint8),
            "scales": PartSpec(scale_shape(shape, self.block), _SCALE),
            self.whole_scale: PartSpec((1,), torch.float32),
        }

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4

    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """See `BlockFormat.rounded`."""
        blocks = x.values.float()
        whole = self._whole_scale(blocks if x.absmax is None else blocks.new_full((1,), x.absmax))
        block_largest = block_absmax(blocks)
        codes, scales = self._round(blocks, block_largest, whole, 6.0, x.uniform)
        if self.four_over_six:
            other_codes, other_scales = self._round(blocks, block_largest, whole, 4.0, x.uniform)
            error = self._error(blocks, codes, scales, whole)
            better = self._error(blocks, other_codes, other_scales, whole) < error
            codes = torch.where(better, other_codes, codes)
            scales = torch.where(better, other_scales.float(), scales.float()).to(_SCALE)
        return {"codes": codes, "scales": scales, self.whole_scale: whole}

    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """See `BlockFormat.decoded`."""
        return self._values(codes, scales, packed.parts[self.whole_scale])

    def scale_search(self, weight: Tensor) -> ScaleSearch | None:
        """See `Format.scale_search`."""
        parts, (values, codes) = self.quantize(weight).parts, ascending(E2M1.values, weight.device)
        whole = parts[self.whole_scale]
        if self.block[0] == 1:
            return _Search(self, whole, values, codes)
        scales = of_rows(parts["scales"], self.block, len(weight))
        scales = scales / whole if self.divides else scales * whole
        return GivenScales(values, codes, scales, lambda codes: {**parts, "codes": pack_bits(codes, 4)})

    def _whole_scale(self, blocks: Tensor) -> Tensor:
        """The tensor's scale, or its inverse, over what is finite: (1,)."""
        absmax = blocks.nan_to_num(0.0, 0.0, 0.0).abs().amax().reshape(1)
        largest = 6.0 * (_LARGEST_SCALE_OF_SIX if self.four_over_six else _LARGEST_SCALE)
        if self.divides:
            return largest / absmax.clamp_(min=largest * SMALLEST_SCALE)
        return divide(absmax, largest).clamp_(min=SMALLEST_SCALE)

    def _round(
        self, blocks: Tensor, absmax: Tensor, whole: Tensor, top: float, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Codes (R, r, C, c) uint8 and scales (R, 1, C, 1) where a block's largest magnitude becomes top."""
        exact = divide(absmax, top)
        exact = exact * whole if self.divides else exact / whole
        scales = exact.clamp_(_SMALLEST_BLOCK_SCALE, _LARGEST_SCALE).to(_SCALE)
        if self.divides:
            scaled = blocks / (scales.float() / whole)
        else:
            scaled = blocks * ((1.0 / whole) / scales.float())
        scaled = torch.where(absmax.isnan(), 0.0, scaled.clamp_(-6.0, 6.0))
        return E2M1.codes(scaled, uniform), scales

    def _values(self, codes: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
        values = table(E2M1.values, codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
        scale = scales.float() / whole if self.divides else scales.float() * whole
        return values.view(codes.shape) * scale

    def _error(self, blocks: Tensor, codes: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
        # relative to the tensor's largest value: squares of very small or large numbers would leave float32
        inverse = whole if self.divides else 1.0 / whole
        error = (self._values(codes, scales, whole) - blocks) * inverse
        return sum_in_order(error.square(), (1, 3))


class _Search(ScaleSearch):
    """E4M3 scales under the tensor's own."""

    def __init__(self, format: NVFP4Blocks, whole: Tensor, values: Tensor, codes: Tensor) -> None:
        super().__init__(values, codes)
        self.format, self.whole = format, whole

    def candidates(self, block: Tensor) -> Iterator[Grid]:
        """See `ScaleSearch.candidates`."""
        absmax = block.abs().amax(-1, keepdim=True)
        whole = 1 / self.whole if self.format.divides else self.whole
        tried = (1.0, 1.5, *SHRINK[1:]) if self.format.four_over_six else SHRINK
        for part in tried:
            exact = (absmax * part / 6 / whole).clamp(_SMALLEST_BLOCK_SCALE, _LARGEST_SCALE)
            stored = exact.to(_SCALE).float()
            yield Grid(self.values, self.codes, stored * whole, torch.zeros_like(absmax), stored)

    def parts(self, codes: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """See `ScaleSearch.parts`."""
        stored = torch.cat([grid.stored for grid in grids], 1)
        return {"codes": pack_bits(codes, 4), "scales": stored, self.format.whole_scale: self.whole}


NVFP4 = NVFP4Blocks(name="nvfp4")
NVFP4_4O6 = NVFP4Blocks(name="nvfp4_4o6", four_over_six=True)
NVFP4_16X16 = NVFP4Blocks(name="nvfp4_16x16", block=(16, 16))

__all__ = ["NVFP4", "NVFP4_4O6", "NVFP4_16X16", "NVFP4Blocks"]
