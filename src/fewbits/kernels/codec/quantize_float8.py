"""A tensor to 8-bit floating point and its scales: by rows, whole, or by blocks of 128.

    scale = max(amax / L, 2^-126)        q = float8(cut(x * (1 / scale)))        x ~ q * scale

with amax the largest magnitude under that scale and L the largest number of the type, 448 for E4M3 and 57344
for E5M2; cut to plus or minus L, rounded to nearest, ties to even. x (M, N), q (M, N), scale (M, 1) for rows.
Bit for bit the codes and scales of the formats ``float8_e4m3_row``, ``float8_e4m3`` and so on.

What is not finite: an amax that is NaN or infinite makes a scale that is NaN over codes that are 0, so that
the whole block comes back as NaN, never as a plausible number. Where amax or the scale is given beforehand,
what lies beyond it is cut, and a NaN or an infinity becomes the code NaN. There is no gradient.

Floor: x is read once and q written once, 3 * M * N bytes from 16 bits. M = 8192 rows of N = 4096, 14336 and
28672 are 101 MB, 352 MB and 705 MB: 23.5 us, 82.3 us and 164.6 us at the 4.28 TB/s that a copy reaches on an
H200. A program holds whole rows in registers, so that x is read once even where the scale comes from it.

The kernels are in quantize_float8_triton.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.blocks import SMALLEST_SCALE, ceil_div, divide, from_blocks, to_blocks
from fewbits.kernels.codec.quantize_float8_triton import has_kernel, launch_blocks, launch_rows, launch_tensor
from fewbits.kernels.launch.ops import passes_dispatcher

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCKS = ((1, 128), (128, 128))


# 1. The definition.


def scale_of_amax(amax: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """The scale under which ``amax`` becomes the largest number of ``dtype``; float32, amax's shape."""
    amax = amax.float()
    return divide(amax.masked_fill(amax.isinf(), torch.nan), torch.finfo(dtype).max).clamp_(
        min=SMALLEST_SCALE
    )


