"""How a format's bytes stand for numbers, as data: what the decoding kernel is generated from.

    number = scale * value(code)                  codes in a row one after the other, scales beside them
    number = d * s * value(code) - dmin * m       everything in blocks of bytes, as in GGUF's types

`Description` says where the bits of codes and scales lie (`Bits`) and what a code stands for. It is for
decoding on a GPU; the definition is the format's own `dequantize`, and a test holds each description to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Bits(NamedTuple):
    """Some bits of the numbers ``start`` to ``stop`` of a block (codes of values, or scales of sub-blocks).

    The k-th of them, k counted from ``start``, lies in byte ``at + k // (run * per_byte) * run + k % run``:
    bytes hold ``per_byte`` numbers each, and neighbours lie in ``run`` neighbouring bytes. In that byte its
    bits begin at ``first + step * (k // run % per_byte)``. They become bits ``into`` and up of the number.
    """

    stop: int
    at: int
    run: int = 1
    per_byte: int = 1
    step: int = 0
    bits: int = 8
    into: int = 0
    start: int = 0
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class Description:
    """One format.

    Attributes:
        bits: of a code, where codes lie along a row, the first in the lowest bits; 0: in blocks of bytes.
        size: values of such a block, ``nbytes`` its bytes, ``sub`` the values of a sub-block.
        codes, scales, minima: where their bits lie in a block; no ``scales``: they are 1; no ``minima``: 0,
            or, with ``low``, 1.
        half, low: the byte of the float16 that scales are multiplied by, and of that of the minima;
            -1: none.
        adds_low: that of the minima is added, not subtracted.
        kind: what a code is: a ``whole`` number less ``center``, a ``float`` of few bits, an entry of the
            ``table``, a base-three ``digit`` less 1, or the newest bits of a ``trellis`` state.
        is_signed: whole numbers are in two's complement.
        unit: what a whole number is multiplied by before all else, a power of two.
        mantissa_bits, bias, largest_code: of floats; what lies above is NaN.
        table: of 16 numbers.
        state_bits: of a trellis.
        scale_center, scale_is_signed: of the whole numbers in ``scales``.
        stored: scales beside the codes: float32, exponents ``e8m0``, or ``e4m3`` under one of the tensor, by
            which they are multiplied, or ``e4m3_divided``; in blocks ``half``, or ``exponent``, their first
            byte.
        block: (rows, columns) under one scale beside the codes.
        zero_point: whether zero points lie beside them.
        whole_part: the name of the part with the tensor's scale.
    """

    bits: int = 0
    size: int = 0
    nbytes: int = 0
    sub: int = 0
    codes: tuple[Bits, ...] = ()
    scales: tuple[Bits, ...] = ()
    minima: tuple[Bits, ...] = ()
    half: int = -1
    low: int = -1
    adds_low: bool = False
    kind: Literal["whole", "float", "table", "digit", "trellis"] = "whole"
    center: int = 0
    is_signed: bool = False
    unit: float = 1.0
    mantissa_bits: int = 0
    bias: int = 0
    largest_code: int = 0
    table: tuple[float, ...] = ()
    state_bits: int = 0
    scale_center: int = 0
    scale_is_signed: bool = False
    stored: Literal["float32", "e8m0", "e4m3", "e4m3_divided", "half", "exponent"] = "float32"
    block: tuple[int, int] = (1, 0)
    zero_point: bool = False
    whole_part: str = ""


def planes(stop: int, at: int, run: int, bits: int, into: int = 0) -> Bits:
    """Numbers 0 to ``stop``, so many of whose ``bits`` as there are room for in each byte of a run."""
    return Bits(stop, at, run, 8 // bits, bits, bits, into)


def text_of(pieces: Iterable[Bits]) -> str:
    """The pieces as a C array's rows."""
    return ",".join("{" + ",".join(map(str, piece)) + "}" for piece in pieces)
