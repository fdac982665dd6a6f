"""torchao's weights as its writer for safetensors takes them apart, read without torchao.

A linear's weight is stored under the names ``_weight_qdata``, ``_weight_scale`` and ``_weight_zero_point``:

* ``Float8Tensor``: qdata float8 E4M3 (N, K), scales float32 for a row or for all;
* ``Int8Tensor``: qdata int8 (N, K), a scale for each row, zero points of zero;
* ``IntxUnpackedToInt8Tensor``: qdata int8 (N, K) of 1 to 8 bits, scales and zero points (N, groups);
  ``weight = (qdata - zero point) * scale``;
* ``MXTensor``: qdata float8 (N, K), or E2M1 codes, two a byte (N, K / 2); scales E8M0 for 32 values;
* ``NVFP4Tensor``: qdata E2M1 codes, two a byte; scales E4M3 for 16 values, and ``_weight_per_tensor_scale``,
  by which they are multiplied, or none.

The last two keep their scales (N, blocks) as they are or in the order of a GPU's tiles: 128 rows and 4 blocks
make a tile of 32 rows of 16, filled up at the edges. The shape says which: no shape could be both.

What has zero points that are no whole numbers (``Int4Tensor`` and its kin) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.bits import pack_bits
from fewbits.formats.blocks import Block
from fewbits.formats.compressed_tensors import float8_of
from fewbits.formats.gptq import whole_numbers
from fewbits.formats.microscaling import MXFP4, MXFP8_E4M3, MXFP8_E5M2
from fewbits.formats.nvfp4 import NVFP4

PARTS = (
    "_weight_qdata",
    "_weight_scale",
    "_weight_zero_point",
    "_weight_scale_and_zero",
    "_weight_per_tensor_scale",
    "_weight_act_pre_scale",
    "_weight_act_per_tensor_scale",  # of activations, which stay as they are here
)
_NVFP4_PARTS = (torch.uint8, torch.float8_e4m3fn)
_TILE = (128, 4)  # rows and blocks of scales that a GPU reads together
_MX_ELEMENTS = {
    torch.float8_e4m3fn: MXFP8_E4M3,
    torch.float8_e5m2: MXFP8_E5M2,
    torch.uint8: MXFP4,
}


def from_torchao(
    parts: Mapping[str, Tensor], name: str, settings: Mapping[str, Any], dtype: torch.dtype
) -> Packed:
    """A weight as it was saved.

    The weight is (N, K).

    Args:
        parts: the tensors named above, by these names.
        name: of the linear, for messages.
        settings: ``quantization_config`` of config.json; the number of bits is read.
        dtype: of the layer.

    Raises:
        BadCheckpoint: parts are missing or do not fit together.
        Unsupported: a class of torchao's that has no format here.
    """
    codes, scales = parts.get("_weight_qdata"), parts.get("_weight_scale")
    if codes is not None and scales is not None and scales.dtype == torch.float8_e8m0fnu:
        return _microscaling(codes, scales, name, dtype)
    if codes is not None and scales is not None and (codes.dtype, scales.dtype) == _NVFP4_PARTS:
        return _nvfp4(codes, scales, parts.get("_weight_per_tensor_scale"), name, dtype)
    zeros = parts.get("_weight_zero_point")
    others = [part for part in parts if part not in PARTS[:3]]
    whole = zeros is None or zeros.dtype == torch.int8
    if codes is None or others or not whole or codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise Unsupported(
            f"{name} is stored by torchao in a class that has no format here; Float8Tensor, Int8Tensor, "
            "IntxUnpackedToInt8Tensor, MXTensor and NVFP4Tensor are read (Float8WeightOnlyConfig, "
            "Int8WeightOnlyConfig, IntxWeightOnlyConfig and those of MX and NVFP4). Use the original model."
        )
    try:
        if scales is None:
            raise ValueError("there are no scales")
        N, K = codes.shape
        columns = scales.numel() // N if scales.numel() > 1 else 0
        if scales.numel() != max(columns * N, 1) or (columns and K % columns):
            raise ValueError(f"scales {tuple(scales.shape)} for a weight of ({N}, {K})")
        block: Block = (1, K // columns if columns > 1 else 0) if columns else (0, 0)
        return _packed(codes, scales, zeros, block, _bits(settings), dtype)
    except (ValueError, RuntimeError) as error:
        raise BadCheckpoint(
            f"the torchao tensors of {name} do not fit together ({error}); fetch it again."
        ) from error


def _microscaling(codes: Tensor, scales: Tensor, name: str, dtype: torch.dtype) -> Packed:
    """A weight of ``MXTensor``."""
    format = _MX_ELEMENTS.get(codes.dtype)
    shape = _two_dimensions(codes, name)
    K = shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    if format is None or K % 32:
        raise Unsupported(
            f"{name} is a torchao MXTensor of {codes.dtype} {tuple(codes.shape)}; E4M3, E5M2 and E2M1 in "
            "blocks of 32 are read. Use the original model."
        )
    rows = _rows_of_scales(scales.view(torch.uint8), (shape[0], K // 32), name)
    return Packed(format, (shape[0], K), dtype, {"codes": codes.view(torch.uint8), "scales": rows})


def _nvfp4(codes: Tensor, scales: Tensor, whole: Tensor | None, name: str, dtype: torch.dtype) -> Packed:
    """A weight of ``NVFP4Tensor``."""
    N, half = _two_dimensions(codes, name)
    if whole is not None and whole.numel() != 1:
        raise Unsupported(f"{name} has {whole.numel()} tensor scales; one is read. Use the original model.")
    whole = torch.ones(1, dtype=torch.float32) if whole is None else whole
    rows = _rows_of_scales(scales.view(torch.uint8), (N, half // 8), name).view(torch.float8_e4m3fn)
    parts = {"codes": codes, "scales": rows, "tensor_scale": whole.float().reshape(1)}
    return Packed(NVFP4, (N, 2 * half), dtype, parts)


def _two_dimensions(codes: Tensor, name: str) -> tuple[int, int]:
    if codes.dim() != 2:
        raise Unsupported(f"{name} has codes of {tuple(codes.shape)}; linears' (N, K) are read.")
    return codes.shape[0], codes.shape[1]


def _rows_of_scales(scales: Tensor, shape: tuple[int, int], name: str) -> Tensor:
    """Scales as (N, blocks), whichever of the two orders they are in."""
    if tuple(scales.shape) == shape:
        return scales.contiguous()
    rows, columns = (-(-size // tile) for size, tile in zip(shape, _TILE, strict=True))
    if tuple(scales.shape) != (32 * rows, 16 * columns):
        raise BadCheckpoint(
            f"the torchao tensors of {name} do not fit together (scales {tuple(scales.shape)} for {shape[0]} "
            f"rows of {shape[1]} blocks); fetch it again."
        )
    tiles = scales.reshape(rows, columns, 32, 4, 4).transpose(2, 3).reshape(rows, columns, *_TILE)
    whole = tiles.transpose(1, 2).reshape(rows * _TILE[0], columns * _TILE[1])
    return whole[: shape[0], : shape[1]].contiguous()


def _packed(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, block: Block, bits: int, dtype: torch.dtype
) -> Packed:
    shape = (codes.shape[0], codes.shape[1])
    if codes.dtype == torch.float8_e4m3fn:
        tensors, format = {"codes": codes, "scales": scales.float()}, float8_of(block)
        parts = {n: tensors[n].reshape(s.shape).contiguous() for n, s in format.layout(shape).items()}
        return Packed(format, shape, dtype, parts)
    half = 2 ** (bits - 1)
    fits = int(codes.min()) >= -half and int(codes.max()) < half if codes.numel() else True
    bits = bits if fits else 8
    has_zeros = zeros is not None and bool(zeros.any())
    numbers = whole_numbers(bits, block, has_zeros)
    tensors = {"codes": codes, "scales": scales.float()}
    if bits < 8:
        tensors["codes"] = pack_bits(codes.contiguous().view(torch.uint8) & (2**bits - 1), bits)
    if zeros is not None and has_zeros:
        tensors["zero_points"] = zeros
    layout = numbers.layout(shape)
    for part, spec in layout.items():
        if tensors[part].numel() != prod(spec.shape):
            raise ValueError(f"{part} holds {tensors[part].numel()} values instead of {prod(spec.shape)}")
    return Packed(
        numbers, shape, dtype, {n: tensors[n].reshape(s.shape).contiguous() for n, s in layout.items()}
    )


def _bits(settings: Mapping[str, Any]) -> int:
    """Of a code, as config.json says for all linears; 8 where it does not."""
    kind = dict(dict(settings.get("quant_type") or {}).get("default") or {})
    width = dict(dict(kind.get("_data") or {}).get("weight_dtype") or {}).get("_data", "")
    match = re.fullmatch(r"int([2-8])", str(width))
    return 8 if match is None else int(match[1])
