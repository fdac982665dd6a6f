"""MX formats of the OCP Microscaling specification 1.0: 32 values of few bits under a power of two.

A block's scale is ``2 ** (floor(log2(absmax)) - emax)``, where emax is the exponent of the element's largest
number (8 for E4M3, 15 for E5M2, 2 for E2M3 and E2M1, 4 for E3M2, 0 for INT8), stored as an E8M0 code, the
exponent plus 127. An element is ``x / scale``, rounded to nearest (ties to even) and saturated. For INT8 an
element is a whole number of 64ths from -127 to 127; the code -128 is left unused.

A block with a NaN or an infinity has the scale 255, which means NaN, and codes 0. A block of zeros has the
scale 0. What lies below the smallest scale, 2**-127, is rounded with that.

Requantising a decoded tensor gives the same codes and scales, in float32 and in bfloat16, because the largest
element keeps its exponent, and in float16 where its range suffices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats.base import Packed, PartSpec
from fewbits.formats.bits import pack_bits, packed_size
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.blocks import Block, block_absmax, scale_shape
from fewbits.formats.contract import Contract
from fewbits.formats.description import Description
from fewbits.formats.minifloat import MINIFLOATS, exponential, power_of_e8m0
from fewbits.formats.rounding import round_to_integer
from fewbits.formats.scale_search import Grid, ScaleSearch, ascending
from fewbits.formats.tables import table

_NAN = 255  # the E8M0 code
_INT8_VALUES = tuple((i if i < 128 else i - 256) / 64 for i in range(256))
# compressed-tensors' name for the packing, and for the part that holds the codes
_STORED = {
    "e2m1": ("mxfp4-pack-quantized", "weight_packed"),
    "e2m3": ("mxfp6-pack-quantized", "weight_packed"),
    "e4m3": ("mxfp8-quantized", "weight"),
}


@dataclass(frozen=True, kw_only=True)
class Microscaling(BlockFormat):
    """Elements of few bits in blocks with a power of two each.

    Attributes:
        element: "e4m3", "e5m2", "e2m3", "e3m2", "e2m1" or "int8".
        block: (rows, columns) that share a scale, see `fewbits.formats.blocks`; the specification's is
            (1, 32).

    Parts: ``codes`` (..., ceil(K * bits / 8)) uint8, the first code in the lowest bits; ``scales`` uint8.
    """

    element: str
    block: Block = (1, 32)

    def problem(self) -> str | None:
        """See `Format.problem`."""
        elements = (*MINIFLOATS, "int8")
        if self.element not in elements:
            return f"element is {self.element!r}, and it is one of {', '.join(elements)}"
        return super().problem()

    def promise(self) -> Contract:
        """See `Format.promise`.

        The largest element is 2 - u times a power of two, for steps of u there, and what would lie above it
        is cut: as much as half a step of the numbers below twice that power, u / 2.
        """
        kind = MINIFLOATS.get(self.element)
        mantissa_bits = 6 if kind is None else kind.mantissa_bits
        # E4M3 has no number where the largest mantissa would be, so twice as much is cut.
        missing = kind is not None and (kind.largest_code + 1) % 2**mantissa_bits != 0
        form, codes = _STORED.get(self.element, ("", "")) if self.block == (1, 32) else ("", "")
        return Contract(
            largest_error=2.0 ** -(1 + mantissa_bits - missing),
            block=self.block,
            description=self._described(),
            cuts=True,
            again_bits=8,
            names={"compressed-tensors": form} if form else {},
            stored_as={"codes": codes, "scales": "weight_scale"} if form else {},
        )

    def _described(self) -> Description:
        if self.element == "int8":
            return Description(bits=8, is_signed=True, unit=1 / 64, stored="e8m0", block=self.block)
        return Description(
            bits=self.bits, stored="e8m0", block=self.block, **MINIFLOATS[self.element].described
        )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.element == "int8" else MINIFLOATS[self.element].bits

    @property
    def values(self) -> tuple[float, ...]:
        """What each code stands for."""
        return _INT8_VALUES if self.element == "int8" else MINIFLOATS[self.element].values

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of ``shape``."""
        *lead, K = shape or (1,)
        return {
            "codes": PartSpec((*lead, packed_size(K, self.bits)), torch.uint8),
            "scales": PartSpec(scale_shape(shape, self.block), torch.uint8),
        }

    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """See `BlockFormat.rounded`."""
        scales = self._scales(block_absmax(x.values))
        scaled = (x.values.float() * exponential(-scales)).nan_to_num_(0.0)
        codes = self._codes(scaled, x.uniform)
        scales = torch.where(scales.isnan(), float(_NAN), scales + 127)
        return {"codes": codes, "scales": scales.to(torch.uint8)}

    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """See `BlockFormat.decoded`."""
        numbers = table(self.values, codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
        return numbers.view(codes.shape) * power_of_e8m0(scales)

    def scale_search(self, weight: Tensor) -> ScaleSearch | None:
        """See `Format.scale_search`."""
        if self.block[0] != 1:
            return None
        return _Search(self, *ascending(self.values, weight.device))

    def _scales(self, absmax: Tensor) -> Tensor:
        """The exponent of each block's scale as float32, NaN where absmax is NaN."""
        highest = 0 if self.element == "int8" else MINIFLOATS[self.element].highest_exponent
        exponent = ((absmax.view(torch.int32) >> 23) & 0xFF) - 127 - highest
        return exponent.clamp_(min=-127).float().masked_fill_(absmax.isnan(), torch.nan)

    def _codes(self, scaled: Tensor, uniform: Tensor | None) -> Tensor:
        if self.element == "int8":
            return round_to_integer(scaled * 64, uniform).clamp_(-127, 127).to(torch.int8).view(torch.uint8)
        return MINIFLOATS[self.element].codes(scaled, uniform)


class _Search(ScaleSearch):
    """The power of two that the format takes, the one below and the one above."""

    def __init__(self, format: Microscaling, values: Tensor, codes: Tensor) -> None:
        super().__init__(values, codes)
        self.format = format

    def candidates(self, block: Tensor) -> Iterator[Grid]:
        """See `ScaleSearch.candidates`."""
        plain = self.format.quantize(block).scales.view(-1, 1).float()
        for step in (0, -1, 1):
            stored = (plain + step).clamp(0, 254)
            yield Grid(self.values, self.codes, exponential(stored - 127), torch.zeros_like(stored), stored)

    def parts(self, codes: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """See `ScaleSearch.parts`."""
        stored = torch.cat([grid.stored for grid in grids], 1)
        return {"codes": pack_bits(codes, self.format.bits), "scales": stored}


MXFP8_E4M3 = Microscaling(name="mxfp8_e4m3", element="e4m3")
MXFP8_E5M2 = Microscaling(name="mxfp8_e5m2", element="e5m2")
MXFP6_E2M3 = Microscaling(name="mxfp6_e2m3", element="e2m3")
MXFP6_E3M2 = Microscaling(name="mxfp6_e3m2", element="e3m2")
MXFP4 = Microscaling(name="mxfp4", element="e2m1")
MXINT8 = Microscaling(name="mxint8", element="int8")

__all__ = [
    "MXFP4",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "MXINT8",
    "Microscaling",
]
