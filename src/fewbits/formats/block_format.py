"""`BlockFormat`: what formats have in common whose scales belong to blocks of rows and columns.

Such a format differs from another in two steps only: how the values of blocks become codes and scales
(`rounded`), and how they come back (`decoded`). Everything around them is written here once: tensors without
elements, the view as blocks, the random bits, codes to bytes, and the shapes of what is stored.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.base import Format, Packed, PartSpec
from fewbits.formats.bits import pack_bits, packed_size, unpack_bits
from fewbits.formats.blocks import Block, from_blocks, own_memory, packed_nothing, scale_shape, to_blocks
from fewbits.formats.rounding import random_uniform


class Blocks(NamedTuple):
    """A tensor that is to be rounded.

    Attributes:
        values: (R, r, C, c) as of `to_blocks`, in the tensor's own dtype; zeros fill short blocks.
        uniform: None rounds to nearest; else random numbers of that shape, to round stochastically.
        shape: of the tensor.
        absmax: what its largest magnitude counts as; None: what it is.
    """

    values: Tensor
    uniform: Tensor | None
    shape: tuple[int, ...]
    absmax: float | None


@dataclass(frozen=True, kw_only=True)
class BlockFormat(Format):
    """A format of codes and scales, a scale for each block.

    Attributes:
        block: (rows, columns) that share a scale, see `fewbits.formats.blocks`.
    """

    block: Block

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8

    @abstractmethod
    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """The parts of x: codes (R, r, C, c), scales (R, 1, C, 1) and what else `layout` names."""

    @abstractmethod
    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """The values of codes (R, r, C, c) with scales (R, 1, C, 1), as float32 of the codes' shape."""

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """Codes of `bits` bits in bytes, and float32 scales; a format with other parts says its own."""
        *lead, K = shape or (1,)
        return {
            "codes": PartSpec((*lead, packed_size(K, self.bits)), torch.uint8),
            "scales": PartSpec(scale_shape(shape, self.block), torch.float32),
        }

    def to_bytes(self, codes: Tensor) -> Tensor:
        """Codes (..., K) as they are stored."""
        return pack_bits(codes, self.bits)

    def from_bytes(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The inverse of `to_bytes`: codes of ``shape`` (..., K)."""
        return unpack_bits(stored, self.bits, shape[-1]).view(shape)

    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        """Write x (any shape) in this format; see `Format.quantize`."""
        return self.quantize_under(x, None, seed=seed)

    def quantize_under(self, x: Tensor, absmax: float | None, *, seed: int | None = None) -> Packed:
        """See `Format.quantize_under`, for x of any shape."""
        nothing = packed_nothing(self, x)
        if nothing is not None:
            return nothing
        shape = tuple(x.shape)
        blocks = to_blocks(x.detach(), self.block)
        uniform = None if seed is None else to_blocks(random_uniform(shape, seed, x.device), self.block)
        parts = self.rounded(Blocks(blocks, uniform, shape, absmax))
        codes = self.to_bytes(from_blocks(parts["codes"], shape or (1,), self.block))
        parts["codes"] = own_memory(codes)
        layout = self.layout(shape)
        return Packed(self, shape, x.dtype, {n: parts[n].reshape(s.shape) for n, s in layout.items()})

    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor itself; see `Format.dequantize`."""
        stored = packed.codes
        if stored.numel() == 0:
            return torch.empty(packed.shape, dtype=dtype or packed.dtype, device=stored.device)
        codes = to_blocks(self.from_bytes(stored, packed.shape or (1,)), self.block)
        scales = packed.scales.view(codes.shape[0], 1, codes.shape[2], 1)
        x = self.decoded(codes, scales, packed)
        return from_blocks(x, packed.shape, self.block).to(dtype or packed.dtype)
