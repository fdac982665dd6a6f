"""The bytes of GGUF's block types and the fields in them, both ways; the inverses of ``gguf.quants``.

Every type is ``x ~ d * s * q - dmin * m``, with one d and dmin for a block, and s and m for each of its
sub-blocks, 1 and 0 where a type has none. Q4_1 and Q5_1, which add a minimum, have it as -dmin with m = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.k_quants import IQ4_VALUES, Fields
from fewbits.formats.minifloat import E2M1, exponential
from fewbits.formats.tables import table

_NAN_OF_HALF = 0x7E00


def _bytes_of_half(x: Tensor) -> Tensor:
    """Scales as the bytes of float16, (B, 2); a NaN is 0x7E00, whichever bits its device gave it."""
    bits = x.reshape(-1, 1).half().view(torch.int16)
    return bits.masked_fill(x.reshape(-1, 1).isnan(), _NAN_OF_HALF).view(torch.uint8)


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


def _half_at(raw: Tensor, place: int) -> Tensor:
    """The float16 at byte ``place`` of each block, as float32: (B, 1, 1)."""
    return raw[:, place : place + 2].contiguous().view(torch.float16).float().unsqueeze(-1)


def _fields_of(packed: Tensor, count: int, n: int) -> Tensor:
    """The inverse of `_planes` for bytes (B, groups * n): (B, groups, count, n) uint8."""
    width = 8 // count
    groups = packed.reshape(packed.shape[0], -1, n)
    return torch.stack([(groups >> (width * j)) & (2**width - 1) for j in range(count)], dim=2)


def _made(
    d: Tensor, q: Tensor, s: Tensor | None = None, dmin: Tensor | None = None, m: Tensor | None = None
) -> Fields:
    """Fields with 1 for the scale and 0 for the minimum where a type has none; q (B, S, n) of any dtype."""
    one, zero = torch.ones_like(d), torch.zeros_like(d)
    tables = [t if t is None else t.float() for t in (s, m)]
    return Fields(
        d,
        one if tables[0] is None else tables[0],
        q.float(),
        zero if dmin is None else dmin,
        zero if tables[1] is None else tables[1],
    )


# The older types: one block of 32.


def _pack_q4_0(fields: Fields) -> Tensor:
    q = _whole(fields.q + 8)
    return torch.cat([_bytes_of_half(fields.d), _planes(q.reshape(-1, 1, 2, 16), 2)], 1)


def _unpack_q4_0(raw: Tensor) -> Fields:
    q = _fields_of(raw[:, 2:], 2, 16).reshape(-1, 1, 32)
    return _made(_half_at(raw, 0), q.to(torch.int8) - 8)


def _pack_q4_1(fields: Fields) -> Tensor:
    q = _planes(_whole(fields.q).reshape(-1, 1, 2, 16), 2)
    return torch.cat([_bytes_of_half(fields.d), _bytes_of_half(-fields.dmin), q], 1)


def _unpack_q4_1(raw: Tensor) -> Fields:
    d, low = _half_at(raw, 0), _half_at(raw, 2)
    return _made(d, _fields_of(raw[:, 4:], 2, 16).reshape(-1, 1, 32), None, -low, torch.ones_like(d))


def _pack_fives(q: Tensor) -> list[Tensor]:
    """32 codes of 5 bits, (B, 1, 32) uint8: the fifth bits, then the low four."""
    return [_planes((q >> 4).reshape(-1, 4, 8, 1), 8), _planes((q & 15).reshape(-1, 1, 2, 16), 2)]


def _unpack_fives(raw: Tensor) -> Tensor:
    high = _fields_of(raw[:, :4], 8, 1).reshape(-1, 1, 32)
    return _fields_of(raw[:, 4:], 2, 16).reshape(-1, 1, 32) | (high << 4)


def _pack_q5_0(fields: Fields) -> Tensor:
    return torch.cat([_bytes_of_half(fields.d), *_pack_fives(_whole(fields.q + 16))], 1)


def _unpack_q5_0(raw: Tensor) -> Fields:
    return _made(_half_at(raw, 0), _unpack_fives(raw[:, 2:]).to(torch.int8) - 16)


def _pack_q5_1(fields: Fields) -> Tensor:
    heads = [_bytes_of_half(fields.d), _bytes_of_half(-fields.dmin)]
    return torch.cat([*heads, *_pack_fives(_whole(fields.q))], 1)


def _unpack_q5_1(raw: Tensor) -> Fields:
    d, low = _half_at(raw, 0), _half_at(raw, 2)
    return _made(d, _unpack_fives(raw[:, 4:]), None, -low, torch.ones_like(d))


def _pack_q8_0(fields: Fields) -> Tensor:
    return torch.cat([_bytes_of_half(fields.d), _whole(fields.q).reshape(-1, 32)], 1)


def _unpack_q8_0(raw: Tensor) -> Fields:
    return _made(_half_at(raw, 0), raw[:, 2:].contiguous().view(torch.int8).unsqueeze(1))


def _pack_mxfp4(fields: Fields) -> Tensor:
    exponent = _whole(torch.frexp(fields.d)[1].float().reshape(-1, 1) + 126).masked_fill(
        fields.d.isnan().reshape(-1, 1), 255
    )
    twice = table(tuple(2 * v for v in E2M1.values[:8]), fields.q.device)
    codes = torch.bucketize((2 * fields.q).abs(), twice).to(torch.uint8)
    codes = codes | ((fields.q < 0).to(torch.uint8) << 3)
    return torch.cat([exponent, _planes(codes.reshape(-1, 1, 2, 16), 2)], 1)


def _unpack_mxfp4(raw: Tensor) -> Fields:
    exponent = raw[:, :1].float().unsqueeze(-1)
    d = exponential((exponent - 127).masked_fill(exponent == 255, torch.nan))
    codes = _fields_of(raw[:, 1:], 2, 16).reshape(-1, 1, 32)
    return _made(d, table(E2M1.values, raw.device)[codes.int()])


# The ternary types: 256 values.


def _pack_tq2_0(fields: Fields) -> Tensor:
    return torch.cat([_planes(_whole(fields.q + 1).reshape(-1, 2, 4, 32), 4), _bytes_of_half(fields.d)], 1)


def _unpack_tq2_0(raw: Tensor) -> Fields:
    return _made(_half_at(raw, 64), _fields_of(raw[:, :64], 4, 32).reshape(-1, 1, 256).to(torch.int8) - 1)


_RUNS = ((0, 160, 5, 32), (160, 240, 5, 16), (240, 256, 4, 4))  # from, to, values a byte, bytes


def _pack_tq1_0(fields: Fields) -> Tensor:
    """Five values a byte in base three, as a fraction of 256: the first is the leading digit."""
    digits = (fields.q.reshape(-1, 256) + 1).to(torch.int32)
    parts = []
    for start, stop, count, width in _RUNS:
        run = digits[:, start:stop].reshape(-1, count, width)
        value = sum(run[:, j] * 3 ** (4 - j) for j in range(count))
        parts.append((value * 256 + 242) // 243)
    return torch.cat([torch.cat(parts, 1).to(torch.uint8), _bytes_of_half(fields.d)], 1)


def _unpack_tq1_0(raw: Tensor) -> Fields:
    parts, place = [], 0
    for _, _, count, width in _RUNS:
        run = raw[:, place : place + width].to(torch.int32)
        digits = [(((run * 3**j) & 255) * 3) >> 8 for j in range(count)]
        parts.append(torch.stack(digits, 1).reshape(raw.shape[0], -1))
        place += width
    return _made(_half_at(raw, place), (torch.cat(parts, 1) - 1).unsqueeze(1))


# The K-quants.


def _pack_q2_k(fields: Fields) -> Tensor:
    blocks = fields.q.shape[0]
    scales = (_whole(fields.s) | (_whole(fields.m) << 4)).reshape(blocks, 16)
    q = _planes(_whole(fields.q).reshape(blocks, 2, 4, 32), 4)
    return torch.cat([scales, q, _bytes_of_half(fields.d), _bytes_of_half(fields.dmin)], 1)


def _unpack_q2_k(raw: Tensor) -> Fields:
    scales = raw[:, :16].unsqueeze(-1)
    q = _fields_of(raw[:, 16:80], 4, 32).reshape(-1, 16, 16)
    return _made(_half_at(raw, 80), q, scales & 15, _half_at(raw, 82), scales >> 4)


def _pack_q3_k(fields: Fields) -> Tensor:
    blocks = fields.q.shape[0]
    q = _whole(fields.q + 4).reshape(blocks, 256)
    low, high = _planes((q & 3).reshape(blocks, 2, 4, 32), 4), _planes((q >> 2).reshape(blocks, 1, 8, 32), 8)
    s = _whole(fields.s + 32).reshape(blocks, 16)
    scales = [_planes((s & 15).reshape(blocks, 1, 2, 8), 2), _planes((s >> 4).reshape(blocks, 1, 4, 4), 4)]
    return torch.cat([high, low, *scales, _bytes_of_half(fields.d)], 1)


def _unpack_q3_k(raw: Tensor) -> Fields:
    high = _fields_of(raw[:, :32], 8, 32).reshape(-1, 16, 16)
    q = _fields_of(raw[:, 32:96], 4, 32).reshape(-1, 16, 16) | (high << 2)
    low = _fields_of(raw[:, 96:104], 2, 8).reshape(-1, 16, 1)
    s = low | (_fields_of(raw[:, 104:108], 4, 4).reshape(-1, 16, 1) << 4)
    return _made(_half_at(raw, 108), q.to(torch.int8) - 4, s.to(torch.int8) - 32)


def _affine_head(fields: Fields) -> list[Tensor]:
    """d, dmin and the twelve bytes of eight 6-bit scales and minima."""
    s, m = _whole(fields.s).flatten(1), _whole(fields.m).flatten(1)
    first = s[:, :4] | ((s[:, 4:] >> 4) << 6)
    second = m[:, :4] | ((m[:, 4:] >> 4) << 6)
    third = (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)
    return [_bytes_of_half(fields.d), _bytes_of_half(fields.dmin), first, second, third]


def _affine_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minima in the twelve bytes from the fifth on: (B, 8, 1) each."""
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    s = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1)
    m = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1)
    return s.unsqueeze(-1), m.unsqueeze(-1)


