"""The weights of compressed-tensors, as they were saved; its library is not needed.

One scheme (``weights`` of a config group) and the tensors of one linear make a packed weight:

* ``pack-quantized``: whole numbers of 2 to 8 bits as streams in int32 words, and their zero points as streams
  along the outputs; ``int-quantized``: int8. Scales by group, row or tensor.
* ``float-quantized`` and ``naive-quantized``: FP8 E4M3, scales by tensor, row or tile.
* ``nvfp4-pack-quantized``, ``mxfp4-pack-quantized``, ``mxfp6-pack-quantized`` (E2M3), ``mxfp8-quantized``: as
  their names say.

What activations are rounded to (``input_activations``) belongs to the engine that runs the model: here they
stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats.base import Format, Packed
from fewbits.formats.bits import packed_size, unpack_bits
from fewbits.formats.blocks import Block
from fewbits.formats.float8 import E4M3, Float8
from fewbits.formats.gptq import bytes_of_words, whole_numbers, with_signs_turned
from fewbits.formats.integer_indexed import IndexedInteger, check_index
from fewbits.formats.microscaling import MXFP4, MXFP6_E2M3, MXFP8_E4M3
from fewbits.formats.nvfp4 import NVFP4Blocks

PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
    "input_global_scale",
    "input_scale",
    "input_zero_point",
    "weight",
)


def format_of(scheme: Mapping[str, Any], name: str) -> Format:
    """The format of a linear that was saved under ``scheme``, the ``weights`` of its config group.

    Raises:
        Unsupported: there is none here.
    """
    bits, kind = int(scheme.get("num_bits", 8)), scheme.get("type", "int")
    strategy, group = scheme.get("strategy"), int(scheme.get("group_size") or 0)
    if kind == "int" and 2 <= bits <= 8 and strategy in ("group", "channel", "tensor"):
        block: Block = {"group": (1, group), "channel": (1, 0), "tensor": (0, 0)}[strategy]
        zero_point = not scheme.get("symmetric", True)
        if scheme.get("actorder") in ("group", True):
            return IndexedInteger(name=f"int{bits}_indexed", bits=bits, group=group)
        return whole_numbers(bits, block, zero_point)
    if kind == "float" and bits == 4:
        if strategy == "tensor_group" and group == 16:
            return NVFP4Blocks(name="nvfp4", divides=True)
        if strategy == "group" and group == 32:
            return MXFP4
    if kind == "float" and bits == 6 and strategy == "group" and group == 32:
        return MXFP6_E2M3
    if kind == "float" and bits == 8:
        if strategy == "group" and group == 32:
            return MXFP8_E4M3
        tile = tuple(scheme.get("block_structure") or ())
        blocks: dict[Any, Block] = {"tensor": (0, 0), "channel": (1, 0)}
        chosen = (
            (int(tile[0]), int(tile[1])) if strategy == "block" and len(tile) == 2 else blocks.get(strategy)
        )
        if chosen is not None:
            return float8_of(chosen)
    raise Unsupported(
        f"{name} is stored by compressed-tensors as {kind} of {bits} bits by {strategy}, for which there is "
        "no format here; use the original model."
    )


def float8_of(block: Block) -> Float8:
    """FP8 E4M3 with a scale for each block: the registry's value, or one that differs in the block."""
    endings = {(0, 0): "", (1, 0): "_row", (1, 128): "_1x128", (128, 128): "_128x128"}
    return Float8(name=f"{E4M3.name}{endings.get(block, '_128x128')}", kind="e4m3", block=block)


def from_compressed_tensors(
    parts: Mapping[str, Tensor],
    name: str,
    scheme: Mapping[str, Any],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Packed:
    """A weight as it was saved.

    Args:
        parts: the linear's tensors, by the names of `PARTS`.
        name: of the linear, for messages.
        scheme: the ``weights`` of its config group.
        shape: (N, K).
        dtype: of the layer.

    Raises:
        BadCheckpoint: parts are missing or do not fit together.
        Unsupported: a format that is not here.
    """
    format = format_of(scheme, name)
    try:
        tensors = _parts(format, parts, name, shape, int(scheme.get("num_bits", 8)))
        for part, spec in format.layout(shape).items():
            if tensors[part].numel() != prod(spec.shape):
                raise ValueError(f"{part} holds {tensors[part].numel()} values instead of {prod(spec.shape)}")
            tensors[part] = tensors[part].to(spec.dtype).reshape(spec.shape).contiguous()
    except (KeyError, ValueError, RuntimeError) as error:
        raise BadCheckpoint(
            f"the compressed-tensors parts of {name} do not fit together ({error}); fetch it again."
        ) from error
    return Packed(format, shape, dtype, tensors)


def to_compressed_tensors(packed: Packed) -> dict[str, Tensor]:
    """The tensors in which compressed-tensors saves this weight, in floating point or in rows of INT8.

    Args:
        packed: (N, K) in FP8, MXFP8, MXFP6 E2M3, MXFP4, NVFP4 with ``divides``, or INT8 without zero points.

    Raises:
        Unsupported: another format. (Whole numbers of other widths go through the library's own packer.)
    """
    format = packed.format
    if "compressed-tensors" in format.contract.names and format.contract.stored_as:
        return {name: _as_saved(packed.parts[part], name) for part, name in format.contract.stored_as.items()}
    raise Unsupported(f"compressed-tensors has no such form of {format.name}; see fewbits export --help.")


def _parts(
    format: Format, parts: Mapping[str, Tensor], name: str, shape: tuple[int, int], bits: int
) -> dict[str, Tensor]:
    layout, stored = format.layout(shape), format.contract.stored_as
    if stored and (format.contract.names["compressed-tensors"] != "int-quantized" or "weight" in parts):
        return {part: _as_kept(parts[stored[part]], spec.dtype) for part, spec in layout.items()}
    tensors = {"codes": _codes(bits, parts, shape), "scales": parts["weight_scale"].float()}
    if "zero_points" in layout:
        tensors["zero_points"] = _zero_points(bits, parts, shape[0])
    if "group_index" in layout:
        tensors["group_index"] = parts["weight_g_idx"]
        check_index(tensors["group_index"], tensors["scales"].shape[-1], f"{name}.weight_g_idx")
    return tensors


def _as_saved(part: Tensor, name: str) -> Tensor:
    """A part under its name in the file: the codes of MXFP8, bytes here, are float8 there."""
    return part.view(torch.float8_e4m3fn) if name == "weight" and part.dtype == torch.uint8 else part


def _as_kept(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_as_saved`; scales of another floating-point type become ours."""
    return part.view(dtype) if dtype == torch.uint8 else part.to(dtype)


def _codes(bits: int, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    if "weight" in parts:
        return parts["weight"]
    stream = bytes_of_words(parts["weight_packed"])[:, : packed_size(shape[1], bits)]
    return with_signs_turned(stream.contiguous(), bits, shape[1])


def _zero_points(bits: int, parts: Mapping[str, Tensor], rows: int) -> Tensor:
    zeros = parts.get("weight_zero_point")
    if zeros is None:
        return torch.zeros_like(parts["weight_scale"], dtype=torch.int8)
    if zeros.dtype != torch.int32:
        return zeros
    columns = unpack_bits(bytes_of_words(zeros.t()), bits, rows).int()  # streams along the outputs
    signed: Tensor = (columns - 2 ** (bits - 1)).to(torch.int8).t()
    return signed
