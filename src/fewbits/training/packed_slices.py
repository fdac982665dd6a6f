"""Rows or columns of a packed weight, as a packed weight of their own: the same numbers, to the bit.

Rows can always be cut, columns between blocks. The parts are cut where a block's values end; where the second
level of double-quantised scales does not allow it, the cut weight keeps those scales in float32, which costs
half a bit a value and changes none. Every cut is decoded and compared before it is used.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.codebook import Codebook
from fewbits.kernels.dequantize import dequantize


def cut(packed: Packed, axis: int, begin: int, end: int) -> Packed:
    """Rows (axis 0) or columns (axis 1) from ``begin`` to before ``end`` of a packed (N, K).

    Raises:
        Unsupported: columns within a block.
    """
    length = end - begin
    shape = (length, packed.shape[1]) if axis == 0 else (packed.shape[0], length)
    expected = dequantize(packed, torch.float32).narrow(axis, begin, length)
    for candidate in (packed, _with_plain_scales(packed)):
        made = None if candidate is None else _cut(candidate, shape, axis, begin)
        if made is not None and torch.equal(dequantize(made, torch.float32), expected):
            return made
    raise Unsupported(
        f"a weight of {packed.shape[0]} x {packed.shape[1]} in {packed.format.name} cannot be cut into"
        f" {'rows' if axis == 0 else 'columns'} {begin} to {end}, because values that share a scale lie on"
        " both sides; use fewer ranks for one layer, or a format with smaller blocks."
    )


def _cut(packed: Packed, shape: tuple[int, int], axis: int, begin: int) -> Packed | None:
    layout = packed.format.layout(shape)
    parts = {}
    for name, part in packed.parts.items():
        found = _part(part, layout[name].shape, packed.shape, axis, begin)
        if found is None:
            return None
        parts[name] = found
    return Packed(packed.format, shape, packed.dtype, parts)


def _part(
    part: Tensor, shape: tuple[int, ...], whole: tuple[int, ...], axis: int, begin: int
) -> Tensor | None:
    """The entries of one part, if they begin where the values do."""
    along = axis if part.dim() == 2 else 0
    if tuple(part.shape) == shape and part.shape[along] == 1:
        return part.detach().clone()  # one scale for all that is cut
    if part.dim() == 1 and axis == 1:
        return None  # through the whole tensor, row by row
    start, rest = divmod(begin * part.shape[along], whole[axis])
    fits = not rest and part.dim() == len(shape) and start + shape[along] <= part.shape[along]
    if not fits or any(a != b for i, (a, b) in enumerate(zip(part.shape, shape, strict=True)) if i != along):
        return None
    return part.detach().narrow(along, start, shape[along]).clone(memory_format=torch.contiguous_format)


def _with_plain_scales(packed: Packed) -> Packed | None:
    """A double-quantised weight with the scales that it decodes to."""
    format = packed.format
    if not isinstance(format, Codebook) or not format.double:
        return None
    plain = replace(format, name=format.name.removesuffix("_dq"), double=False)
    shape = plain.layout(tuple(packed.shape))["scales"].shape
    parts = {"codes": packed.codes, "scales": format.block_scales(packed).view(shape)}
    return Packed(plain, packed.shape, packed.dtype, parts)
