"""FP8: E4M3 and E5M2 (Micikevicius et al. 2022) times a scale, per tensor, per row, or per tile.

``scale = absmax / largest`` with largest 448 (E4M3) or 57344 (E5M2); ``code = float8(x * (1 / scale))`` by
torch's own cast (to nearest, ties to even), cut to plus or minus the largest first; ``x ~ code * scale``. All
in float32. A scale is never below 2**-126; a block with a NaN or an infinity has a NaN as its scale and codes
0.

Requantising a decoded tensor gives the same codes, whether it was kept in float32, float16 or bfloat16: the
error of the decoded value and of the new scale, 2 * 2**-8 at most, is below half a step of the codes (2**-5
and 2**-4). (Not where float16 itself runs out of exponent.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fewbits.formats.base import Packed, PartSpec
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.blocks import SMALLEST_SCALE, Block, block_absmax, divide, scale_shape
from fewbits.formats.contract import Coding, Contract
from fewbits.formats.rounding import round_to_integer
from fewbits.formats.scale_search import GivenScales, Grid, ScaleSearch, ascending, of_rows

# mantissa bits, exponent of the smallest normal number, largest number, torch's type
_KINDS = {"e4m3": (3, -6, 448.0, torch.float8_e4m3fn), "e5m2": (2, -14, 57344.0, torch.float8_e5m2)}


@dataclass(frozen=True, kw_only=True)
class Float8(BlockFormat):
    """Eight-bit floating point times a scale.

    Attributes:
        kind: "e4m3" or "e5m2": exponent and mantissa bits.
        block: (rows, columns) that share a scale, see `fewbits.formats.blocks`: (0, 0) is per tensor, (1, 0)
            per row, (1, 128) 128 values along the last axis, (128, 128) a tile.

    Parts: ``codes`` of the tensor's shape, in torch's float8 type; ``scales`` float32.
    """

    kind: str = "e4m3"
    block: Block = (0, 0)

    def problem(self) -> str | None:
        """See `Format.problem`."""
        is_listed = self.kind in _KINDS
        return (
            super().problem() if is_listed else f"kind is {self.kind!r}, and it is one of {', '.join(_KINDS)}"
        )

    def promise(self) -> Contract:
        """See `Format.promise`."""
        kind: Literal["e4m3", "e5m2"] = "e4m3" if self.kind == "e4m3" else "e5m2"
        return Contract(
            largest_error=2.0 ** -(1 + _KINDS[kind][0]),
            block=self.block,
            coding=Coding(kind=kind, bits=8, block=self.block),
            rounds_plainly=True,
            again_bits=8,
            names={"compressed-tensors": "float-quantized"} if kind == "e4m3" else {},
            stored_as={"codes": "weight", "scales": "weight_scale"} if kind == "e4m3" else {},
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the codes."""
        return _KINDS[self.kind][3]

    @property
    def largest(self) -> float:
        """The largest finite code: 448 or 57344."""
        return _KINDS[self.kind][2]

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of ``shape``."""
        return {
            "codes": PartSpec(shape or (1,), self.torch_dtype),
            "scales": PartSpec(scale_shape(shape, self.block), torch.float32),
        }

    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """See `BlockFormat.rounded`; one scale of all is that of ``x.absmax``."""
        largest = block_absmax(x.values)
        if x.absmax is not None and self.block == (0, 0):
            largest = torch.full_like(largest, x.absmax)
        scales = divide(largest, self.largest).clamp_(min=SMALLEST_SCALE)
        scaled = (x.values.float() * (1.0 / scales)).clamp_(-self.largest, self.largest).nan_to_num_(0.0)
        if x.uniform is not None:
            scaled = self._round_stochastic(scaled, x.uniform)
        return {"codes": scaled.to(self.torch_dtype), "scales": scales}

    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """See `BlockFormat.decoded`."""
        return codes.float() * scales

    def scale_search(self, weight: Tensor) -> ScaleSearch | None:
        """See `Format.scale_search`; the scales of tiles and of the tensor stay those of `quantize`."""
        numbers = torch.arange(256, dtype=torch.uint8).view(self.torch_dtype).float().tolist()
        listed = [v if abs(v) <= self.largest else torch.nan for v in numbers]
        values, codes = ascending(listed, weight.device)
        if self.block[0] == 1:
            return _Search(values, codes, self.torch_dtype)
        scales = self.quantize(weight).scales

        def parts_of(codes: Tensor) -> dict[str, Tensor]:
            return {"codes": codes.view(self.torch_dtype), "scales": scales}

        return GivenScales(values, codes, of_rows(scales, self.block, len(weight)), parts_of)

    def _round_stochastic(self, x: Tensor, uniform: Tensor) -> Tensor:
        """To one of the two neighbouring numbers of the kind, so that the later cast is exact."""
        mantissa_bits, lowest, _, _ = _KINDS[self.kind]
        exponent = ((x.view(torch.int32) >> 23) & 0xFF).clamp_(min=lowest + 127)
        step = ((exponent - mantissa_bits) << 23).view(
            torch.float32
        )  # a power of two, so nothing below rounds
        return round_to_integer(x / step, uniform) * step


class _Search(ScaleSearch):
    """A scale for each block of a row; larger ones than the smallest possible move the codes' places."""

    continuous = True

    def __init__(self, values: Tensor, codes: Tensor, dtype: torch.dtype) -> None:
        super().__init__(values, codes)
        self.dtype = dtype

    def candidates(self, block: Tensor) -> Iterator[Grid]:
        """See `ScaleSearch.candidates`."""
        absmax = block.abs().amax(-1, keepdim=True)
        for quarter in range(4):
            scale = (divide(absmax, float(self.values[-1])) * 2 ** (quarter / 4)).clamp_min(SMALLEST_SCALE)
            yield Grid(self.values, self.codes, scale, torch.zeros_like(scale), scale)

    def parts(self, codes: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """See `ScaleSearch.parts`."""
        return {
            "codes": codes.view(self.dtype),
            "scales": torch.cat([grid.stored for grid in grids], 1),
        }


def _family(kind: str) -> tuple[Float8, ...]:
    name = f"float8_{kind}"
    return (
        Float8(name=name, kind=kind, block=(0, 0)),
        Float8(name=f"{name}_row", kind=kind, block=(1, 0)),
        Float8(name=f"{name}_1x128", kind=kind, block=(1, 128)),
        Float8(name=f"{name}_128x128", kind=kind, block=(128, 128)),
    )


E4M3, E4M3_ROW, E4M3_1X128, E4M3_128X128 = _family("e4m3")
E5M2, E5M2_ROW, E5M2_1X128, E5M2_128X128 = _family("e5m2")

__all__ = [
    "E4M3",
    "E4M3_1X128",
    "E4M3_128X128",
    "E4M3_ROW",
    "E5M2",
    "E5M2_1X128",
    "E5M2_128X128",
    "E5M2_ROW",
    "Float8",
]
