"""INT2, INT3, INT5, INT6 and INT7: the arithmetic of `fewbits.formats.integer` in the other widths.

A scale for a row, or for 32, 64 or 128 values of it, with or without a zero point. The codes of a row are one
stream of bits. Two bits without a zero point leave the codes -1, 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.formats.base import Family
from fewbits.formats.integer import WholeNumbers


@dataclass(frozen=True, kw_only=True)
class NarrowInteger(WholeNumbers):
    """`WholeNumbers` of 2, 3, 5, 6 or 7 bits; its definition computes it on every device."""


_BLOCKS = {"": (1, 0), "_g32": (1, 32), "_g64": (1, 64), "_g128": (1, 128)}
NARROW_INTEGERS = Family(
    (
        NarrowInteger(name=f"int{bits}{suffix}{end}", bits=bits, block=block, zero_point=bool(end))
        for bits in (2, 3, 5, 6, 7)
        for suffix, block in _BLOCKS.items()
        for end in ("", "_zp")
    ),
    typical=[f"int{bits}_g128{end}" for bits in (3, 5) for end in ("", "_zp")],
)

__all__ = ["NARROW_INTEGERS", "NarrowInteger"]
