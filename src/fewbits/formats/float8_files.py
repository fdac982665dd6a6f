"""FP8 checkpoints with their scales beside them (DeepSeek-V3's layout), and gpt-oss's MXFP4 blocks.

* ``weight`` float8 E4M3 (N, K) and ``weight_scale_inv``, one for a tile of 128 x 128 or for all, which
  despite its name is what one multiplies by: ``x ~ weight * weight_scale_inv``.
* ``blocks`` uint8 (..., N, K / 32, 16) and ``scales`` uint8 (..., N, K / 32): MXFP4, the first code of a byte
  in the low nibble.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint
from fewbits.formats.base import Packed
from fewbits.formats.blocks import Block, scale_shape
from fewbits.formats.compressed_tensors import float8_of
from fewbits.formats.microscaling import MXFP4

PARTS = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale", "weight")


def from_float8(
    parts: Mapping[str, Tensor], name: str, settings: Mapping[str, Any], dtype: torch.dtype
) -> Packed:
    """A weight as it was saved.

    The weight is (N, K), with one scale, one for a row or one for a tile.

    Args:
        parts: ``weight`` and one of the scales, by these names.
        name: of the linear, for messages.
        settings: ``quantization_config`` of config.json; ``weight_block_size`` is read.
        dtype: of the layer.

    Raises:
        BadCheckpoint: parts are missing or do not fit together.
    """
    codes = parts.get("weight")
    scales = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if codes is None or scales is None or codes.dtype != torch.float8_e4m3fn:
        fact = "no weight" if codes is None else f"a weight of {codes.dtype}"
        raise BadCheckpoint(
            f"{name} has {fact} and {'no' if scales is None else 'a'} scale, where an FP8 checkpoint has a "
            "float8_e4m3fn weight and its scales; fetch it again."
        )
    tile = settings.get("weight_block_size")
    block: Block = (0, 0)
    if scales.numel() > 1:
        block = (int(tile[0]), int(tile[1])) if tile else (1, 0)
    shape = tuple(codes.shape)
    need = scale_shape(shape, block)
    if scales.numel() != torch.Size(need).numel():
        raise BadCheckpoint(
            f"{name} of {shape} has scales of {tuple(scales.shape)}, where its tiles of {block} need {need}; "
            "the weights and config.json belong to different models."
        )
    tensors = {"codes": codes, "scales": scales.float().reshape(need).contiguous()}
    return Packed(float8_of(block), shape, dtype, tensors)


def from_gpt_oss(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Packed:
    """A weight (..., N, K) of a gpt-oss checkpoint.

    Args:
        blocks: (..., N, K / 32, 16) uint8.
        scales: (..., N, K / 32) uint8.
        dtype: of the layer.

    Raises:
        BadCheckpoint: the two do not fit together.
    """
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16 or blocks.dtype != torch.uint8:
        raise BadCheckpoint(
            f"MXFP4 blocks of {tuple(blocks.shape)} {blocks.dtype} and scales of {tuple(scales.shape)} do "
            "not belong together; fetch the file again."
        )
    shape = (*scales.shape[:-1], 32 * scales.shape[-1])
    return Packed(MXFP4, shape, dtype, {"codes": blocks.flatten(-2), "scales": scales})
