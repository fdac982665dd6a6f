"""Whole numbers in groups of a row, as every layout of them needs: codes, zero points, scales.

A weight that is packed in whole numbers already gives its own; any other is rounded here, under scales (and
zero points) that are searched for the least squared error of each group and rounded to what the file keeps
before the codes are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.export.codec import Model
from fewbits.formats.base import Format, Packed
from fewbits.formats.bits import unpack_bits

_FACTORS = 16  # scales tried below the plain one
_STEP = 0.02  # their distance, as a part of the plain one


@dataclass(frozen=True)
class Codes:
    """A weight (N, K) as ``(values - zeros) * scales``.

    Attributes:
        bits: of a code.
        group: columns that share a scale, a divisor of K.
        values: (N, K) int32 in -2**(bits - 1) ... 2**(bits - 1) - 1.
        zeros: (N, K / group) int32 in the same range.
        scales: (N, K / group) float32.
        index: (K,) int64, the group of each column, where they do not lie side by side; else None.
    """

    bits: int
    group: int
    values: Tensor
    zeros: Tensor
    scales: Tensor
    index: Tensor | None = None

    @property
    def is_symmetric(self) -> bool:
        """True if no group has a zero point of its own."""
        return not bool(self.zeros.any())

    def fits(self, dtype: torch.dtype) -> bool:
        """True if the scales keep their values in ``dtype`` but for its rounding."""
        moved = (self.scales.to(dtype).float() - self.scales).abs()
        return bool((moved <= self.scales.abs() * 2.0**-8).all())

    def decoded(self, scales: Tensor | None = None) -> Tensor:
        """(N, K) float32, under other scales (N, K / group) if they are given."""
        used = self.scales if scales is None else scales.float()
        index = self.index
        if index is None:
            index = torch.arange(self.values.shape[1], device=used.device) // self.group
        return (self.values - self.zeros[:, index]).float() * used[:, index]


def grouping(format: Format) -> tuple[int, int] | None:
    """(bits, columns that share a scale, 0 for a row) of a format of whole numbers; None for any other."""
    coding = format.contract.coding or format.contract.indexed
    if coding is None or coding.kind != "whole" or coding.block[0] != 1:
        return None
    return coding.bits, coding.block[1]


def has_zero_points(model: Model) -> bool:
    """True if a linear of the model has a zero point other than zero, or will have one."""
    zeros = [packed.parts["zero_points"] for packed in model.packed.values() if "zero_points" in packed.parts]
    if model.packed:
        return any(bool(points.any()) for points in zeros)
    codings = [format.contract.coding for format in model.formats]
    return any(coding is not None and coding.zero_point for coding in codings)


def codes_of(packed: Packed | None) -> Codes | None:
    """The codes of a packed weight; None if it is none of whole numbers in groups that fill its rows."""
    sizes = None if packed is None else grouping(packed.format)
    if packed is None or sizes is None:
        return None
    (bits, group), (N, K) = sizes, packed.shape
    group = group or K
    groups = packed.scales.reshape(N, -1).shape[1]
    index = packed.parts["group_index"].cpu().long() if "group_index" in packed.parts else None
    if index is None and K % group:
        return None
    stored = packed.codes.cpu()
    values = stored.int() if bits == 8 else unpack_bits(stored, bits, K).int()
    if bits < 8:
        values = torch.where(values >= 2 ** (bits - 1), values - 2**bits, values)
    zeros = packed.parts.get("zero_points")
    empty = torch.zeros(N, groups, dtype=torch.int32)
    zeros = empty if zeros is None else zeros.cpu().int().reshape(N, groups)
    return Codes(bits, group, values, zeros, packed.scales.cpu().float().reshape(N, groups), index)


def rounded(
    weight: Tensor,
    bits: int,
    group: int,
    dtype: torch.dtype,
    *,
    zero_point: bool = False,
    importance: Tensor | None = None,
) -> Codes:
    """A weight rounded to nearest, under scales with the least squared error of each group.

    Args:
        weight: (N, K) float32, finite.
        bits: of a code.
        group: columns that share a scale, a divisor of K.
        dtype: in which the file keeps scales; they are rounded to it first.
        zero_point: groups may lie unevenly around zero. The smallest zero point is then left out: version 1
            of GPTQ's layout, which stores them less one, has no sign for it that all engines read alike.
        importance: (K,), how much the squared error of each column counts; None: all the same.
    """
    heavy = None if importance is None else importance.to(weight).reshape(1, -1, group)
    blocks = weight.reshape(weight.shape[0], -1, group)
    best: Tensor | None = None
    chosen: tuple[Tensor, Tensor, Tensor] | None = None
    for number in range(_FACTORS):
        values, zeros, scales = _under(blocks, 1 - number * _STEP, bits, dtype, zero_point)
        squares = ((values - zeros) * scales - blocks).square()
        error = (squares if heavy is None else squares * heavy).sum(-1, keepdim=True)
        if best is None or chosen is None:
            best, chosen = error, (values, zeros, scales)
            continue
        better = error < best
        best = torch.where(better, error, best)
        chosen = (
            torch.where(better, values, chosen[0]),
            torch.where(better, zeros, chosen[1]),
            torch.where(better, scales, chosen[2]),
        )
    assert chosen is not None
    values, zeros, scales = chosen
    whole = values.reshape(weight.shape).int()
    return Codes(bits, group, whole, zeros.squeeze(-1).int(), scales.squeeze(-1))


def _under(
    blocks: Tensor, factor: float, bits: int, dtype: torch.dtype, zero_point: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (N, G, group), zero points and scales (N, G, 1), all float32, where the range is cut."""
    half = 2 ** (bits - 1)
    least = 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
    if not zero_point:
        plain = blocks.abs().amax(-1, keepdim=True) / max(half - 1, 1) * factor
        scales = plain.clamp_min(least).to(dtype).float()
        return (blocks / scales).round_().clamp_(-half, half - 1), torch.zeros_like(scales), scales
    low = blocks.amin(-1, keepdim=True).clamp_max(0.0) * factor
    high = blocks.amax(-1, keepdim=True).clamp_min(0.0) * factor
    scales = ((high - low) / (2**bits - 1)).clamp_min(least).to(dtype).float()
    zeros = ((-low / scales).round_() - half).clamp_(1 - half, half - 1)
    return ((blocks / scales).round_() + zeros).clamp_(-half, half - 1), zeros, scales
