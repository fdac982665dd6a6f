"""Floating-point numbers of 4, 6 and 8 bits, without infinities: how a float32 becomes a code and comes back.

A code is sign, exponent, mantissa, from the highest bit down. Rounding is to nearest, ties to even, or
stochastic; what is too large takes the largest number. Both zeros exist, and a negative number that rounds to
zero takes the negative one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fewbits.formats.rounding import round_to_integer


@dataclass(frozen=True)
class Minifloat:
    """One kind of small floating-point number.

    Attributes:
        exponent_bits: width of the exponent.
        mantissa_bits: width of the mantissa.
        largest_code: the code of the largest finite number. The codes above it stand for no number: they are
            never written, and decode to NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    largest_code: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def described(self) -> dict[str, Any]:
        """The fields of a `fewbits.formats.description.Description` of such codes."""
        return {
            "kind": "float",
            "mantissa_bits": self.mantissa_bits,
            "bias": 1 - self.lowest_exponent,
            "largest_code": self.largest_code,
        }

    @property
    def lowest_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - int(2 ** (self.exponent_bits - 1))

    @property
    def highest_exponent(self) -> int:
        """Exponent of the largest number."""
        return (self.largest_code >> self.mantissa_bits) + self.lowest_exponent - 1

    @property
    def largest(self) -> float:
        """The largest number."""
        return self.values[self.largest_code]

    @cached_property
    def values(self) -> tuple[float, ...]:
        """What each of the ``2**bits`` codes stands for; NaN for those that stand for none."""
        positive = []
        for code in range(2 ** (self.bits - 1)):
            exponent, mantissa = code >> self.mantissa_bits, code & (2**self.mantissa_bits - 1)
            fraction = mantissa / 2**self.mantissa_bits + (exponent > 0)
            value = fraction * 2.0 ** (max(exponent, 1) - 1 + self.lowest_exponent)
            positive.append(value if code <= self.largest_code else float("nan"))
        return (*positive, *(-v for v in positive))

    def codes(self, x: Tensor, uniform: Tensor | None = None) -> Tensor:
        """The codes of x.

        Args:
            x: any shape, float32, finite.
            uniform: None rounds to nearest; else `random_uniform` of x's shape, to round stochastically.

        Returns:
            uint8 of x's shape.
        """
        lowest, m = self.lowest_exponent, self.mantissa_bits
        exponent = ((x.view(torch.int32) >> 23) & 0xFF).clamp_(min=lowest + 127)
        # the inverse of the step between neighbours: a power of two, so nothing below rounds but the rounding
        inverse_step = ((254 - exponent + m) << 23).view(torch.float32)
        steps = round_to_integer(x * inverse_step, uniform)
        # A normal number has 2**m steps for its leading one, which is just what the next exponent adds.
        magnitude = steps.abs().to(torch.int32) + ((exponent - 127 - lowest) << m)
        magnitude.clamp_(max=self.largest_code)
        sign = torch.signbit(x) & (steps <= 0)
        return (magnitude | (sign.to(torch.int32) << (self.bits - 1))).to(torch.uint8)


E2M1 = Minifloat(2, 1, 0x7)
E2M3 = Minifloat(2, 3, 0x1F)
E3M2 = Minifloat(3, 2, 0x1F)
E4M3 = Minifloat(4, 3, 0x7E)
E5M2 = Minifloat(5, 2, 0x7B)

MINIFLOATS = {"e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2, "e4m3": E4M3, "e5m2": E5M2}


def exponential(exponent: Tensor) -> Tensor:
    """``2 ** exponent`` exactly, for whole float32 numbers from -149 to 127; NaN for NaN.

    Any shape; the result has the same.
    """
    half = (exponent / 2).floor()  # each factor is a normal number, so their product is exact or subnormal
    return torch.exp2(half) * torch.exp2(exponent - half)


def power_of_e8m0(exponents: Tensor, *, inverse: bool = False) -> Tensor:
    """``2**(e - 127)`` of E8M0 codes as float32, or its inverse; NaN for 255.

    Args:
        exponents: any shape, uint8.
        inverse: ``2**(127 - e)``.
    """
    e = exponents.to(torch.int32)
    e = 254 - e if inverse else e
    bits = torch.where(e > 0, e << 23, torch.full_like(e, 0x400000))  # 2**-127 is not a normal number
    return torch.where(exponents == 255, torch.nan, bits.view(torch.float32))
