"""Rows or columns of a packed weight, as a packed weight of their own: the same numbers, to the bit.

Rows can always be cut, in several pieces too, columns between blocks. The parts are cut where a block's
values end; where the second level of double-quantised scales does not allow it, the cut weight keeps those
scales in float32, which costs half a bit a value and changes none. Every cut is decoded and compared before
it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.base import Packed
from fewbits.kernels.codec.dequantize import dequantize

Pieces = Sequence[tuple[int, int]]  # begin and end of each


def cut(packed: Packed, axis: int, *pieces: tuple[int, int]) -> Packed:
    """Pieces of a packed (N, K), one behind the other: rows (axis 0) or columns (axis 1) from to before.

    Raises:
        Unsupported: columns within a block.
    """
    whole = dequantize(packed, torch.float32)
    expected = torch.cat([whole.narrow(axis, begin, end - begin) for begin, end in pieces], axis)
    for candidate in (packed, packed.format.with_plain_scales(packed)):
        candidate_cut = None if candidate is None else _cut(candidate, axis, pieces)
        if candidate_cut is not None and torch.equal(dequantize(candidate_cut, torch.float32), expected):
            return candidate_cut
    said = ", ".join(f"{begin} to {end}" for begin, end in pieces)
    raise Unsupported(
        f"a weight of {packed.shape[0]} x {packed.shape[1]} in {packed.format.name} cannot be cut into"
        f" {'rows' if axis == 0 else 'columns'} {said}, because values that share a scale lie on both sides;"
        " use fewer ranks for one layer, or a format with smaller blocks."
    )


def _cut(packed: Packed, axis: int, pieces: Pieces) -> Packed | None:
    """None: some part does not end where a piece does."""
    shape = _shape(packed, axis, sum(end - begin for begin, end in pieces))
    layouts = [packed.format.layout(_shape(packed, axis, end - begin)) for begin, end in pieces]
    parts = {}
    for name, spec in packed.format.layout(shape).items():
        part, slices = packed.parts[name], []
        for (begin, _), layout in zip(pieces, layouts, strict=True):
            piece = _part(part, layout[name].shape, packed.shape, axis, begin)
            if piece is None:
                return None
            slices.append(piece)
        # one scale for all that is cut, or rows and columns side by side
        parts[name] = slices[0] if slices[0].shape == spec.shape else torch.cat(slices, _along(part, axis))
        if parts[name].shape != spec.shape:
            return None
    return Packed(packed.format, shape, packed.dtype, parts)


def _shape(packed: Packed, axis: int, length: int) -> tuple[int, int]:
    return (length, packed.shape[1]) if axis == 0 else (packed.shape[0], length)


def _along(part: Tensor, axis: int) -> int:
    return axis if part.dim() == 2 else 0


def _part(
    part: Tensor, shape: tuple[int, ...], whole: tuple[int, ...], axis: int, begin: int
) -> Tensor | None:
    """The entries of one part, if they begin where the values do."""
    along = _along(part, axis)
    if tuple(part.shape) == shape and part.shape[along] == 1:
        return part.detach().clone()  # one scale for all that is cut
    if part.dim() == 1 and axis == 1:
        return None  # through the whole tensor, row by row
    start, rest = divmod(begin * part.shape[along], whole[axis])
    fits = not rest and part.dim() == len(shape) and start + shape[along] <= part.shape[along]
    if not fits or any(a != b for i, (a, b) in enumerate(zip(part.shape, shape, strict=True)) if i != along):
        return None
    return part.detach().narrow(along, start, shape[along]).clone(memory_format=torch.contiguous_format)
