"""A packed tensor back to a dense one, for any format with a value a code and a scale a block.

    w[n, k] = value(code[n, k]) * scale[block of (n, k)]             W (N, K); the axes before K count as N

Codebooks (NF4, FP4) look the code up in 16 values; integers take it as it is, less the block's zero point
where there is one; 8-bit floating point is its own value. With double quantisation the scale is a code too:

    scale = scale_table[code] * scale_scale[second-level block] + scale_offset

Two more things can be done on the way out: W is written transposed, as (K, N); and it is brought to 8-bit
floating point, ``float8(cut(w * inverse_scale))``, cut to the largest number of that type.

All in float32 in the order in which it stands here, each step rounded (no fused multiply-add), then one
rounding to the output's dtype: bit for bit what `Format.dequantize` gives. There is no gradient: packed
weights are frozen.

Floor: the packed tensor is read once and the dense one written once. 14336 x 4096 in NF4 with double
quantisation are 30.3 MB, in bfloat16 117.4 MB: 34.5 us at the 4.28 TB/s that a copy reaches on an H200; to
8 bits 20.8 us.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats import FORMATS
from fewbits.formats.base import Format, Packed, format_from_config
from fewbits.kernels.codec import dequantize_cuda, dequantize_described
from fewbits.kernels.codec.dequantize_triton import (
    FLOAT8,
    DecodeTile,
    has_triton_kernel,
    launch_kernel,
    matrix_of,
    takes,
)
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.launch.ops import one_by_one, passes_dispatcher

# 1. The definition.


def dequantize_ref(
    packed: Packed, dtype: torch.dtype, transposed: bool = False, inverse_scale: Tensor | None = None
) -> Tensor:
    """The formula above through the format's own `dequantize`; see `dequantize` for the arguments."""
    w = packed.dequantize(_first_dtype(dtype, inverse_scale))
    return _finished(w, dtype, transposed, inverse_scale)


def _first_dtype(dtype: torch.dtype, inverse_scale: Tensor | None) -> torch.dtype:
    """What values are decoded to before the rest of the formula: the result's own where there is no rest."""
    return torch.float32 if dtype in FLOAT8 or inverse_scale is not None else dtype


