"""AWQ's file layout ("GEMM"), read without its library.

A linear with a weight (N, K) is stored as ``qweight`` int32 (K, N / 8), ``qzeros`` int32 (groups, N / 8) and
``scales`` float16 (groups, N). Eight 4-bit codes share a word, and nibble i holds column ``ORDER[i]`` of the
eight. ``weight = (code - zero point) * scale``; zero points are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.bits import pack_bits, unpack_bits
from fewbits.formats.gptq import whole_numbers

PARTS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = tuple(ORDER.index(column) for column in range(8))


def from_awq(
    parts: Mapping[str, Tensor], name: str, settings: Mapping[str, Any], dtype: torch.dtype
) -> Packed:
    """A weight as it was saved.

    The weight is (N, K), in groups of columns.

    Args:
        parts: the tensors named above, by these names.
        name: of the linear, for messages.
        settings: ``quantization_config`` of config.json; ``bits`` and ``version`` are read.
        dtype: of the layer.

    Raises:
        BadCheckpoint: parts are missing or do not fit together.
        Unsupported: another number of bits, or another of AWQ's layouts.
    """
    version = str(settings.get("version", "gemm")).lower()
    if int(settings.get("bits", 4)) != 4 or version not in ("gemm", "exllama"):
        raise Unsupported(
            f"{name} is in AWQ's layout {version!r} with {settings.get('bits', 4)} bits; the 4-bit layout "
            "'gemm' is read here."
        )
    try:
        codes, zeros = _columns(parts["qweight"]), _columns(parts["qzeros"])
        scales = parts["scales"]
        (K, N), groups = codes.shape, scales.shape[0]
        if zeros.shape != (groups, N) or scales.shape != (groups, N) or K % groups:
            raise ValueError(f"scales {tuple(scales.shape)}, zero points {tuple(zeros.shape)}")
    except (KeyError, ValueError, IndexError) as error:
        raise BadCheckpoint(
            f"the AWQ tensors of {name} do not fit together ({error}); fetch it again."
        ) from error
    tensors = {
        "codes": pack_bits((codes ^ 8).t().contiguous(), 4),
        "scales": scales.float().t().contiguous(),
        "zero_points": (zeros.int() - 8).to(torch.int8).t().contiguous(),
    }
    return Packed(whole_numbers(4, (1, K // groups if groups > 1 else 0), True), (N, K), dtype, tensors)


def _columns(words: Tensor) -> Tensor:
    """(R, N / 8) int32 to codes (R, N) uint8 in the order of the columns."""
    nibbles = unpack_bits(words.contiguous().view(torch.uint8), 4, 8 * words.shape[1])
    return nibbles.view(words.shape[0], -1, 8)[:, :, list(_PLACES)].flatten(1)
