"""Keys and values in few bits: which tokens are kept how, and the arithmetic.

Of each sequence the ``first`` tokens and the ``newest`` ones are kept as they come. A token that is neither
any more is rounded, head by head: ``group`` neighbouring values share a scale of 16 bits (float16). Four-bit
heads are turned by an orthonormal Hadamard matrix H before they are rounded and turned back when they are
read, which spreads a large value over the head:

    codes, scales = round(H x);   x ~ H (codes * scales)        (H = H^T = H^-1)

H is block diagonal where the head size is not a power of two: its blocks are the largest power of two that
divides it. Keys are turned after their rotary embedding, so that ``q . k = (H q) . (H k)``. Codes of 8 bits
are `Integer`'s and `Float8`'s own; a scale is rounded to 16 bits after they have been found, which moves the
largest code by at most 0.06 of a step.

Four bits use all sixteen codes, -8 to 7: a scale has the sign that makes the largest number of its group
negative, and of four scales, which are that number over -8, -8.6, -9.3 and -7.4, it is the one with the least
sum of squared errors (the first of equal ones).

Bits of a value: 4 or 8, and 16 / group for the scale: 4.25 with groups of 64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.base import Format, Packed
from fewbits.formats.bits import pack_bits
from fewbits.formats.float8 import E4M3
from fewbits.formats.integer import INT4, INT8
from fewbits.formats.table_cache import keep_tables

PLAIN = "bfloat16"  # the 16 bits in which the model computes
_FORMATS: dict[str, Format] = {"int4": INT4, "int8": INT8, "fp8": E4M3}
KINDS = (PLAIN, "fp8", "int8", "int4")
_OTHER_NAMES = {"bf16": PLAIN, "float16": PLAIN, "16": PLAIN, "float8": "fp8", "float8_e4m3": "fp8"}
_GROUPS = (32, 64, 128)
_LEAST_BLOCK = 8  # values: a Hadamard matrix of fewer spreads nothing
_MOST_BLOCK = 256
_LARGEST_SCALE = 65504.0  # float16's largest number
_STEPS = (8.0, 8.6, 9.3, 7.4)  # codes up to a group's largest number, of the scales that four bits try


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """How keys and values are kept.

    Attributes:
        keys: "int4", "int8", "fp8" (E4M3) or "bfloat16" (as the model computes them).
        values: the same of the values.
        group: values of a head that share a scale: 32, 64 or 128; less where the head size asks for it.
        newest: this many tokens are kept in 16 bits.
        first: so are the first ones of each sequence, which attention leans on.
        rotated: whether heads in 4 bits are turned by a Hadamard matrix before they are rounded.
    """

    keys: str = "int4"
    values: str = "int4"
    group: int = 64
    newest: int = 64
    first: int = 4
    rotated: bool = True

    def __post_init__(self) -> None:
        for field in ("keys", "values"):
            object.__setattr__(self, field, _kind(getattr(self, field)))
        for field, least, most in (("newest", 1, 1024), ("first", 0, 64)):
            value = getattr(self, field)
            if type(value) is not int or not least <= value <= most:
                raise BadInput(
                    f"{field}={value!r} of a key/value cache is not a number from {least} to {most}."
                )
        if self.group not in _GROUPS:
            raise BadInput(
                f"group={self.group!r} of a key/value cache is not possible; choose 32, 64 or 128."
            )
        if not isinstance(self.rotated, bool):
            raise BadInput(f"rotated={self.rotated!r} of a key/value cache must be true or false.")

    @property
    def name(self) -> str:
        """In a word: "int4", or "int8/int4" for keys and values."""
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"

    @property
    def is_plain(self) -> bool:
        """Whether nothing is rounded."""
        return self.keys == self.values == PLAIN

    def side(self, which: str, size: int) -> Side:
        """How one of the two ("keys" or "values") is kept in heads of ``size`` values.

        Raises:
            Unsupported: the head size has no Hadamard matrix or no group of 8 values.
        """
        kind = getattr(self, which)
        group = gcd(size, self.group)
        if kind != PLAIN and group < _LEAST_BLOCK:
            raise Unsupported(
                f"heads of {size} values do not divide into groups of 8 or more, which a cache in {kind} "
                "needs; use bfloat16."
            )
        rotation = 0
        if kind == "int4" and self.rotated:
            rotation = gcd(size, _MOST_BLOCK)
            if rotation < _LEAST_BLOCK:
                raise Unsupported(
                    f"heads of {size} values have no Hadamard matrix of 8 or more values, which turns 4-bit "
                    f"{which}; use int8, or rotated: false."
                )
        return Side(kind, size, group, rotation)

    def side_bytes(self, which: str, num_tokens: int, size: int) -> int:
        """Bytes of one head's "keys" or "values": codes, scales, and the tokens in 16 bits.

        Args:
            which: of the two.
            num_tokens: of the sequence.
            size: values of a head.
        """
        side = self.side(which, size)
        if side.kind == PLAIN:
            return 2 * size * num_tokens
        num_newest, first = min(num_tokens, self.newest), min(num_tokens, self.first)
        packed = (num_tokens - num_newest) * (side.row_bytes + 2 * size // side.group)
        return packed + 2 * size * (num_newest + first)

    def nbytes(self, num_tokens: int, size: int, *, sequences: int = 1) -> int:
        """Bytes of one head's keys and values: `side_bytes` of both, of so many sequences."""
        return sequences * sum(self.side_bytes(which, num_tokens, size) for which in ("keys", "values"))


