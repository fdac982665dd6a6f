"""GGUF's K-quants: 256 values in a super-block, small scales inside it, found by a search.

Two families. Affine (Q2_K, Q4_K, Q5_K): ``x ~ d * s_j * q - dmin * m_j`` with q in 0 ... 2**bits - 1, one
(s_j, m_j) of whole numbers for each sub-block j, and float16 d and dmin for the super-block. Symmetric (Q3_K,
Q6_K): ``x ~ d * s_j * q`` with a signed s_j and q in -2**(bits - 1) ... 2**(bits - 1) - 1.

The search minimises the squared error. A sub-block first tries several real scales (and minima), each
refitted by least squares to the codes it gives; the best are rounded to whole numbers; then, some times over,
every s_j and m_j tries its neighbours, and d and dmin are refitted to all codes of the super-block and kept
where that helps. The byte layouts are the inverses of ``gguf.quants.dequantize``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUPER_BLOCK = 256
_FACTORS = 9  # real scales tried on each side of the plain one
_STEP = 0.1  # their distance, in codes at the end of the range
_ROUNDS = 3


@dataclass(frozen=True)
class _Kind:
    """The sizes of one type: bits of a code, values of a sub-block, bits of a whole-number scale."""

    bits: int
    sub: int
    scale_bits: int
    affine: bool


_KINDS = {
    "Q2_K": _Kind(2, 16, 4, True),
    "Q3_K": _Kind(3, 16, 6, False),
    "Q4_K": _Kind(4, 32, 6, True),
    "Q5_K": _Kind(5, 32, 6, True),
    "Q6_K": _Kind(6, 16, 8, False),
}
K_QUANTS = tuple(_KINDS)


@dataclass
class _Codes:
    """Super-blocks (B, S sub-blocks, n values): d and dmin (B, 1, 1), s and m (B, S, 1), q (B, S, n)."""

    d: Tensor
    s: Tensor
    q: Tensor
    dmin: Tensor
    m: Tensor

    def values(self) -> Tensor:
        """(B, S, n): what the codes stand for."""
        return self.d * self.s * self.q - self.dmin * self.m


def quantize_k(rows: Tensor, kind: str, *, chunk: int = 4096) -> Tensor:
    """Write a weight in a K-quant.

    Args:
        rows: (N, K) floating point, K a multiple of 256, on any device.
        kind: one of `K_QUANTS`.
        chunk: super-blocks searched at once; it bounds the memory, not the result.

    Returns:
        (N, bytes of a row) uint8, on the same device.

    Raises:
        ValueError: K is no multiple of 256.
    """
    if rows.shape[-1] % SUPER_BLOCK:
        raise ValueError(f"{kind} has {SUPER_BLOCK} values in a block, and a row here has {rows.shape[-1]}.")
    sizes = _KINDS[kind]
    blocks = rows.reshape(-1, SUPER_BLOCK // sizes.sub, sizes.sub)
    pieces = [_PACK[kind](_search(piece.float(), sizes)) for piece in blocks.split(chunk)]
    return torch.cat(pieces).reshape(rows.shape[0], -1)


def _search(x: Tensor, kind: _Kind) -> _Codes:
    codes = _first_affine(x, kind) if kind.affine else _first_symmetric(x, kind)
    for _ in range(_ROUNDS):
        _try_neighbours(x, codes, kind)
        _refit(x, codes, kind)
    return codes


def _half(x: Tensor) -> Tensor:
    """The float16 that the file holds, as float32; what is too large for it stays finite."""
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest).half().float()


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.zeros_like(x), 1 / torch.where(x == 0, torch.ones_like(x), x))


def _round_codes(x: Tensor, codes: _Codes, kind: _Kind, s: Tensor, m: Tensor) -> Tensor:
    """The codes q nearest to x for whole-number scales s and m."""
    low, high = _range(kind)
    return ((x + codes.dmin * m) * _inverse(codes.d * s)).round_().clamp_(low, high)


def _range(kind: _Kind) -> tuple[int, int]:
    return (0, 2**kind.bits - 1) if kind.affine else (-(2 ** (kind.bits - 1)), 2 ** (kind.bits - 1) - 1)


def _scale_range(kind: _Kind) -> tuple[int, int]:
    if kind.affine:
        return 0, 2**kind.scale_bits - 1
    return -(2 ** (kind.scale_bits - 1)), 2 ** (kind.scale_bits - 1) - 1


def _first_affine(x: Tensor, kind: _Kind) -> _Codes:
    """Real scales and minima of each sub-block, the best of several, rounded to whole numbers."""
    _, high = _range(kind)
    low_x = x.amin(-1, keepdim=True).clamp_max(0.0)
    span = x.amax(-1, keepdim=True).clamp_min(0.0) - low_x
    scale, minimum = span / high, -low_x
    best = _squares(x - scale * ((x - low_x) * _inverse(scale)).round_().clamp_(0, high) + minimum)
    for number in range(-_FACTORS, _FACTORS + 1):
        q = ((x - low_x) * ((high + number * _STEP) * _inverse(span))).round_().clamp_(0, high)
        new_scale, new_minimum = _fit_line(x, q)
        error = _squares(x - new_scale * q + new_minimum)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, new_scale, scale)
        minimum = torch.where(better, new_minimum, minimum)
    _, most = _scale_range(kind)
    d = _half(scale.amax(1, keepdim=True) / most)
    dmin = _half(minimum.amax(1, keepdim=True) / most)
    s = (scale * _inverse(d)).round_().clamp_(0, most)
    m = (minimum * _inverse(dmin)).round_().clamp_(0, most)
    codes = _Codes(d, s, x, dmin, m)
    codes.q = _round_codes(x, codes, kind, s, m)
    return codes


def _fit_line(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The scale >= 0 and minimum >= 0 that bring ``scale * q - minimum`` nearest to x."""
    n = x.shape[-1]
    sum_q, sum_qq = q.sum(-1, keepdim=True), (q * q).sum(-1, keepdim=True)
    sum_x, sum_xq = x.sum(-1, keepdim=True), (x * q).sum(-1, keepdim=True)
    determinant = _inverse(n * sum_qq - sum_q * sum_q)
    scale = (n * sum_xq - sum_x * sum_q) * determinant
    minimum = -(sum_qq * sum_x - sum_q * sum_xq) * determinant
    through_zero = (sum_xq * _inverse(sum_qq)).clamp_min(0.0)
    lies_above = (minimum < 0) | (scale < 0)
    return torch.where(lies_above, through_zero, scale), minimum.masked_fill(lies_above, 0.0)


