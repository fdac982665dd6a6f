"""Codes of 1 to 8 bits to bytes and back.

Order: a row is one stream of bits, and the first code lies in the lowest bits of the first byte: for 4 bits
``byte = code[0] | code[1] << 4``. Codes of 3, 5, 6 and 7 bits may lie across two bytes.
(bitsandbytes puts the first code into the high nibble; `fewbits.formats.bitsandbytes` swaps.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_size(size: int, bits: int) -> int:
    """Bytes that ``size`` codes of ``bits`` bits take; the last byte may be partly empty."""
    return -(-size * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis.

    Args:
        codes: (..., K) uint8, each below ``2 ** bits``.
        bits: 1 to 8.

    Returns:
        (..., ceil(K * bits / 8)) uint8; unused bits of the last byte are 0.
    """
    if 8 % bits:
        return _pack_across(codes, bits)
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    short = -codes.shape[-1] % per_byte
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    packed = codes[..., 0::per_byte].clone()
    for i in range(1, per_byte):
        packed |= codes[..., i::per_byte] << (i * bits)
    return packed


def unpack_bits(packed: Tensor, bits: int, size: int) -> Tensor:
    """The inverse of `pack_bits`.

    Args:
        packed: (..., ceil(size * bits / 8)) uint8.
        bits: 1 to 8.
        size: K, the number of codes along the last axis.

    Returns:
        (..., size) uint8.
    """
    if 8 % bits:
        return _unpack_across(packed, bits, size)
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    mask = (1 << bits) - 1
    codes = torch.stack([(packed >> (i * bits)) & mask for i in range(per_byte)], dim=-1)
    return codes.flatten(-2)[..., :size]


def _pack_across(codes: Tensor, bits: int) -> Tensor:
    """`pack_bits` eight codes at a time, which fill ``bits`` whole bytes."""
    size = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -size % 8))
    eights = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8).long()
    joined = eights[..., 0].clone()
    for i in range(1, 8):
        joined |= eights[..., i] << (i * bits)
    parts = torch.stack([(joined >> (8 * j)) & 255 for j in range(bits)], dim=-1).to(torch.uint8)
    return parts.flatten(-2)[..., : packed_size(size, bits)].contiguous()


def _unpack_across(packed: Tensor, bits: int, size: int) -> Tensor:
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    parts = packed.reshape(*packed.shape[:-1], packed.shape[-1] // bits, bits).long()
    joined = parts[..., 0].clone()
    for j in range(1, bits):
        joined |= parts[..., j] << (8 * j)
    codes = torch.stack([(joined >> (i * bits)) & ((1 << bits) - 1) for i in range(8)], dim=-1)
    return codes.flatten(-2)[..., :size].to(torch.uint8)
