"""Whole numbers whose columns name the group that they belong to: GPTQ with activation order.

The arithmetic is `fewbits.formats.integer`'s; only, the scale and the zero point of column k are those of
group ``group_index[k]``, and the columns of a group need not be neighbours. What is quantised here has them
as neighbours; other orders come with a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.base import Family, Format, Packed, PartSpec, is_whole
from fewbits.formats.bits import unpack_bits
from fewbits.formats.contract import Contract
from fewbits.formats.integer import WholeNumbers
from fewbits.formats.integer_widths import NarrowInteger


@dataclass(frozen=True, kw_only=True)
class IndexedInteger(Format):
    """Whole numbers in groups of columns that lie anywhere.

    Attributes:
        bits: 2, 3, 4 or 8.
        group: columns that share a scale.

    Parts: those of `WholeNumbers` with a zero point and blocks of (1, group), and ``group_index`` (K,) int32.
    """

    bits: int
    group: int = 128

    def problem(self) -> str | None:
        """See `Format.problem`."""
        if is_whole(self.bits, 2, 8) and is_whole(self.group, 1):
            return None
        return f"bits={self.bits!r}, group={self.group!r}; they are 2 to 8, and a number of columns"

    def promise(self) -> Contract:
        """See `Format.promise`: that of `ordered`, but no kernel looks a column's group up."""
        ordered = self.ordered.contract
        return replace(ordered, coding=None, indexed=ordered.coding, rounds_plainly=False)

    @property
    def ordered(self) -> WholeNumbers:
        """The format whose groups are neighbours; it has the same parts but the index."""
        return NarrowInteger(name="ordered", bits=self.bits, block=(1, self.group), zero_point=True)

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of ``shape``."""
        *_, K = shape or (1,)
        return {**self.ordered.layout(shape), "group_index": PartSpec((K,), torch.int32)}

    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        """Write x in this format; see `Format.quantize`."""
        ordered = self.ordered.quantize(x, seed=seed)
        K = x.shape[-1] if x.dim() else 1
        index = torch.arange(K, device=x.device, dtype=torch.int32) // self.group
        return Packed(self, ordered.shape, x.dtype, {**ordered.parts, "group_index": index})

    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor itself; see `Format.dequantize`."""
        whole, codes, index = packed.shape or (1,), packed.codes, packed.parts["group_index"].long()
        if codes.numel() == 0:
            return torch.empty(packed.shape, dtype=dtype or packed.dtype, device=codes.device)
        if self.bits < 8:
            codes, sign = unpack_bits(codes, self.bits, whole[-1]).view(torch.int8), 2 ** (self.bits - 1)
            codes = (codes ^ sign) - sign
        values = codes.float() - packed.parts["zero_points"].float()[..., index]
        x = values * packed.scales[..., index]
        return x.to(dtype or packed.dtype).view(packed.shape)


def check_index(index: Tensor, groups: int, name: str) -> None:
    """Refuse an index (K,) that names groups which are not there."""
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= groups):
        raise BadInput(f"{name} names group {int(index.max())} of {groups}; fetch the file again.")


INDEXED_INTEGERS = Family(
    (IndexedInteger(name=f"int{bits}_indexed", bits=bits) for bits in (2, 3, 4, 8)), typical=["int4_indexed"]
)

__all__ = ["INDEXED_INTEGERS", "IndexedInteger"]
