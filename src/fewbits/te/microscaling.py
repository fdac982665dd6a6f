"""MXFP8: 32 values share a power of two, of which the exponent (E8M0) is stored.

``e = E8M0(amax / largest)``, rounded up; ``code = float8(x * 2**(127 - e))``; ``x ~ code * 2**(e - 127)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats.base import Format, Packed, PartSpec
from fewbits.formats.blocks import Block, from_blocks, scale_shape, to_blocks
from fewbits.formats.contract import Contract
from fewbits.te.scaling import exponents_of_amax, power_of_exponent, to_float8

_KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Microscaled(Format):
    """Eight-bit floating point with shared exponents.

    Attributes:
        kind: "e4m3" or "e5m2".
        block: (1, 32), or (32, 32) for tiles.

    Parts: ``codes`` of the tensor's shape in torch's float8 type; ``scales`` uint8, biased exponents.
    """

    kind: str = "e4m3"
    block: Block = (1, 32)

    def promise(self) -> Contract:
        """See `Format.promise`."""
        return Contract(largest_error=2.0**-4 if self.kind == "e4m3" else 2.0**-3, block=self.block)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the codes."""
        return _KINDS[self.kind]

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of ``shape``."""
        scales = PartSpec(scale_shape(shape, self.block), torch.uint8)
        return {"codes": PartSpec(shape, self.torch_dtype), "scales": scales}

    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        """Write x (M, K) in this format, to nearest; see `Format.quantize`. ``seed`` is not used."""
        del seed
        blocks = to_blocks(x.detach().float(), self.block)
        scales = exponents_of_amax(blocks.abs().amax(dim=(1, 3), keepdim=True), self.torch_dtype)
        codes = to_float8(blocks * power_of_exponent(scales, inverse=True), self.torch_dtype)
        shape = tuple(x.shape)
        parts = {
            "codes": from_blocks(codes, shape, self.block),
            "scales": scales.view(scale_shape(shape, self.block)),
        }
        return Packed(self, shape, x.dtype, parts)

    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor itself; see `Format.dequantize`."""
        blocks = to_blocks(packed.codes.float(), self.block)
        scales = power_of_exponent(packed.scales).view(blocks.shape[0], 1, blocks.shape[2], 1)
        return from_blocks(blocks * scales, packed.shape, self.block).to(dtype or packed.dtype)


def microscaled(dtype: torch.dtype, *, tile: bool = False) -> Microscaled:
    """The format of MXFP8 operands with codes of ``dtype``, in blocks of 32 or tiles of 32 x 32."""
    kind = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[dtype]
    return Microscaled(name=f"mxfp8_{kind}", kind=kind, block=(32, 32) if tile else (1, 32))
