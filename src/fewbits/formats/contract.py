"""What a format says of itself: `Contract`, and inside it `Coding`, by which kernels read codes.

No test and no kernel asks which class a format is of. It asks the format's contract, which every format
states in its own file: how far a rounded value may be off, what shares a scale, how codes stand for numbers,
which layer multiplies by it, and under which names other programs store it. So a format is added in one file.

    number = (value of the code - zero point) * scale        `Coding` says what each of the three is

What a format costs is computed from its layout: `Format.nbytes` and `Format.bits_per_value`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fewbits.formats.description import Description

_FLOAT32_BITS = 24


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How the stored parts stand for numbers, as far as a kernel can know it: parts ``codes`` and ``scales``.

    Attributes:
        kind: what a code is: an entry of a table of ``2**bits`` values, a whole number in two's complement,
            or 8-bit floating point.
        bits: of a code. Codes of fewer than 8 bits lie along the last axis, the first in the lowest bits.
        block: (rows, columns) that share a scale, see `fewbits.formats.blocks`.
        through: blocks of ``block[1]`` values are counted through the whole tensor in row-major order; else
            every row begins with a new block.
        values: the table, for that kind.
        zero_point: a part ``zero_points`` (int8, one a block) is subtracted from whole numbers.
        scale_block: scales that share a scale of the second level: scales are then codes of 8 bits, beside
            parts ``scale_scales`` and ``scale_offset``. 0: scales are float32.
        scale_values: the 256 values of such codes.
    """

    kind: Literal["table", "whole", "e4m3", "e5m2"]
    bits: int
    block: tuple[int, int]
    through: bool = False
    values: tuple[float, ...] = ()
    zero_point: bool = False
    scale_block: int = 0
    scale_values: tuple[float, ...] = ()

    @property
    def is_float8(self) -> bool:
        """Whether codes are 8-bit floating point."""
        return self.kind in ("e4m3", "e5m2")


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a format promises, and what others may do with it.

    Attributes:
        largest_error: of a value that was rounded to nearest, as a share of its block's largest magnitude:
            half the widest gap between neighbouring decoded values, or what cutting takes away, if more.
        block: (rows, columns) that share a scale, and become NaN together; (0, 0) is the tensor.
        coding: how kernels read the parts; None: the definition alone, in plain torch, decodes.
        description: for formats without a ``coding``: from which a GPU's decoding kernel is generated.
        indexed: for a format whose columns look up their group in a part ``group_index``: the coding of the
            same parts if groups lay side by side.
        rounds_plainly: `quantize` divides each block of ``coding`` by its largest magnitude (or, with zero
            points, its range) over the largest code and takes the nearest: kernels may do it in its place.
        exact_scale: ``largest_error`` holds; False where scales are themselves rounded, which moves values
            further by an amount of its own.
        tensor_scale: scales stand under one more, of the whole tensor, so that tensors which are used as one
            may share it: `Format.quantize_under`.
        cuts: values near a block's largest magnitude may be cut, so that stochastic rounding is unbiased
            below only.
        magnitudes: the least and the largest magnitude of values for which ``largest_error`` holds.
        least_range: a block whose largest magnitude is below this is rounded as if it were this.
        again: what quantising a decoded float32 tensor gives: the same ``codes``; the same codes ``whole``,
            where the last axis is whole blocks; the same decoded ``values`` and scales; values that ``moved``
            by about ``largest_error`` at most; values ``near``, within a tenth of ``largest_error`` in the
            root mean square; or ``nothing`` of this kind.
        again_bits: bits of precision (float32: 24, float16: 11, bfloat16: 8) with which a decoded tensor must
            be kept for that.
        product: how a layer multiplies by a weight in this format: ``decoded`` to the input's dtype first, or
            as ``stochastic`` streams.
        names: under which name other programs store this format, by program ("bitsandbytes",
            "compressed-tensors", "gguf").
        stored_as: for "compressed-tensors": the name in the file of each part, where parts are stored as they
            are.
    """

    largest_error: float
    block: tuple[int, int]
    coding: Coding | None = None
    description: Description | None = None
    indexed: Coding | None = None
    rounds_plainly: bool = False
    exact_scale: bool = True
    tensor_scale: bool = False
    cuts: bool = False
    magnitudes: tuple[float, float] = (1e-30, 1e37)
    least_range: float = 0.0
    again: Literal["codes", "whole", "values", "moved", "near", "nothing"] = "codes"
    again_bits: int = _FLOAT32_BITS
    product: Literal["decoded", "stochastic"] = "decoded"
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    stored_as: Mapping[str, str] = field(default_factory=dict, hash=False)
