"""Codes of 2 and 4 bits to bytes and back.

Order: the first of the codes that share a byte lies in its lowest bits: for 4 bits
``byte = code[0] | code[1] << 4``.
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
        bits: 2, 4 or 8.

    Returns:
        (..., ceil(K * bits / 8)) uint8; unused bits of the last byte are 0.
    """
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
        bits: 2, 4 or 8.
        size: K, the number of codes along the last axis.

    Returns:
        (..., size) uint8.
    """
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    mask = (1 << bits) - 1
    codes = torch.stack([(packed >> (i * bits)) & mask for i in range(per_byte)], dim=-1)
    return codes.flatten(-2)[..., :size]