def codes_of(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """q of x's shape under a scale that broadcasts with it."""
    return codes_under(x, 1.0 / scale, dtype)


def codes_under(x: Tensor, inverse_scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """q of x's shape under an inverse scale that broadcasts with it."""
    largest = torch.finfo(dtype).max
    scaled = (x.float() * inverse_scale).clamp_(-largest, largest)
    scaled.masked_fill_(x.isinf(), torch.nan)
    return scaled.masked_fill_(inverse_scale.isnan(), 0.0).to(dtype)


def quantize_rows_ref(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q (M, N) and scale (M, 1); ``amax`` (M,) is each row's largest magnitude, if known."""
    if amax is None:
        amax = x.abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0])
    scale = scale_of_amax(amax, dtype)[:, None]
    return codes_of(x, scale, dtype), scale


def quantize_tensor_ref(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q of x's shape and scale (1,)."""
    if scale is None:
        if amax is None:
            amax = x.abs().amax().view(1) if x.numel() else x.new_zeros(1)
        scale = scale_of_amax(amax, dtype)
    return codes_of(x, scale, dtype), scale.clone()


def quantize_blocks_ref(
    x: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """q (M, N) and scale (ceil(M / rows), ceil(N / columns)); the last blocks may be short."""
    M, N = x.shape
    shape = ceil_div(M, block[0]), ceil_div(N, block[1])
    if x.numel() == 0:
        return x.to(dtype), torch.zeros(shape, device=x.device, dtype=torch.float32)
    blocks = to_blocks(x, block)
    scale = scale_of_amax(blocks.abs().amax(dim=(1, 3), keepdim=True), dtype)
    return from_blocks(codes_of(blocks, scale, dtype), (M, N), block), scale.view(shape)


# 2. The ops: on a CPU they run the definition, on CUDA the kernels.


@torch.library.custom_op("fewbits::quantize_float8_rows", mutates_args=("q", "scale"))
def _rows(x: Tensor, amax: Tensor | None, q: Tensor, scale: Tensor) -> None:
    _copy((q, scale), quantize_rows_ref(x, q.dtype, amax))


@torch.library.custom_op("fewbits::quantize_float8_tensor", mutates_args=("q", "scale"))
def _tensor(x: Tensor, factor: Tensor, is_scale: bool, q: Tensor, scale: Tensor) -> None:
    scale_and_amax = (factor, None) if is_scale else (None, factor)
    _copy((q, scale), quantize_tensor_ref(x, q.dtype, *scale_and_amax))


@torch.library.custom_op("fewbits::quantize_float8_blocks", mutates_args=("q", "scale"))
def _blocks(x: Tensor, rows: int, columns: int, q: Tensor, scale: Tensor) -> None:
    _copy((q, scale), quantize_blocks_ref(x, (rows, columns), q.dtype))


def _copy(outputs: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


@_rows.register_kernel("cuda")
def _cuda_rows(x: Tensor, amax: Tensor | None, q: Tensor, scale: Tensor) -> None:
    if not has_kernel(x):
        _copy((q, scale), quantize_rows_ref(x, q.dtype, amax))
    elif x.numel():
        launch_rows(x, q, scale, amax=amax)
    else:
        scale.fill_(SMALLEST_SCALE)


@_tensor.register_kernel("cuda")
def _cuda_tensor(x: Tensor, factor: Tensor, is_scale: bool, q: Tensor, scale: Tensor) -> None:
    if has_kernel(x) and x.numel():
        launch_tensor(x, q, scale, factor=factor, is_scale=is_scale)
    else:
        scale_and_amax = (factor, None) if is_scale else (None, factor)
        _copy((q, scale), quantize_tensor_ref(x, q.dtype, *scale_and_amax))


@_blocks.register_kernel("cuda")
def _cuda_blocks(x: Tensor, rows: int, columns: int, q: Tensor, scale: Tensor) -> None:
    if has_kernel(x) and x.numel():
        launch_blocks(x, q, scale, (rows, columns))
    else:
        _copy((q, scale), quantize_blocks_ref(x, (rows, columns), q.dtype))


# 3. The public functions. They have no gradient: q is no function of x that has one.


def quantize_rows(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row to 8 bits under its own scale.

    Args:
        x: (M, N), floating point; rows contiguous but perhaps apart.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2; that of ``out`` where that is given.
        out: (M, N), where to write; its rows contiguous but perhaps apart. None allocates.
        amax: (M,) float32, the largest magnitude of each row, if known: a row is then not searched first.

    Returns:
        q (M, N), and scale (M, 1) in float32: ``q * scale`` comes back.
    """
    x = _as_rows(x)
    q = _buffer(x, dtype, out)
    scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    if amax is not None:
        amax = _checked(amax, (x.shape[0],), "amax")
    _dispatch(_rows, _cuda_rows, x, amax, q, scale)
    return q, scale


def quantize_tensor(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All of x to 8 bits under one scale: a given one, that of a given amax, or its own.

    Args:
        x: (M, N), floating point; rows contiguous but perhaps apart.
        dtype: as in `quantize_rows`.
        out: as in `quantize_rows`.
        scale: (1,) float32 and positive: what lies beyond ``scale * 448`` is cut.
        amax: (1,) float32, the largest magnitude, if known; without it and a scale, x is read twice.

    Returns:
        q (M, N), and scale (1,) in float32.
    """
    if scale is not None and amax is not None:
        raise BadInput("quantize_tensor takes a scale or an amax, not both: leave one out.")
    x = _as_rows(x)
    q = _buffer(x, dtype, out)
    factor = scale if amax is None else amax
    if factor is None:
        factor = _largest_of_all(x)
    factor = _checked(factor.reshape(-1), (1,), "scale" if amax is None else "amax")
    inverse = torch.empty(1, dtype=torch.float32, device=x.device)
    _dispatch(_tensor, _cuda_tensor, x, factor, scale is not None, q, inverse)
    return q, inverse


def quantize_blocks(
    x: Tensor,
    *,
    block: tuple[int, int] = (1, 128),
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks of 128 values of a row, or of 128 x 128, to 8 bits, each under its own scale.

    Args:
        x: (M, N), floating point; rows contiguous but perhaps apart.
        block: (1, 128) or (128, 128); the last ones may be short.
        dtype: as in `quantize_rows`.
        out: as in `quantize_rows`.

    Returns:
        q (M, N), and scale (ceil(M / rows), ceil(N / 128)) in float32.
    """
    if block not in _BLOCKS:
        raise BadInput(f"quantize_blocks has blocks of (1, 128) and (128, 128), not {block}.")
    x = _as_rows(x)
    q = _buffer(x, dtype, out)
    shape = ceil_div(x.shape[0], block[0]), ceil_div(x.shape[1], block[1])
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    _dispatch(_blocks, _cuda_blocks, x, *block, q, scale)
    return q, scale


def _dispatch(op, on_cuda, x: Tensor, *others) -> None:
    """Through the op for the compiler; else straight, past a dispatcher that costs as much as a launch."""
    if passes_dispatcher(x):
        on_cuda(x, *others)
    else:
        op(x, *others)


def _largest_of_all(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def _as_rows(x: Tensor) -> Tensor:
    if x.dim() != 2 or not x.is_floating_point():
        raise BadInput(
            f"float8 codes are made of floating-point tensors (M, N), not {x.dtype} {tuple(x.shape)}: give a "
            "view of two axes."
        )
    x = x.detach()
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _buffer(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out is None:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.dtype not in FLOAT8 or out.shape != x.shape or (out.stride(1) != 1 and out.shape[1] != 1):
        raise BadInput(
            f"the codes of {tuple(x.shape)} are float8_e4m3fn or float8_e5m2 of that shape, rows contiguous, "
            f"not {out.dtype} {tuple(out.shape)} {out.stride()}."
        )
    return out


def _checked(factor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    if factor.shape != shape or factor.dtype != torch.float32:
        raise BadInput(f"{name} must be float32 {shape}; it is {factor.dtype} {tuple(factor.shape)}.")
    return factor.contiguous()
