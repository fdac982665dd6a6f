"""Where GGUF's types keep their bits, as the decoding kernel is told; `gguf_layouts` has the same as code."""

from __future__ import annotations

from dataclasses import replace

from fewbits.formats.description import Bits, Description, planes
from fewbits.formats.k_quants import IQ4_VALUES
from fewbits.formats.minifloat import E2M1


def _old(nbytes: int, *codes: Bits, **words: object) -> Description:
    """A type of one block of 32 values, whose float16 stands first."""
    start = Description(size=32, nbytes=nbytes, sub=32, codes=codes, half=0, stored="half")
    return replace(start, **words)  # type: ignore[arg-type]


def _large(nbytes: int, sub: int, half: int, *codes: Bits, **words: object) -> Description:
    """A type of blocks of 256 values in sub-blocks of ``sub``."""
    start = Description(size=256, nbytes=nbytes, sub=sub, codes=codes, half=half, stored="half")
    return replace(start, **words)  # type: ignore[arg-type]


_FIFTHS = planes(32, 2, 1, 1, into=4)
# Eight scales of 6 bits from the fifth byte on: four whole ones, then low and high bits of the others.
_SIXES = (
    Bits(4, 4, 4, bits=6),
    Bits(8, 12, 4, bits=4, start=4),
    Bits(8, 4, 4, bits=2, into=4, start=4, first=6),
)
_SIX_MINIMA = (
    Bits(4, 8, 4, bits=6),
    Bits(8, 12, 4, bits=4, start=4, first=4),
    Bits(8, 8, 4, bits=2, into=4, start=4, first=6),
)

DESCRIPTIONS = {
    "Q4_0": _old(18, planes(32, 2, 16, 4), center=8),
    "Q4_1": _old(20, planes(32, 4, 16, 4), low=2, adds_low=True),
    "Q5_0": _old(22, planes(32, 6, 16, 4), _FIFTHS, center=16),
    "Q5_1": _old(24, planes(32, 8, 16, 4), planes(32, 4, 1, 1, into=4), low=2, adds_low=True),
    "Q8_0": _old(34, planes(32, 2, 1, 8), is_signed=True),
    "IQ4_NL": _old(18, planes(32, 2, 16, 4), kind="table", table=IQ4_VALUES),
    "MXFP4": _old(17, planes(32, 1, 16, 4), half=-1, stored="exponent", **E2M1.described),
    "Q2_K": _large(
        84, 16, 80, planes(256, 16, 32, 2),
        scales=(Bits(16, 0, 16, bits=4),), minima=(Bits(16, 0, 16, bits=4, first=4),), low=82,
    ),
    "Q3_K": _large(
        110, 16, 108, planes(256, 32, 32, 2), planes(256, 0, 32, 1, into=2),
        scales=(planes(16, 96, 8, 4), planes(16, 104, 4, 2, into=4)), center=4, scale_center=32,
    ),
    "Q4_K": _large(144, 32, 0, planes(256, 16, 32, 4), scales=_SIXES, minima=_SIX_MINIMA, low=2),
    "Q5_K": _large(
        176, 32, 0, planes(256, 48, 32, 4), planes(256, 16, 32, 1, into=4),
        scales=_SIXES, minima=_SIX_MINIMA, low=2,
    ),
    "Q6_K": _large(
        210, 16, 208, planes(256, 0, 64, 4), planes(256, 128, 32, 2, into=4),
        scales=(planes(16, 192, 16, 8),), center=32, scale_is_signed=True,
    ),
    "IQ4_XS": _large(
        136, 32, 0, planes(256, 8, 16, 4), kind="table", table=IQ4_VALUES,
        scales=(planes(8, 4, 1, 4), planes(8, 2, 1, 2, into=4)), scale_center=32,
    ),
    "TQ1_0": _large(
        54, 256, 52, Bits(160, 0, 32, 5), Bits(240, 32, 16, 5, start=160), Bits(256, 48, 4, 4, start=240),
        kind="digit",
    ),
    "TQ2_0": _large(66, 256, 64, planes(256, 0, 32, 2), center=1),
}  # fmt: skip