def _pack_q4_k(fields: Fields) -> Tensor:
    q = _whole(fields.q).reshape(-1, 4, 2, 32)
    return torch.cat([*_affine_head(fields), _planes(q, 2)], 1)


def _unpack_q4_k(raw: Tensor) -> Fields:
    s, m = _affine_scales(raw)
    return _made(_half_at(raw, 0), _fields_of(raw[:, 16:], 2, 32).reshape(-1, 8, 32), s, _half_at(raw, 2), m)


def _pack_q5_k(fields: Fields) -> Tensor:
    q = _whole(fields.q)
    low, high = (q & 15).reshape(-1, 4, 2, 32), (q >> 4).reshape(-1, 1, 8, 32)
    return torch.cat([*_affine_head(fields), _planes(high, 8), _planes(low, 2)], 1)


def _unpack_q5_k(raw: Tensor) -> Fields:
    s, m = _affine_scales(raw)
    high = _fields_of(raw[:, 16:48], 8, 32).reshape(-1, 8, 32)
    q = _fields_of(raw[:, 48:], 2, 32).reshape(-1, 8, 32) | (high << 4)
    return _made(_half_at(raw, 0), q, s, _half_at(raw, 2), m)


def _pack_q6_k(fields: Fields) -> Tensor:
    blocks = fields.q.shape[0]
    q = _whole(fields.q + 32).reshape(blocks, 256)
    low, high = _planes((q & 15).reshape(blocks, 2, 2, 64), 2), _planes((q >> 4).reshape(blocks, 2, 4, 32), 4)
    return torch.cat([low, high, _whole(fields.s).reshape(blocks, 16), _bytes_of_half(fields.d)], 1)


