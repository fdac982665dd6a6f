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

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fewbits.formats.base import Packed, PartSpec
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.blocks import SMALLEST_SCALE, Block, block_absmax, divide, scale_shape
from fewbits.formats.contract import Coding, Contract
from fewbits.formats.rounding import round_to_integer

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

    def _round_stochastic(self, x: Tensor, uniform: Tensor) -> Tensor:
        """To one of the two neighbouring numbers of the kind, so that the later cast is exact."""
        mantissa_bits, lowest, _, _ = _KINDS[self.kind]
        exponent = ((x.view(torch.int32) >> 23) & 0xFF).clamp_(min=lowest + 127)
        step = ((exponent - mantissa_bits) << 23).view(
            torch.float32
        )  # a power of two, so nothing below rounds
        return round_to_integer(x / step, uniform) * step


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