def _first_symmetric(x: Tensor, kind: _Kind) -> _Codes:
    low, high = _range(kind)
    farthest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = farthest / low
    best = _squares(x - scale * (x * _inverse(scale)).round_().clamp_(low, high))
    for sign in (1.0, -1.0):
        for number in range(-_FACTORS, _FACTORS + 1):
            q = (x * (sign * (low + number * _STEP) * _inverse(farthest))).round_().clamp_(low, high)
            fitted = (x * q).sum(-1, keepdim=True) * _inverse((q * q).sum(-1, keepdim=True))
            error = _squares(x - fitted * q)
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, fitted, scale)
    lowest, most = _scale_range(kind)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    d = _half(largest / lowest)
    s = (scale * _inverse(d)).round_().clamp_(lowest, most)
    zero = torch.zeros_like(d)
    codes = _Codes(d, s, x, zero, torch.zeros_like(s))
    codes.q = _round_codes(x, codes, kind, s, codes.m)
    return codes


def _squares(error: Tensor) -> Tensor:
    return (error * error).sum(-1, keepdim=True)


def _try_neighbours(x: Tensor, codes: _Codes, kind: _Kind) -> None:
    """Move each sub-block's whole-number scale and minimum by at most one where the error falls."""
    lowest, most = _scale_range(kind)
    best = _squares(x - codes.values())
    s, m, q = codes.s, codes.m, codes.q
    for ds in (-1, 0, 1):
        for dm in (-1, 0, 1) if kind.affine else (0,):
            new_s = (codes.s + ds).clamp(lowest, most)
            new_m = (codes.m + dm).clamp(0, most)
            new_q = _round_codes(x, codes, kind, new_s, new_m)
            error = _squares(x - (codes.d * new_s * new_q - codes.dmin * new_m))
            better = error < best
            best = torch.where(better, error, best)
            s, m = torch.where(better, new_s, s), torch.where(better, new_m, m)
            q = torch.where(better, new_q, q)
    codes.s, codes.m, codes.q = s, m, q


