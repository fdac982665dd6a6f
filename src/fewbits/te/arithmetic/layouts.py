"""Codes and scales in the shapes that Transformer Engine keeps for cuBLAS, from ours in natural ones.

Scales are padded with zeros. Of an operand (M, K), which for columns is the matrix turned round:

* blocks of 1 x 128: (ceil(K / 128), M up to 4); tiles of 128 x 128: (ceil(M / 128), ceil(K / 128) up to 4);
* MXFP8: (M up to 128, ceil(K / 32) up to 4), of columns all turned back to the matrix's own orientation;
* NVFP4: (M up to 128, ceil(K / 16) up to 4), a tile's scale once for each of its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.formats.base import Packed

_MXFP8, _NVFP4 = 32, 16  # values along a row that share a scale


def codes_for_cublas(packed: Packed, *, columns: bool) -> Tensor:
    """Codes as bytes, of an operand (M, K) that is a matrix's rows or its columns.

    Returns:
        uint8 of shape (M, K), (K, M) for the columns of MXFP8, or (M, ceil(K / 2)) for NVFP4.
    """
    as_the_matrix = columns and packed.format.contract.block[1] == _MXFP8
    codes = packed.codes.t() if as_the_matrix else packed.codes
    return codes.contiguous().view(torch.uint8)


def scales_for_cublas(packed: Packed, *, columns: bool) -> Tensor:
    """Scales as the top of this file says, for an operand (M, K).

    Returns:
        float32, or uint8 where scales have eight bits; (1,) where a tensor has one.
    """
    scales, (tall, wide) = packed.scales, packed.format.contract.block
    if scales.dim() < 2:
        return scales
    if wide in (_MXFP8, _NVFP4):
        by_row = scales.view(torch.uint8).repeat_interleave(tall, 0)[: packed.shape[0]]
        as_the_matrix = columns and wide == _MXFP8
        return padded(by_row.t(), 4, 128) if as_the_matrix else padded(by_row, 128, 4)
    return padded(scales.t() if tall == 1 else scales, 1, 4)


def swizzled(scales: Tensor) -> Tensor:
    """Scales (M, C) in the order in which tensor cores read them, flat, padded with zeros.

    Tiles of 128 rows and 4 columns follow each other by rows; in a tile the row 32 j + i and the column c
    have place 16 i + 4 j + c.
    """
    whole = padded(scales, 128, 4)
    R, C = whole.shape
    tiles = whole.view(R // 128, 4, 32, C // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1)


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """``matrix`` (R, C) with zeros up to multiples of ``rows`` and ``columns``."""
    R, C = matrix.shape
    return torch.nn.functional.pad(matrix, (0, -C % columns, 0, -R % rows)).contiguous()
