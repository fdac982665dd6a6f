"""Sizes and counts in words, the same in every report and command: bytes in powers of 1024, one or many.

How sizes are said is defined in `fewjobs`, which has to do without fewbits.
"""

from __future__ import annotations

from fewjobs.words import size, three_digits

__all__ = ["counted", "size", "three_digits"]


def counted(n: float, noun: str) -> str:
    """How many of something: 1 epoch, 0.8 epochs, 12,345 steps. ``noun`` takes an s for more than one."""
    number = f"{n:,.0f}" if n == round(n) else f"{n:.3g}"
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"