def _refit(x: Tensor, codes: _Codes, kind: _Kind) -> None:
    """d and dmin by least squares over the super-block, taken where the error falls."""
    a, b = codes.s * codes.q, -codes.m.expand_as(codes.q)
    total = (1, 2)
    aa, ab, bb = ((u * v).sum(total, keepdim=True) for u, v in ((a, a), (a, b), (b, b)))
    xa, xb = ((x * v).sum(total, keepdim=True) for v in (a, b))
    determinant = _inverse(aa * bb - ab * ab)
    both = determinant != 0
    d = torch.where(both, (xa * bb - xb * ab) * determinant, xa * _inverse(aa))
    dmin = torch.where(both, (xb * aa - xa * ab) * determinant, codes.dmin)
    new = _Codes(_half(d), codes.s, codes.q, _half(dmin), codes.m)
    new.q = _round_codes(x, new, kind, new.s, new.m)
    before = _squares(x - codes.values()).sum(1, keepdim=True)
    better = _squares(x - new.values()).sum(1, keepdim=True) < before
    codes.d, codes.dmin = torch.where(better, new.d, codes.d), torch.where(better, new.dmin, codes.dmin)
    codes.q = torch.where(better, new.q, codes.q)


def _bytes_of_half(x: Tensor) -> Tensor:
    return x.reshape(-1, 1).half().view(torch.uint8)


def _planes(values: Tensor, count: int) -> Tensor:
    """Join fields (B, groups, count, n): plane j is shifted by 8 / count * j; (B, bytes)."""
    width = 8 // count
    joined = values[:, :, 0].clone()
    for j in range(1, count):
        joined |= values[:, :, j] << (width * j)
    return joined.reshape(values.shape[0], -1)


def _whole(x: Tensor) -> Tensor:
    """Whole numbers, signed ones in two's complement, as bytes (B, ...)."""
    return x.to(torch.int16).bitwise_and(255).to(torch.uint8)


def _pack_q2(codes: _Codes) -> Tensor:
    blocks = codes.q.shape[0]
    scales = (_whole(codes.s) | (_whole(codes.m) << 4)).reshape(blocks, 16)
    q = _planes(_whole(codes.q).reshape(blocks, 2, 4, 32), 4)
    return torch.cat([scales, q, _bytes_of_half(codes.d), _bytes_of_half(codes.dmin)], 1)


def _pack_q3(codes: _Codes) -> Tensor:
    blocks = codes.q.shape[0]
    q = _whole(codes.q + 4).reshape(blocks, 256)
    low, high = _planes((q & 3).reshape(blocks, 2, 4, 32), 4), _planes((q >> 2).reshape(blocks, 1, 8, 32), 8)
    s = _whole(codes.s + 32).reshape(blocks, 16)
    scales = [_planes((s & 15).reshape(blocks, 1, 2, 8), 2), _planes((s >> 4).reshape(blocks, 1, 4, 4), 4)]
    return torch.cat([high, low, *scales, _bytes_of_half(codes.d)], 1)


def _affine_head(codes: _Codes) -> list[Tensor]:
    """d, dmin and the twelve bytes of eight 6-bit scales and minima."""
    s, m = _whole(codes.s).flatten(1), _whole(codes.m).flatten(1)
    first = s[:, :4] | ((s[:, 4:] >> 4) << 6)
    second = m[:, :4] | ((m[:, 4:] >> 4) << 6)
    third = (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)
    return [_bytes_of_half(codes.d), _bytes_of_half(codes.dmin), first, second, third]


def _pack_q4(codes: _Codes) -> Tensor:
    q = _whole(codes.q).reshape(-1, 4, 2, 32)
    return torch.cat([*_affine_head(codes), _planes(q, 2)], 1)


def _pack_q5(codes: _Codes) -> Tensor:
    q = _whole(codes.q)
    low, high = (q & 15).reshape(-1, 4, 2, 32), (q >> 4).reshape(-1, 1, 8, 32)
    return torch.cat([*_affine_head(codes), _planes(high, 8), _planes(low, 2)], 1)


def _pack_q6(codes: _Codes) -> Tensor:
    blocks = codes.q.shape[0]
    q = _whole(codes.q + 32).reshape(blocks, 256)
    low, high = _planes((q & 15).reshape(blocks, 2, 2, 64), 2), _planes((q >> 4).reshape(blocks, 2, 4, 32), 4)
    return torch.cat([low, high, _whole(codes.s).reshape(blocks, 16), _bytes_of_half(codes.d)], 1)


_PACK = {"Q2_K": _pack_q2, "Q3_K": _pack_q3, "Q4_K": _pack_q4, "Q5_K": _pack_q5, "Q6_K": _pack_q6}