def _finished(w: Tensor, dtype: torch.dtype, transposed: bool, inverse_scale: Tensor | None) -> Tensor:
    """What follows the product by the scale, for decoded values (..., K) of `_first_dtype`."""
    if inverse_scale is not None:
        R, C = inverse_scale.shape
        rows = w.view(prod(w.shape[:-1]), w.shape[-1])
        tiles = rows.view(R, rows.shape[0] // R, C, rows.shape[1] // C)
        w = (tiles * inverse_scale.view(R, 1, C, 1)).view(w.shape)
    w = w.clamp(-_largest(dtype), _largest(dtype)).to(dtype) if dtype in FLOAT8 else w.to(dtype)
    return w.t().contiguous() if transposed else w


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


# 2. The kernel is in dequantize_triton.py. 3. The launch.


def launch(
    parts: Sequence[Tensor],
    format: Format,
    shape: Sequence[int],
    inverse_scale: Tensor | None,
    out: Tensor,
    transposed: bool,
    tile: DecodeTile | None = None,
) -> None:
    """`dequantize_ref` into ``out`` by a kernel; else by the definition.

    ``parts`` are those of a tensor (..., K) in the format's order; ``out`` is (N, K), or transposed (K, N),
    with contiguous rows; ``inverse_scale`` is None or (R, C) float32.
    """
    shape = tuple(shape)
    named = dict(zip(format.layout(shape), parts, strict=True))
    launch_named(named, format, shape, inverse_scale, out, transposed, tile)


def launch_named(
    named: Mapping[str, Tensor],
    format: Format,
    shape: tuple[int, ...],
    inverse_scale: Tensor | None,
    out: Tensor,
    transposed: bool,
    tile: DecodeTile | None = None,
) -> None:
    """`launch` for parts (each of any shape) by name; ``out`` and ``inverse_scale`` as there."""
    if not takes(format, shape, out):
        if _by_description(named, format, shape, inverse_scale, out, transposed):
            return
        packed = Packed(format, shape, out.dtype, named)
        out.copy_(dequantize_ref(packed, out.dtype, transposed, inverse_scale).view(out.shape))
        return
    N, K = matrix_of(shape)
    if N * K == 0:
        return
    if (
        transposed
        and tile is None
        and dequantize_cuda.write_transposed(format, named, (N, K), inverse_scale, out)
    ):
        return
    launch_kernel(named, format, shape, inverse_scale, out, transposed, tile)


def _by_description(
    named: Mapping[str, Tensor],
    format: Format,
    shape: tuple[int, ...],
    inverse_scale: Tensor | None,
    out: Tensor,
    transposed: bool,
) -> bool:
    """`launch_named` by the kernel that is generated from the format's description; False where it is not.

    Transposed and 8-bit results are made of dense ones; ``inverse_scale`` is None or (R, C).
    """
    dtype = _first_dtype(out.dtype, inverse_scale)
    fits = prod(shape) > 0 and dequantize_described.is_described(format, shape)
    if not (fits and dequantize_described.can_launch(out, dtype)):
        return False
    if not all(part.is_contiguous() for part in named.values()):
        return False
    if dtype == out.dtype and not transposed and inverse_scale is None and out.stride(-1) == 1:
        dequantize_described.launch(format, named, shape, out)
        return True
    dense = torch.empty(shape, dtype=dtype, device=out.device)
    dequantize_described.launch(format, named, shape, rows_of(dense))
    out.copy_(_finished(dense, out.dtype, transposed, inverse_scale).view(out.shape))
    return True


def has_kernel(format: Format, shape: tuple[int, ...]) -> bool:
    """Whether a GPU decodes a tensor of ``shape`` (..., K) by a kernel, not by the format's definition."""
    return has_triton_kernel(format, shape) or dequantize_described.is_described(format, shape)


# 4. The ops: on a CPU they run the definition, on CUDA the kernel.


class Decoded(NamedTuple):
    """The arguments of the op that makes a new tensor."""

    parts: Sequence[Tensor]  # in the format's order
    format: str  # `text_of_format`
    shape: Sequence[int]
    dtype: torch.dtype
    transposed: bool
    inverse_scale: Tensor | None


class DecodedInto(NamedTuple):
    """The arguments of the op that writes to ``out``; the others are those of `Decoded`."""

    parts: Sequence[Tensor]
    format: str
    shape: Sequence[int]
    out: Tensor
    transposed: bool
    inverse_scale: Tensor | None


@torch.library.custom_op("fewbits::dequantize", mutates_args=())
@one_by_one
def _dequantize(o: Decoded) -> Tensor:
    packed = _named(o.parts, o.format, o.shape)
    return dequantize_ref(packed, o.dtype, o.transposed, o.inverse_scale).contiguous()


@torch.library.custom_op("fewbits::dequantize_into", mutates_args=("out",))
@one_by_one
def _dequantize_into(o: DecodedInto) -> None:
    packed = _named(o.parts, o.format, o.shape)
    o.out.copy_(dequantize_ref(packed, o.out.dtype, o.transposed, o.inverse_scale))


def _named(parts: Sequence[Tensor], format: str, shape: Sequence[int]) -> Packed:
    value = format_of_text(format)
    names = value.layout(tuple(shape))
    return Packed(value, tuple(shape), torch.float32, dict(zip(names, parts, strict=True)))


def text_of_format(format: Format) -> str:
    """A format as an op's argument."""
    return format.text


@lru_cache(maxsize=64)
def format_of_text(text: str) -> Format:
    """The format that `text_of_format` has made an op's argument of."""
    return format_from_config(json.loads(text), FORMATS)


def _out_shape(shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    return tuple(reversed(shape)) if transposed else tuple(shape)


@_dequantize.register_kernel("cuda")
@one_by_one
def _(o: Decoded) -> Tensor:
    out = torch.empty(_out_shape(o.shape, o.transposed), dtype=o.dtype, device=o.parts[0].device)
    launch(o.parts, format_of_text(o.format), o.shape, o.inverse_scale, _matrix(out), o.transposed)
    return out


def _matrix(out: Tensor) -> Tensor:
    """A new tensor of any number of axes as the rows that `launch` writes."""
    if not out.numel():
        return out
    return rows_of(out) if out.dim() else out.view(1, 1)


@_dequantize_into.register_kernel("cuda")
@one_by_one
def _(o: DecodedInto) -> None:
    launch(o.parts, format_of_text(o.format), o.shape, o.inverse_scale, o.out, o.transposed)


@_dequantize.register_fake
@one_by_one
def _(o: Decoded) -> Tensor:
    return o.parts[0].new_empty(_out_shape(o.shape, o.transposed), dtype=o.dtype)


# 5. The one public function.


def dequantize(
    packed: Packed,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    transposed: bool = False,
    inverse_scale: Tensor | None = None,
) -> Tensor:
    """The dense tensor that ``packed`` stands for.

    Args:
        packed: (..., K) in any format; one that the kernel does not know is decoded by its definition.
        dtype: of the result; None takes out's, or the one that the tensor had before.
        out: (N, K), or with ``transposed`` (K, N), to write to: its rows may lie apart, as in the left part
            of a wider buffer. None allocates.
        transposed: W^T, for a tensor of two axes.
        inverse_scale: float32, what each value is multiplied by before the last rounding: one for all, with
            shape () or (1,); or (R, C), each one for a tile of N / R rows and K / C columns of W, not of W^T.
            Meant for 8-bit outputs, ``float8(w * inverse_scale)``.

    Returns:
        ``out``, or a new contiguous tensor of packed.shape.

    Raises:
        BadInput: shapes that do not fit.
    """
    shape = packed.shape
    if transposed and len(shape) != 2:
        raise BadInput(
            f"dequantize transposes tensors of two axes, not of shape {tuple(shape)}: leave it out."
        )
    scale = None if inverse_scale is None else _checked_inverse(inverse_scale, shape)
    # The dispatcher costs 0.2 ms a call on the host, as much as decoding a large weight takes on the device.
    direct = passes_dispatcher(packed.codes)
    if out is None and direct:
        out = torch.empty(
            _out_shape(shape, transposed), dtype=dtype or packed.dtype, device=packed.codes.device
        )
        launch_named(packed.parts, packed.format, tuple(shape), scale, _matrix(out), transposed)
        return out
    if out is None:
        parts, format = list(packed.parts.values()), text_of_format(packed.format)
        return _dequantize(parts, format, shape, dtype or packed.dtype, transposed, scale)
    need = _out_shape(shape, transposed)
    if len(shape) != 2 or out.shape != need or out.stride(1) != 1 or dtype not in (None, out.dtype):
        raise BadInput(
            f"dequantize writes {need} with contiguous rows in out's dtype; out has {tuple(out.shape)}, "
            f"strides {out.stride()} and {out.dtype}: pass a matching one, or none."
        )
    if direct:
        launch_named(packed.parts, packed.format, tuple(shape), scale, out, transposed)
    else:
        parts, format = list(packed.parts.values()), text_of_format(packed.format)
        _dequantize_into(parts, format, shape, out, transposed, scale)
    return out


def _checked_inverse(inverse_scale: Tensor, shape: Sequence[int]) -> Tensor:
    N, K = prod(shape[:-1]), shape[-1] if shape else 1
    scale = inverse_scale.reshape(1, 1) if inverse_scale.numel() == 1 else inverse_scale
    fits = scale.dim() == 2 and scale.numel() and N % scale.shape[0] == 0 and K % scale.shape[1] == 0
    if scale.dtype != torch.float32 or not fits:
        raise BadInput(
            f"inverse_scale must be float32 of shape (1,), or (R, C) that divide ({N}, {K}); it is "
            f"{scale.dtype} {tuple(inverse_scale.shape)}."
        )
    return scale.contiguous()
