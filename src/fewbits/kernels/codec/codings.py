"""Which codings the kernels of this room know; what they do not, the format's own definition computes."""

from __future__ import annotations

from typing import TypeGuard

from fewbits.formats.contract import Coding

# What a code is, its bits, and whether blocks are counted through the whole tensor.
_KNOWN = {
    ("table", 4, True),
    ("whole", 4, False),
    ("whole", 8, False),
    ("e4m3", 8, False),
    ("e5m2", 8, False),
}


def is_known(coding: Coding | None) -> TypeGuard[Coding]:
    """Whether the kernels can read codes and scales of this kind, if their block sizes suit them."""
    return coding is not None and (coding.kind, coding.bits, coding.through) in _KNOWN