class Side(NamedTuple):
    """Keys, or values: their kind, and how many numbers a head, a group and a Hadamard block (or 0) have."""

    kind: str
    size: int
    group: int
    rotation: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a head's codes."""
        return self.size // 2 if self.kind == "int4" else self.size

    @property
    def format(self) -> Format:
        """The format of a head, its last axis in groups."""
        return dataclasses.replace(_FORMATS[self.kind], block=(1, self.group))  # type: ignore[call-arg]

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (..., row_bytes) uint8 and scales (..., size / group) float16 of heads x (..., size)."""
        rotated = hadamard(x.float(), self.rotation)
        if self.kind == "int4":
            codes, scales = _four_bits(rotated.reshape(-1, self.group))
            codes = INT4.to_bytes(codes.reshape(rotated.shape))
            return codes, scales.reshape(*x.shape[:-1], self.size // self.group)
        packed = self.format.quantize(rotated)
        codes = packed.codes.contiguous().view(torch.uint8)
        scales = packed.scales.clamp(max=_LARGEST_SCALE).to(torch.float16)
        return codes.view(*x.shape[:-1], self.row_bytes), scales.view(*x.shape[:-1], self.size // self.group)

    def unpack(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The heads (..., size) that codes and scales stand for, turned back, in ``dtype``."""
        shape = (*codes.shape[:-1], self.size)
        if codes.numel() == 0:
            return torch.empty(shape, dtype=dtype, device=codes.device)
        as_format = codes if self.kind == "int4" else codes.view(self.format.layout(shape)["codes"].dtype)
        parts = {"codes": as_format, "scales": scales.float()}
        x = Packed(self.format, shape, torch.float32, parts).dequantize()
        return hadamard(x, self.rotation).to(dtype)


def _four_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (n, size) int8 from -8 to 7 and scales (n, 1) float16 of groups (n, size) float32."""
    high, low = groups.amax(-1, keepdim=True), -groups.amin(-1, keepdim=True)
    sign = torch.where(high >= low, -1.0, 1.0)
    codes, scales, least = torch.zeros_like(groups), torch.zeros_like(sign), torch.full_like(sign, torch.inf)
    for steps in _STEPS:
        tried = (torch.maximum(high, low) / steps).clamp(max=_LARGEST_SCALE).half().float() * sign
        inverse = torch.where(tried == 0, 0.0, 1.0 / tried)
        rounded = (groups * inverse).round_().clamp_(-8, 7)
        error = (rounded * tried - groups).square_().sum(-1, keepdim=True)
        better = error < least
        codes = torch.where(better, rounded, codes)
        scales, least = torch.where(better, tried, scales), torch.where(better, error, least)
    scales = scales.masked_fill(~groups.isfinite().all(-1, keepdim=True), torch.nan)
    return codes.to(torch.int8), scales.half()


def hadamard(x: Tensor, block: int) -> Tensor:
    """Each ``block`` neighbours of the last axis times the orthonormal Hadamard matrix; 0: x itself.

    The matrix is Sylvester's: entry (i, j) is (-1)**popcount(i & j) / sqrt(block).
    """
    if not block:
        return x
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    return (blocks @ _signs(block, x.dtype, x.device)).mul_(block**-0.5).reshape(x.shape)


@keep_tables(maxsize=32)
def _signs(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's matrix (block, block) of 1 and -1; to make it takes fifty times as long as to use it."""
    signs = [1.0 - 2.0 * ((i & j).bit_count() & 1) for i in range(block) for j in range(block)]
    return torch.tensor(signs, dtype=dtype, device=device).view(block, block)


