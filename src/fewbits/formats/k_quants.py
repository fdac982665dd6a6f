"""The search behind GGUF's K-quants and IQ4 types: 256 values in a super-block, small scales inside it.

Three families. Affine (Q2_K, Q4_K, Q5_K): ``x ~ d * s_j * q - dmin * m_j`` with q in 0 ... 2**bits - 1, one
(s_j, m_j) of whole numbers for each sub-block j, and float16 d and dmin for the super-block. Symmetric (Q3_K,
Q6_K): ``x ~ d * s_j * q`` with a signed s_j and q in -2**(bits - 1) ... 2**(bits - 1) - 1. By a table
(IQ4_XS, and IQ4_NL, which has one sub-block and no s_j): the same with q among 16 uneven numbers.

The search minimises the squared error, in which a value may count more than another (an importance matrix). A
sub-block first tries several real scales (and minima), each
refitted by least squares to the codes it gives; the best are rounded to whole numbers; then, some times over,
every s_j and m_j tries its neighbours, and d and dmin are refitted to all codes of the super-block and kept
where that helps. `fewbits.formats.gguf_layouts` turns the result into bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats.rounding import first_of_largest, sum_in_order
from fewbits.formats.tables import midpoints, table

SUPER_BLOCK = 256
_FACTORS = 9  # real scales tried on each side of the plain one
_STEP = 0.1  # their distance, in codes at the end of the range
_ROUNDS = 3


@dataclass(frozen=True)
class SubBlocks:
    """The sizes of one type: bits of a code, values of a sub-block, bits of a whole scale (0: none)."""

    bits: int
    sub: int
    scale_bits: int
    affine: bool
    values: tuple[float, ...] = ()


# The 16 numbers of the IQ4 types, from ggml.
IQ4_VALUES = (
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
    1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
)  # fmt: skip
SEARCHED = {
    "Q2_K": SubBlocks(2, 16, 4, True),
    "Q3_K": SubBlocks(3, 16, 6, False),
    "Q4_K": SubBlocks(4, 32, 6, True),
    "Q5_K": SubBlocks(5, 32, 6, True),
    "Q6_K": SubBlocks(6, 16, 8, False),
    "IQ4_NL": SubBlocks(4, 32, 0, False, IQ4_VALUES),
    "IQ4_XS": SubBlocks(4, 32, 6, False, IQ4_VALUES),
}


@dataclass
class Fields:
    """Super-blocks (B, S sub-blocks, n values): d and dmin (B, 1, 1), s and m (B, S, 1), q (B, S, n)."""

    d: Tensor
    s: Tensor
    q: Tensor
    dmin: Tensor
    m: Tensor

    def values(self) -> Tensor:
        """(B, S, n): what the codes stand for."""
        return self.d * self.s * self.q - self.dmin * self.m


def search(x: Tensor, kind: SubBlocks, importance: Tensor | None = None) -> Fields:
    """The fields that bring x near itself.

    Args:
        x: (B, S, n) float32, finite.
        kind: the type.
        importance: (B, S, n) float32, how much the squared error of each value counts; None: all the same.
    """
    first = _first_affine if kind.affine else _first_symmetric
    codes = first(x, kind, importance)
    for _ in range(_ROUNDS):
        _try_neighbours(x, codes, kind, importance)
        _refit(x, codes, kind, importance)
    return codes


def _half(x: Tensor) -> Tensor:
    """The float16 that the file holds, as float32; what is too large for it stays finite."""
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest).half().float()


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.zeros_like(x), 1 / torch.where(x == 0, torch.ones_like(x), x))


def _round_codes(x: Tensor, codes: Fields, kind: SubBlocks, s: Tensor, m: Tensor) -> Tensor:
    """The codes q nearest to x for whole-number scales s and m."""
    return round_codes((x + codes.dmin * m) * _inverse(codes.d * s), kind)


def round_codes(x: Tensor, kind: SubBlocks) -> Tensor:
    """The numbers nearest to x among those that a code can stand for.

    x is float32 of any shape, and so is the result.
    """
    if kind.values:
        return table(kind.values, x.device)[torch.bucketize(x, midpoints(kind.values, x.device))]
    low, high = _range(kind)
    return x.round().clamp_(low, high)


def _range(kind: SubBlocks) -> tuple[int, int]:
    if kind.values:
        return int(kind.values[0]), int(kind.values[-1])
    return (0, 2**kind.bits - 1) if kind.affine else (-(2 ** (kind.bits - 1)), 2 ** (kind.bits - 1) - 1)


def scale_range(kind: SubBlocks) -> tuple[int, int]:
    """The least and the largest whole scale of a sub-block; 1 and 1 for a type without any."""
    if kind.affine:
        return 0, 2**kind.scale_bits - 1
    if not kind.scale_bits:
        return 1, 1
    return -(2 ** (kind.scale_bits - 1)), 2 ** (kind.scale_bits - 1) - 1


def fit_affine(x: Tensor, kind: SubBlocks, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Real scales and minima of sub-blocks (B, S, n), the best of several: (B, S, 1) each."""
    _, high = _range(kind)
    low_x = x.amin(-1, keepdim=True).clamp_max(0.0)
    span = x.amax(-1, keepdim=True).clamp_min(0.0) - low_x
    scale, minimum = span * (1 / high), -low_x  # a GPU divides by a number in this way
    best = _squares(x - scale * ((x - low_x) * _inverse(scale)).round_().clamp_(0, high) + minimum, weights)
    for number in range(-_FACTORS, _FACTORS + 1):
        q = ((x - low_x) * ((high + number * _STEP) * _inverse(span))).round_().clamp_(0, high)
        new_scale, new_minimum = _fit_line(x, q, weights)
        error = _squares(x - new_scale * q + new_minimum, weights)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, new_scale, scale)
        minimum = torch.where(better, new_minimum, minimum)
    return scale, minimum


