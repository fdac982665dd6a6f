"""HQQ's linears as its layers write them into safetensors files, read without hqq.

A linear with a weight (N, K) is stored as tensors after its name: ``W_q``, the codes, ``scale`` and
``zero``, and its facts, each a tensor too: ``shape`` (2,), ``group_size``, ``axis``, ``nbits``, ``packing``
and ``compute_dtype`` (letters, a number each), and others that decide nothing. The weight's values, row after
row, are a matrix of rows of ``group_size`` values (axis 1), or of ``group_size`` rows (axis 0); what stands
in one row, or one column, shares a scale and a zero point:

    weight = (code - zero) * scale        in ``compute_dtype``, each step rounded to it

Codes lie in bytes by parts of that matrix: the first half of its rows in the high four bits and the second
in the low ones, or quarters and eighths for 2 bits and 1. With 3 bits ten parts share an int32, the first in
bits 27 to 29; the matrix is filled up with rows for that. 5, 6 and 8 bits take a byte each.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.bits import pack_bits
from fewbits.formats.integer_offsets import ARITHMETICS, OffsetInteger

PARTS = (
    *("W_q", "scale", "zero", "nbits", "group_size", "axis", "shape", "packing", "compute_dtype"),
    *("view_as_float", "unpack_view_dtype", "quant_scale", "quant_zero", "offload_meta", "channel_wise"),
    *("optimize", "round_zero", "encoded_state_dict", "stores_quant_config"),
)
# The width of a code in the file, and how far up the first part of the rows lies.
_PACKINGS = {"8bit_u8": (8, 0), "4bit_u8": (4, 4), "3bit_32": (3, 27), "2bit_u8": (2, 6), "1bit_u8": (1, 7)}
_NAMES = {str(dtype): name for name, dtype in ARITHMETICS.items()}


def from_hqq(parts: Mapping[str, Tensor], name: str, shape: tuple[int, int], dtype: torch.dtype) -> Packed:
    """A weight as it was saved.

    Args:
        parts: the tensors named above, by these names.
        name: of the linear, for messages.
        shape: (N, K) of the layer.
        dtype: of the layer.

    Raises:
        BadCheckpoint: parts are missing or do not fit together.
        Unsupported: scales that are quantised themselves, or groups that go over the ends of rows.
    """
    if any(word in parts and bool(parts[word].any()) for word in ("quant_scale", "quant_zero")):
        raise Unsupported(
            f"{name} is stored by HQQ with scales or zero points that are quantised themselves, which is not"
            " read; quantise the original model."
        )
    try:
        return _packed(parts, name, shape, dtype)
    except (KeyError, ValueError, RuntimeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise BadCheckpoint(
            f"the HQQ tensors of {name} do not fit together ({what}); fetch it again."
        ) from error


def _packed(parts: Mapping[str, Tensor], name: str, shape: tuple[int, int], dtype: torch.dtype) -> Packed:
    N, K = (int(size) for size in parts["shape"])
    if tuple(shape) != (N, K):
        raise ValueError(f"they are of ({N}, {K}), the layer is of {tuple(shape)}")
    axis = int(parts["axis"])
    size = int(parts["group_size"]) if "group_size" in parts else (K if axis else N)
    if axis and K % size:
        raise Unsupported(
            f"{name} has groups of {size} that go over the ends of rows of {K}, which is not read; quantise"
            " the original model."
        )
    bits, codes = _codes(parts, (N * K // size, size) if axis else (size, N * K // size))
    scales, offsets = parts["scale"], parts["zero"]
    computed = torch.promote_types(torch.promote_types(scales.dtype, offsets.dtype), _dtype(parts))
    if str(computed) not in _NAMES:
        raise ValueError(f"they compute in {computed}")
    format = OffsetInteger(
        name="hqq4_g64", bits_of_codes=bits, block=(1, size), axis=axis, arithmetic=_NAMES[str(computed)]
    )
    tensors = {"codes": pack_bits(codes.reshape(N, K), bits), "scales": scales, "offsets": offsets}
    for part, spec in format.layout((N, K)).items():
        if tensors[part].numel() != prod(spec.shape):
            raise ValueError(f"{part} holds {tensors[part].numel()} values instead of {prod(spec.shape)}")
        tensors[part] = tensors[part].to(spec.dtype).reshape(spec.shape).contiguous()
    return Packed(format, (N, K), dtype, tensors)


def _codes(parts: Mapping[str, Tensor], matrix: tuple[int, int]) -> tuple[int, Tensor]:
    """Bits of a code, and codes as the matrix (rows, columns), uint8."""
    packing, stored = _letters(parts["packing"]), parts["W_q"]
    if packing not in _PACKINGS:
        raise ValueError(f"the packing is {packing!r}")
    width, first = _PACKINGS[packing]
    words = stored.contiguous().view(torch.int32 if packing == "3bit_32" else torch.uint8)
    pieces = [words >> shift & (2**width - 1) for shift in range(first, -1, -width)]
    codes = torch.cat(pieces).to(torch.uint8)[: matrix[0]]
    if tuple(codes.shape) != matrix:
        raise ValueError(f"codes {tuple(codes.shape)} for {matrix[0]} rows of {matrix[1]}")
    bits = int(parts["nbits"]) if width == 8 else width
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"a code is {int(codes.max())} in {bits} bits")
    return bits, codes


def _letters(stored: Tensor) -> str:
    return "".join(map(chr, stored.flatten().tolist()))


def _dtype(parts: Mapping[str, Tensor]) -> torch.dtype:
    """What the layer computed in; HQQ's own default where it does not say."""
    text = _letters(parts["compute_dtype"]) if "compute_dtype" in parts else "torch.float16"
    if text not in _NAMES:
        raise ValueError(f"they compute in {text!r}")
    return ARITHMETICS[_NAMES[text]]