def get_kv_cache(value: KVCache | Format | str | Mapping[str, Any]) -> KVCache:
    """A cache's formats from a name, from plain data, or as they are.

    Args:
        value: "int4"; "int8/int4" (keys, then values); ``{"keys": "int8", "values": "int4", "group": 32}``.

    Raises:
        BadInput: a format that caches do not have, or an unknown field.
    """
    if isinstance(value, KVCache):
        return value
    if isinstance(value, Format):
        value = value.name
    if isinstance(value, str):
        keys, _, values = value.partition("/")
        return KVCache(keys=keys, values=values or keys)
    if not isinstance(value, Mapping):
        raise BadInput(f"a key/value cache cannot be {value!r}; give a name such as int4, or a mapping.")
    fields = dict(value)
    if "name" in fields:
        named = get_kv_cache(str(fields.pop("name")))
        fields = {"keys": named.keys, "values": named.values, **fields}
    names = [f.name for f in dataclasses.fields(KVCache)]
    unknown = sorted(str(key) for key in set(fields) - set(names))
    if unknown:
        raise BadInput(
            f"a key/value cache has no field {', '.join(unknown)}; its fields: {', '.join(names)}."
        )
    return KVCache(**fields)


def kv_cache_to_config(value: KVCache) -> str | dict[str, Any]:
    """A cache's formats as plain data for `get_kv_cache`: a name, or a mapping with what is not usual."""
    usual = KVCache(keys=value.keys, values=value.values)
    changed = {
        f.name: getattr(value, f.name)
        for f in dataclasses.fields(KVCache)
        if getattr(value, f.name) != getattr(usual, f.name)
    }
    return {"keys": value.keys, "values": value.values, **changed} if changed else value.name


def _kind(name: Any) -> str:
    name_of_kind = _OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    if name_of_kind not in KINDS:
        raise BadInput(
            f"there is no key/value cache in {name!r}; known: {', '.join(KINDS)}, and two of them as "
            "keys/values, such as int8/int4."
        )
    return str(name_of_kind)


def ordered_codes(codes: Tensor, side: Side, lanes: int) -> Tensor:
    """Codes (..., row_bytes) in the order in which ``lanes`` lanes of a warp read a head.

    A lane has ``group / lanes`` neighbours of each group, those of all groups side by side.
    """
    return _swapped(codes, side, (side.size // side.group, lanes))


def unordered_codes(codes: Tensor, side: Side, lanes: int) -> Tensor:
    """The inverse of `ordered_codes`."""
    return _swapped(codes, side, (lanes, side.size // side.group))


def _swapped(codes: Tensor, side: Side, sizes: tuple[int, int]) -> Tensor:
    """Codes whose numbers lie as (..., *sizes, rest), with the two axes exchanged."""
    is_nibbles = side.kind == "int4"
    values = _nibbles(codes) if is_nibbles else codes
    values = values.view(*codes.shape[:-1], *sizes, side.size // (sizes[0] * sizes[1])).transpose(-3, -2)
    values = values.reshape(*codes.shape[:-1], side.size)
    return pack_bits(values, 4) if is_nibbles else values


def _nibbles(codes: Tensor) -> Tensor:
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)


__all__ = ["KINDS", "PLAIN", "KVCache", "Side", "get_kv_cache", "hadamard", "kv_cache_to_config"]