def _unpack_q6_k(raw: Tensor) -> Fields:
    high = _fields_of(raw[:, 128:192], 4, 32).reshape(-1, 256)
    q = _fields_of(raw[:, :128], 2, 64).reshape(-1, 256) | (high << 4)
    s = raw[:, 192:208].contiguous().view(torch.int8).unsqueeze(-1)
    return _made(_half_at(raw, 208), q.reshape(-1, 16, 16).to(torch.int8) - 32, s)


# The IQ4 types: a table of 16 numbers.


def _indices(q: Tensor) -> Tensor:
    return torch.bucketize(q, table(IQ4_VALUES, q.device)).to(torch.uint8)


def _pack_iq4_nl(fields: Fields) -> Tensor:
    return torch.cat([_bytes_of_half(fields.d), _planes(_indices(fields.q).reshape(-1, 1, 2, 16), 2)], 1)


def _unpack_iq4_nl(raw: Tensor) -> Fields:
    codes = _fields_of(raw[:, 2:], 2, 16).reshape(-1, 1, 32)
    return _made(_half_at(raw, 0), table(IQ4_VALUES, raw.device)[codes.int()])


def _pack_iq4_xs(fields: Fields) -> Tensor:
    s = _whole(fields.s + 32)
    high, low = _planes((s >> 4).reshape(-1, 2, 4, 1), 4), _planes((s & 15).reshape(-1, 4, 2, 1), 2)
    q = _planes(_indices(fields.q).reshape(-1, 8, 2, 16), 2)
    return torch.cat([_bytes_of_half(fields.d), high, low, q], 1)


