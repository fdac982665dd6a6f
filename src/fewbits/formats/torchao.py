"""torchao's weights as its writer for safetensors takes them apart, read without torchao.

A linear's weight is stored under the names ``_weight_qdata``, ``_weight_scale`` and ``_weight_zero_point``:

* ``Float8Tensor``: qdata float8 E4M3 (N, K), scales float32 for a row or for all;
* ``Int8Tensor``: qdata int8 (N, K), a scale for each row, zero points of zero;
* ``IntxUnpackedToInt8Tensor``: qdata int8 (N, K) of 1 to 8 bits, scales and zero points (N, groups);
  ``weight = (qdata - zero point) * scale``.

What has zero points that are no whole numbers (``Int4Tensor`` and its kin), or scales in the order of a GPU's
tiles, is refused.
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

PARTS = (
    "_weight_qdata",
    "_weight_scale",
    "_weight_zero_point",
    "_weight_scale_and_zero",
    "_weight_per_tensor_scale",
    "_weight_act_pre_scale",
)


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
    zeros = parts.get("_weight_zero_point")
    others = [part for part in parts if part not in PARTS[:3]]
    whole = zeros is None or zeros.dtype == torch.int8
    if codes is None or others or not whole or codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise Unsupported(
            f"{name} is stored by torchao in a class that has no format here; Float8Tensor, Int8Tensor and "
            "IntxUnpackedToInt8Tensor are read (Float8WeightOnlyConfig, Int8WeightOnlyConfig, "
            "IntxWeightOnlyConfig). Use the original model."
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
