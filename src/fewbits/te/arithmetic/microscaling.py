"""MXFP8: 32 values share a power of two, of which the exponent (E8M0) is stored.

``e = E8M0(amax / largest)``, rounded up; ``code = float8(x * 2**(127 - e))``; ``x ~ code * 2**(e - 127)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats.base import Packed, PartSpec
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.blocks import Block, scale_shape
from fewbits.formats.contract import Contract
from fewbits.formats.minifloat import power_of_e8m0
from fewbits.kernels.codec.small_blocks import by_exponents_ref, small_blocks, small_values
from fewbits.te.arithmetic.layouts import swizzled

_KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Microscaled(BlockFormat):
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
        """Write x in this format; see `Format.quantize`. A matrix on a GPU goes through a kernel."""
        if x.device.type == "cpu" or x.dim() != 2 or not x.numel():
            return super().quantize(x, seed=seed)
        codes, scales = small_blocks(x, self.torch_dtype, self.block)
        return Packed(self, tuple(x.shape), x.dtype, {"codes": codes, "scales": scales})

    units_kind = "mxfp8"

    def for_units(self, packed: Packed) -> tuple[Tensor, list[Tensor]]:
        """Codes of a packed matrix (M, K) and its scales as a GPU's units read them: see `swizzled`."""
        scales = packed.scales.repeat_interleave(self.block[0], 0)[: packed.shape[0]]
        return packed.codes.contiguous(), [swizzled(scales).view(torch.float8_e8m0fnu)]

    def in_bfloat16(self, packed: Packed) -> tuple[Tensor, None]:
        """The values of a packed matrix (M, K) in bfloat16, exact as `small_blocks` says."""
        M, K = packed.shape
        return small_values(packed.codes, packed.scales, self.block, (M, K)), None

    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """See `BlockFormat.rounded`; always to nearest."""
        codes, scales = by_exponents_ref(x.values.float(), self.torch_dtype)
        return {"codes": codes, "scales": scales}

    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """See `BlockFormat.decoded`."""
        return codes.float() * power_of_e8m0(scales)


def microscaled(dtype: torch.dtype, *, tile: bool = False) -> Microscaled:
    """The format of MXFP8 operands with codes of ``dtype``, in blocks of 32 or tiles of 32 x 32."""
    kind = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[dtype]
    return Microscaled(name=f"mxfp8_{kind}", kind=kind, block=(32, 32) if tile else (1, 32))