def _unpack_iq4_xs(raw: Tensor) -> Fields:
    high, low = _fields_of(raw[:, 2:4], 4, 1), _fields_of(raw[:, 4:8], 2, 1)
    s = low.reshape(-1, 8, 1) | (high.reshape(-1, 8, 1) << 4)
    codes = _fields_of(raw[:, 8:], 2, 16).reshape(-1, 8, 32)
    return _made(_half_at(raw, 0), table(IQ4_VALUES, raw.device)[codes.int()], s.to(torch.int8) - 32)


class Layout(NamedTuple):
    """One type: values of a block, its bytes, values of a sub-block, the two directions, where halves lie.

    Attributes:
        halves: the first byte of each float16 of a block; MXFP4 has none, and its first byte is an exponent.
    """

    size: int
    nbytes: int
    sub: int
    pack: Callable[[Fields], Tensor]
    unpack: Callable[[Tensor], Fields]
    halves: tuple[int, ...]


LAYOUTS = {
    "Q4_0": Layout(32, 18, 32, _pack_q4_0, _unpack_q4_0, (0,)),
    "Q4_1": Layout(32, 20, 32, _pack_q4_1, _unpack_q4_1, (0, 2)),
    "Q5_0": Layout(32, 22, 32, _pack_q5_0, _unpack_q5_0, (0,)),
    "Q5_1": Layout(32, 24, 32, _pack_q5_1, _unpack_q5_1, (0, 2)),
    "Q8_0": Layout(32, 34, 32, _pack_q8_0, _unpack_q8_0, (0,)),
    "Q2_K": Layout(256, 84, 16, _pack_q2_k, _unpack_q2_k, (80, 82)),
    "Q3_K": Layout(256, 110, 16, _pack_q3_k, _unpack_q3_k, (108,)),
    "Q4_K": Layout(256, 144, 32, _pack_q4_k, _unpack_q4_k, (0, 2)),
    "Q5_K": Layout(256, 176, 32, _pack_q5_k, _unpack_q5_k, (0, 2)),
    "Q6_K": Layout(256, 210, 16, _pack_q6_k, _unpack_q6_k, (208,)),
    "IQ4_NL": Layout(32, 18, 32, _pack_iq4_nl, _unpack_iq4_nl, (0,)),
    "IQ4_XS": Layout(256, 136, 32, _pack_iq4_xs, _unpack_iq4_xs, (0,)),
    "TQ1_0": Layout(256, 54, 256, _pack_tq1_0, _unpack_tq1_0, (52,)),
    "TQ2_0": Layout(256, 66, 256, _pack_tq2_0, _unpack_tq2_0, (64,)),
    "MXFP4": Layout(32, 17, 32, _pack_mxfp4, _unpack_mxfp4, ()),
}


def blocks_not_finite(kind: str, codes: Tensor) -> Tensor:
    """The numbers of blocks that hold a NaN or an infinity, in ascending order: (n,) int64.

    Only float16 scales can, and MXFP4's exponent 255; one pass over them, nothing is decoded.

    Args:
        kind: the type, a key of ``LAYOUTS``.
        codes: whole blocks, uint8 of any shape.
    """
    layout = LAYOUTS[kind]
    blocks = codes.reshape(-1, layout.nbytes)
    if not layout.halves:
        return (blocks[:, 0] == 255).nonzero()[:, 0]
    # The exponent of a float16 is bits 2 to 6 of its second byte.
    wrong = [(blocks[:, place + 1] & 0x7C) == 0x7C for place in layout.halves]
    return torch.stack(wrong).any(0).nonzero()[:, 0]