def _first_affine(x: Tensor, kind: SubBlocks, weights: Tensor | None) -> Fields:
    scale, minimum = fit_affine(x, kind, weights)
    _, most = scale_range(kind)
    d = _half(scale.amax(1, keepdim=True) * (1 / most))
    dmin = _half(minimum.amax(1, keepdim=True) * (1 / most))
    s = (scale * _inverse(d)).round_().clamp_(0, most)
    m = (minimum * _inverse(dmin)).round_().clamp_(0, most)
    codes = Fields(d, s, x, dmin, m)
    codes.q = _round_codes(x, codes, kind, s, m)
    return codes


def _fit_line(x: Tensor, q: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scale >= 0 and minimum >= 0 that bring ``scale * q - minimum`` nearest to x."""
    n = x.shape[-1] if weights is None else sum_in_order(weights, (-1,))
    sum_q, sum_qq = _sum(q, weights), _sum(q * q, weights)
    sum_x, sum_xq = _sum(x, weights), _sum(x * q, weights)
    determinant = _inverse(n * sum_qq - sum_q * sum_q)
    scale = (n * sum_xq - sum_x * sum_q) * determinant
    minimum = -(sum_qq * sum_x - sum_q * sum_xq) * determinant
    through_zero = (sum_xq * _inverse(sum_qq)).clamp_min(0.0)
    lies_above = (minimum < 0) | (scale < 0)
    return torch.where(lies_above, through_zero, scale), minimum.masked_fill(lies_above, 0.0)


def fit_symmetric(x: Tensor, kind: SubBlocks, weights: Tensor | None) -> Tensor:
    """Real scales, of either sign, of sub-blocks (B, S, n), the best of several: (B, S, 1)."""
    low, high = _range(kind)
    step = (high - low) / (2**kind.bits - 1) * _STEP
    farthest = x.gather(-1, first_of_largest(x.abs()))
    scale = farthest / low
    best = _squares(x - scale * round_codes(x * _inverse(scale), kind), weights)
    for sign in (1.0, -1.0):
        for number in range(-_FACTORS, _FACTORS + 1):
            q = round_codes(x * (sign * (low + number * step) * _inverse(farthest)), kind)
            fitted = _sum(x * q, weights) * _inverse(_sum(q * q, weights))
            error = _squares(x - fitted * q, weights)
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, fitted, scale)
    return scale


def _first_symmetric(x: Tensor, kind: SubBlocks, weights: Tensor | None) -> Fields:
    scale = fit_symmetric(x, kind, weights)
    lowest, most = scale_range(kind)
    largest = scale.gather(1, first_of_largest(scale.abs().transpose(1, 2)))
    d = _half(largest / (lowest if kind.scale_bits else 1))
    s = (scale * _inverse(d)).round_().clamp_(lowest, most)
    zero = torch.zeros_like(d)
    codes = Fields(d, s, x, zero, torch.zeros_like(s))
    codes.q = _round_codes(x, codes, kind, s, codes.m)
    return codes


def _sum(values: Tensor, weights: Tensor | None) -> Tensor:
    return sum_in_order(values if weights is None else values * weights, (-1,))


def _squares(error: Tensor, weights: Tensor | None) -> Tensor:
    return _sum(error * error, weights)


def _try_neighbours(x: Tensor, codes: Fields, kind: SubBlocks, weights: Tensor | None) -> None:
    """Move each sub-block's whole-number scale and minimum by at most one where the error falls."""
    lowest, most = scale_range(kind)
    best = _squares(x - codes.values(), weights)
    s, m, q = codes.s, codes.m, codes.q
    for ds in (-1, 0, 1):
        for dm in (-1, 0, 1) if kind.affine else (0,):
            new_s = (codes.s + ds).clamp(lowest, most)
            new_m = (codes.m + dm).clamp(0, most)
            new_q = _round_codes(x, codes, kind, new_s, new_m)
            error = _squares(x - (codes.d * new_s * new_q - codes.dmin * new_m), weights)
            better = error < best
            best = torch.where(better, error, best)
            s, m = torch.where(better, new_s, s), torch.where(better, new_m, m)
            q = torch.where(better, new_q, q)
    codes.s, codes.m, codes.q = s, m, q


def _refit(x: Tensor, codes: Fields, kind: SubBlocks, weights: Tensor | None) -> None:
    """d and dmin by least squares over the super-block, taken where the error falls."""
    a, b = codes.s * codes.q, -codes.m.expand_as(codes.q)
    total = (1, 2)
    heavy_a, heavy_b = (a, b) if weights is None else (a * weights, b * weights)
    aa, ab, bb = (sum_in_order(u * v, total) for u, v in ((a, heavy_a), (a, heavy_b), (b, heavy_b)))
    xa, xb = (sum_in_order(x * v, total) for v in (heavy_a, heavy_b))
    determinant = _inverse(aa * bb - ab * ab)
    both = determinant != 0
    d = torch.where(both, (xa * bb - xb * ab) * determinant, xa * _inverse(aa))
    dmin = torch.where(both, (xb * aa - xa * ab) * determinant, codes.dmin)
    new = Fields(_half(d), codes.s, codes.q, _half(dmin), codes.m)
    new.q = _round_codes(x, new, kind, new.s, new.m)
    before = sum_in_order(_squares(x - codes.values(), weights), (1,))
    better = sum_in_order(_squares(x - new.values(), weights), (1,)) < before
    codes.d, codes.dmin = torch.where(better, new.d, codes.d), torch.where(better, new.dmin, codes.dmin)
    codes.q = torch.where(better, new.q, codes.q)
