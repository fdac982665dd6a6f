"""NVFP4: E2M1 values; 16 of them share an E4M3 scale, and the tensor (or a row) a float32 one.

With ``A`` the tensor's amax and ``g = (448 * 6) / A``: a block's scale is ``s = e4m3(amax * (g * (1 / 6)))``
and its values are ``e2m1(x * (1 / (s * (1 / g))))``, to nearest (ties to the even code) or stochastically.
Coming back: ``x ~ code * s * A / (448 * 6)``. A block is 16 values along the last axis or a tile of 16 x 16.

"Four over six" tries for each block, beside the scale above, one that is 1.5 times as large, so that the
largest value becomes 4 instead of 6, and keeps the one with the smaller error, 6 where they are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats.base import Packed, PartSpec
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.contract import Contract
from fewbits.formats.minifloat import E2M1
from fewbits.kernels.codec.float8_operands import amax_of
from fewbits.kernels.codec.small_blocks import (
    by_e4m3_ref,
    e2m1_codes,
    e2m1_values,
    e4m3_scales,
    inverse_of_scale,
    multiplier_of_tensor,
    small_blocks,
    small_values,
)
from fewbits.te.arithmetic.layouts import swizzled

_LARGEST = E2M1.largest  # 6
_E4M3_LARGEST = 448.0


@dataclass(frozen=True, kw_only=True)
class Float4(BlockFormat):
    """Two-level block scaling of E2M1 values.

    Attributes:
        block: (1, 16), or (16, 16) for tiles.
        by_row: each row has its own amax.
        four_over_six: "" or the error that chooses, "MAE" or "MSE".
        scale_bound: 448, or 256 with `four_over_six`: the largest E4M3 scale.

    Parts: ``codes`` (..., ceil(K / 2)) uint8, two a byte, the first in the low nibble; ``scales`` E4M3;
        ``amax`` float32 of shape (1,) or, by rows, (rows, 1).
    """

    block: tuple[int, int] = (1, 16)
    by_row: bool = False
    four_over_six: str = ""
    scale_bound: float = _E4M3_LARGEST

    def promise(self) -> Contract:
        """See `Format.promise`: half the step from 4 to 6, under a scale that was rounded up."""
        return Contract(largest_error=(1 + 2.0**-4) / 6, block=self.block, tensor_scale=True, cuts=True)

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of shape (M, K)."""
        M, K = shape
        r, c = self.block
        return {
            "codes": PartSpec((M, -(-K // 2)), torch.uint8),
            "scales": PartSpec((-(-M // r), -(-K // c)), torch.float8_e4m3fn),
            "amax": PartSpec((M, 1) if self.by_row else (1,), torch.float32),
        }

    @property
    def largest_of_tensor(self) -> float:
        """The largest value before the float32 scale: a code of 6 under the largest scale."""
        return self.scale_bound * _LARGEST

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4

    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        """Write x in this format; see `Format.quantize`. A matrix on a GPU goes through a kernel."""
        plain = not self.by_row and not self.four_over_six
        if x.device.type == "cpu" or x.dim() != 2 or not x.numel() or not plain:
            return super().quantize(x, seed=seed)
        amax = amax_of(x.contiguous())
        bound = self.scale_bound
        codes, scales = small_blocks(x, torch.uint8, self.block, amax=amax, bound=bound, seed=seed)
        return Packed(self, tuple(x.shape), x.dtype, {"codes": codes, "scales": scales, "amax": amax})

    @property
    def units_kind(self) -> str | None:
        """What a GPU's units know it as: with one float32 scale for the tensor alone."""
        return None if self.by_row else "nvfp4"

    def for_units(self, packed: Packed) -> tuple[Tensor, list[Tensor]]:
        """Codes of a packed matrix (M, K), two a byte, its scales as units read them, and its float32 one."""
        scales = packed.scales.view(torch.uint8).repeat_interleave(self.block[0], 0)[: packed.shape[0]]
        codes = packed.codes.contiguous().view(torch.float4_e2m1fn_x2)
        whole = (packed.parts["amax"] / self.largest_of_tensor).reshape(1)
        return codes, [swizzled(scales).view(torch.float8_e4m3fn), whole]

    def in_bfloat16(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """A packed matrix (M, K) without its float32 scale, exact in bfloat16, and that scale (1 or M, 1)."""
        M, K = packed.shape
        values = small_values(packed.codes, packed.scales, self.block, (M, K))
        return values, packed.parts["amax"].reshape(-1, 1) / self.largest_of_tensor

    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """See `BlockFormat.rounded`, for x (M, K)."""
        blocks = x.values.float()
        block_amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
        amax = block_amax.amax(dim=2 if self.by_row else (0, 2), keepdim=True)
        encode = multiplier_of_tensor(amax, self.scale_bound)
        if self.four_over_six:
            codes, scales = self._better_of_two(blocks, block_amax, amax, encode)
        else:
            codes, scales = by_e4m3_ref(blocks, block_amax, encode, x.uniform)
        return {"codes": codes, "scales": scales, "amax": amax}

    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """See `BlockFormat.decoded`."""
        amax = packed.parts["amax"]
        whole = (amax / amax.new_full((), self.largest_of_tensor)).view(-1, 1, 1, 1)
        return e2m1_values(codes) * (scales.float() * whole)

    def _better_of_two(
        self, blocks: Tensor, block_amax: Tensor, amax: Tensor, encode: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Codes (R, r, C, c) and scales (R, 1, C, 1): largest value 4 or 6, whichever errs less."""
        base = (block_amax / block_amax.new_full((), _LARGEST)) * encode
        results = []
        for scales in (e4m3_scales(base * 1.5), e4m3_scales(base)):
            codes = e2m1_codes(blocks * inverse_of_scale(scales, encode))
            decoded = e2m1_values(codes) * scales.float() * amax
            difference = decoded / amax.new_full((), self.largest_of_tensor) - blocks
            error = difference.abs() if self.four_over_six == "MAE" else difference * difference
            results.append((codes, scales, _sum_in_order(error)))
        (codes4, scales4, error4), (codes6, scales6, error6) = results
        four = error4 < error6
        scales = torch.where(four, scales4.view(torch.uint8), scales6.view(torch.uint8))
        return torch.where(four, codes4, codes6), scales.view(torch.float8_e4m3fn)


def is_float4(packed: Packed) -> bool:
    """Whether a matrix is in a format of this file."""
    return isinstance(packed.format, Float4)


def tensor_scale_apart(packed: Packed) -> tuple[Tensor, Tensor]:
    """What a matrix (M, K) stands for without its float32 scale, and that scale, (1, 1) or (M, 1).

    A code times its block's scale has few bits, so that sums of their products are nearly exact; a product
    unit multiplies them by the float32 scales once, at the end.
    """
    assert isinstance(packed.format, Float4)
    amax, largest = packed.parts["amax"], packed.format.largest_of_tensor
    parts = {**packed.parts, "amax": torch.full_like(amax, largest)}
    values = Packed(packed.format, packed.shape, packed.dtype, parts).dequantize(torch.float32)
    return values, amax.reshape(-1, 1) / largest


def _sum_in_order(error: Tensor) -> Tensor:
    """(R, r, C, c) to (R, 1, C, 1): columns from the left, then rows by halves, as a warp adds them."""
    total = torch.zeros_like(error[..., :1])
    for column in range(error.shape[3]):
        total = total + error[..., column : column + 1]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total


SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of the random Hadamard transform, which Transformer Engine publishes and keeps fixed."""


def rotate(x: Tensor, *, signs: bool = True) -> Tensor:
    """The Hadamard transform of blocks of 16 along the last axis, times 1/4, in float32.

    Both operands of a product are rotated, so that the product stays what it was.

    Args:
        x: (M, K), K a multiple of 16.
        signs: flip the values by `SIGNS` first.

    Returns:
        (M, K) in x's dtype.
    """
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while matrix.shape[0] < 16:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    if signs:
        matrix = torch.tensor(SIGNS, dtype=torch.float32)[:, None] * matrix
    matrix = (matrix * 0.25).to(x.device)
    if (
        x.device.type != "cpu" and x.dtype == torch.bfloat16
    ):  # which holds both: its units round each sum once
        return (x.reshape(-1, 16) @ matrix.to(x.dtype)).view(x.shape)
    return (x.float().reshape(-1, 16) @ matrix).view(x.shape).to(x.dtype)


NVFP4 = Float4(name="nvfp4")
NVFP4_TILE = Float4(name="nvfp4_16x16", block=(16, 16))
