"""Products of 8-bit floating point, with a scale for each row of x and one for the weight.

    y = (q * scale) @ (w8 * w_scale)^T          q (M, K)  scale (M, 1)   w8 (N, K)  w_scale: one    y (M, N)

    dx = (dq * dscale) @ (w8t * w_scale)        dq (M, N) dscale (M, 1)  w8t (K, N) = w8^T          dx (M, K)

both by `float8_linear`: a GPU multiplies 8 bits by rows of both operands only, so that dx takes the weight's
bytes transposed, under the same scale. `float8_weight` writes either from a packed weight, decoded straight
to 8 bits, or from a dense one; q and scale come from quantize_float8.py or the kernel that produced x.

Precision. E4M3 has 3 bits after the point from 2^-6 to 448: a value has a relative rounding error of at
most 2^-4 as far down as amax / 28672, and below that an absolute one of at most amax * 2^-10 / 448 = amax *
2.2e-6. So one scale for a whole weight costs no precision to speak of: its rows would have to differ by
more than four orders of magnitude. Over a binade the error is uniform in steps of 2^-3, so its root mean
square is 2^-4 / sqrt(3) beside values of 1 to 2: 0.0236 of a tensor's norm if values are spread evenly over
the binade, 0.0245 if evenly over exponents, 0.0265 for each value by itself. Two operands rounded
independently make a product's error sqrt(2) times that, 0.033 to 0.0375 of its Frobenius norm. On top comes
the shorter accumulator of ``fast``, about 14 bits on Hopper.

Floor: 2 * M * N * K operations; 8192 x 14336 x 4096 are 0.96e12, 713 us at the 1350e12 a second that the
product reaches on an H200. float8_weight reads a dense bfloat16 weight once and writes 1 byte a value:
14336 x 4096 are 176 MB, 41.2 us at 4.28 TB/s; from a packed weight see dequantize.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fewbits.device import describe
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.base import Format, Packed
from fewbits.kernels.codec.dequantize import dequantize, dequantize_ref
from fewbits.kernels.codec.quantize_float8 import scale_of_amax
from fewbits.kernels.codec.quantize_float8_triton import has_kernel
from fewbits.kernels.launch.grid import programs, split_program
from fewbits.kernels.launch.jit import CompileCase, constant_when_compiled, jit, on_device_of, tl
from fewbits.kernels.launch.ops import passes_dispatcher

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
_MULTIPLE = 16  # of both sides of a weight
_SLAB_VALUES = 2**24
_TILE_N, _TILE_K = 128, 64


# 1. The definition.


def float8_linear_ref(
    q: Tensor,
    scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y (M, N): the product of what the codes stand for, in float32, rounded once."""
    y = (q.float() * scale) @ (w8.float() * w_scale.reshape(-1, 1)).t()
    return (y if bias is None else y + bias.float()).to(out_dtype)


def float8_weight_ref(weight: Packed | Tensor, transposed: bool, inverse_scale: Tensor) -> Tensor:
    """``float8(cut(w * inverse_scale))`` (N, K), or its transpose, contiguous."""
    if isinstance(weight, Packed):
        return dequantize_ref(weight, E4M3, transposed, inverse_scale.reshape(1, 1))
    w8 = (weight.float() * inverse_scale.reshape(())).clamp_(-_LARGEST, _LARGEST).to(E4M3)
    return w8.t().contiguous() if transposed else w8


# 2. The kernel: of a dense weight only, as dequantize.py has that of packed ones.


@jit
def _scaled_tile(
    w_ptr, inverse_ptr, N, K, stride_wn,
    CUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """This program's tile of ``w * inverse`` in float32, its rows and columns, and which of them are there.

    CUT: the conversion to 8 bits does not cut by itself, as a GPU's does.
    """
    row_tile, column_tile = split_program(tl.cdiv(N, BLOCK_N))
    offs_n = row_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = column_tile.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_n < N)[:, None] & (offs_k < K)[None, :]
    w = tl.load(w_ptr + offs_n[:, None] * stride_wn + offs_k[None, :], mask=mask, other=0.0)
    w = w.to(tl.float32) * tl.load(inverse_ptr)
    if CUT:
        w = tl.clamp(w, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return w, offs_n, offs_k, mask


@jit
def _float8_weight_kernel(
    w_ptr, inverse_ptr, out_ptr, N, K, stride_wn, stride_out,
    TRANSPOSED: tl.constexpr, CUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of w to 8 bits."""
    w, offs_n, offs_k, mask = _scaled_tile(w_ptr, inverse_ptr, N, K, stride_wn, CUT, BLOCK_N, BLOCK_K)
    if TRANSPOSED:
        at = offs_k[:, None] * stride_out + offs_n[None, :]
        tl.store(out_ptr + at, tl.trans(w.to(out_ptr.dtype.element_ty)), mask=tl.trans(mask))
    else:
        at = offs_n[:, None] * stride_out + offs_k[None, :]
        tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _float8_weight_pair_kernel(
    w_ptr, inverse_ptr, out_ptr, transposed_ptr, N, K, stride_wn, stride_out, stride_transposed,
    CUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of w to 8 bits, written as it is and transposed.

    Each of the two stores has a conversion of its own, and the transposed one's is kept apart by a cut that
    changes no value. Where one conversion from float32 serves both, the machine code of Triton 3.6 writes
    wrong bytes to the transposed one: on an H200, a quarter or more of them, with N a multiple of 16.
    """
    w, offs_n, offs_k, mask = _scaled_tile(w_ptr, inverse_ptr, N, K, stride_wn, CUT, BLOCK_N, BLOCK_K)
    at = offs_n[:, None] * stride_out + offs_k[None, :]
    tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=mask)
    cut = tl.clamp(w, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    at = offs_k[:, None] * stride_transposed + offs_n[None, :]
    tl.store(transposed_ptr + at, tl.trans(cut.to(out_ptr.dtype.element_ty)), mask=tl.trans(mask))


def launch_weight_pair(weight: Tensor, inverse_scale: Tensor, out: Tensor, transposed: Tensor) -> None:
    """`float8_weight_ref` of a dense weight (N, K), into ``out``, and transposed, into ``transposed``."""
    N, K = weight.shape
    if weight.numel() == 0:
        return
    with on_device_of(weight):
        _float8_weight_pair_kernel[programs(N, K, _TILE_N, _TILE_K)](
            weight, inverse_scale, out, transposed, N, K,
            weight.stride(0), out.stride(0), transposed.stride(0),
            CUT=not weight.is_cuda, BLOCK_N=_TILE_N, BLOCK_K=_TILE_K, num_warps=4,
        )  # fmt: skip


def launch_weight(weight: Tensor, inverse_scale: Tensor, out: Tensor, transposed: bool) -> None:
    """`float8_weight_ref` of a dense weight (N, K), rows contiguous, into ``out``, whose rows are too."""
    N, K = weight.shape
    if weight.numel() == 0:
        return
    block_n, block_k = (_TILE_N, _TILE_K) if transposed else (4, 1024)
    with on_device_of(weight):
        _float8_weight_kernel[programs(N, K, block_n, block_k)](
            weight, inverse_scale, out, N, K, weight.stride(0), out.stride(0),
            TRANSPOSED=transposed, CUT=not weight.is_cuda, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
        )  # fmt: skip


_WEIGHT = {"w_ptr": "*bf16", "inverse_ptr": "*fp32", "out_ptr": "*fp8e4nv"}
_WEIGHT |= dict.fromkeys(("N", "K", "stride_wn", "stride_out"), "i32")
_WEIGHT |= dict.fromkeys(("TRANSPOSED", "CUT", "BLOCK_N", "BLOCK_K"), "constexpr")
_ALIGNED = (*(name for name in _WEIGHT if name.islower()), "N", "K")


def _case(transposed: bool, block_n: int, block_k: int) -> CompileCase:
    constants = {"TRANSPOSED": transposed, "CUT": False, "BLOCK_N": block_n, "BLOCK_K": block_k}
    return CompileCase(_float8_weight_kernel, _WEIGHT, constants, _ALIGNED, 4, 89)


_PAIR = {"w_ptr": "*bf16", "inverse_ptr": "*fp32", "out_ptr": "*fp8e4nv", "transposed_ptr": "*fp8e4nv"}
_PAIR |= dict.fromkeys(("N", "K", "stride_wn", "stride_out", "stride_transposed"), "i32")
_PAIR |= dict.fromkeys(("CUT", "BLOCK_N", "BLOCK_K"), "constexpr")
_PAIR_ALIGNED = (*(name for name in _PAIR if name.islower()), "N", "K")
_PAIR_CONSTANTS = {"CUT": False, "BLOCK_N": _TILE_N, "BLOCK_K": _TILE_K}

COMPILE_CASES = (
    _case(False, 4, 1024),
    _case(True, _TILE_N, _TILE_K),
    CompileCase(_float8_weight_pair_kernel, _PAIR, _PAIR_CONSTANTS, _PAIR_ALIGNED, 4, 89),
    CompileCase(
        _float8_weight_pair_kernel, _PAIR | {"w_ptr": "*fp32"}, _PAIR_CONSTANTS, _PAIR_ALIGNED, 4, 89
    ),
)


# 3. The op of a dense weight. The product is torch's own, which the compiler knows.


@torch.library.custom_op("fewbits::float8_weight", mutates_args=("out",))
def _float8_weight(weight: Tensor, inverse_scale: Tensor, out: Tensor, transposed: bool) -> None:
    out.copy_(float8_weight_ref(weight, transposed, inverse_scale))


@_float8_weight.register_kernel("cuda")
def _cuda_weight(weight: Tensor, inverse_scale: Tensor, out: Tensor, transposed: bool) -> None:
    if not has_kernel(weight):
        out.copy_(float8_weight_ref(weight, transposed, inverse_scale))
    else:
        launch_weight(weight, inverse_scale, out, transposed)


@torch.library.custom_op("fewbits::float8_weight_pair", mutates_args=("out", "transposed"))
def _float8_weight_pair(weight: Tensor, inverse_scale: Tensor, out: Tensor, transposed: Tensor) -> None:
    out.copy_(float8_weight_ref(weight, False, inverse_scale))
    transposed.copy_(out.t())


@_float8_weight_pair.register_kernel("cuda")
def _cuda_pair(weight: Tensor, inverse_scale: Tensor, out: Tensor, transposed: Tensor) -> None:
    if not has_kernel(weight):
        out.copy_(float8_weight_ref(weight, False, inverse_scale))
        transposed.copy_(out.t())
    else:
        launch_weight_pair(weight, inverse_scale, out, transposed)


# 4. The public functions. They have no gradient: they are what autograd nodes of whole layers are made of.


def weight_scale(*weights: Packed | Tensor) -> Tensor:
    """The one scale of a weight's, or of several weights', codes: the largest magnitude over 448.

    A packed weight is decoded a slab of rows at a time, 64 MiB at most where its format can be cut by rows.

    Args:
        *weights: (N, K) each; those of a product of several linears side by side take one scale.

    Returns:
        (1, 1) float32.
    """
    largest = torch.stack([_largest(weight) for weight in weights]).amax(0)
    return scale_of_amax(largest).view(1, 1)


def weight_scales(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """`weight_scale` of each group of dense weights, all of them read once, in few launches.

    On a GPU one launch reads up to 21 million values, whatever weights they belong to, and nothing comes from
    the host, so that a graph can hold it.

    Args:
        groups: the weights of each product; all on one device.

    Returns:
        (G,) float32, bit for bit what `weight_scale` gives.
    """
    widest = max(len(group) for group in groups)
    largest = iter(torch._foreach_norm([weight.detach() for group in groups for weight in group], torch.inf))
    rows = [[next(largest) for _ in group] for group in groups]
    padded = [value for row in rows for value in (*row, *row[:1] * (widest - len(row)))]
    return scale_of_amax(torch.stack(padded).view(-1, widest).amax(1))


def float8_weight(
    weight: Packed | Tensor, *, transposed: bool = False, inverse_scale: Tensor, out: Tensor | None = None
) -> Tensor:
    """``float8(w * inverse_scale)``, cut to plus or minus 448.

    Args:
        weight: (N, K), packed in any format, or dense.
        transposed: W^T, for the product of the backward pass.
        inverse_scale: one float32, ``1 / weight_scale(weight)``.
        out: (N, K), or with ``transposed`` (K, N), of float8_e4m3fn to write to: its rows contiguous but
            perhaps apart, as in the columns of a wider buffer. None allocates.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        Unsupported: the GPU has no 8-bit floating point.
    """
    device = weight.codes.device if isinstance(weight, Packed) else weight.device
    require_float8(device)
    if isinstance(weight, Packed):
        return dequantize(weight, E4M3, out=out, transposed=transposed, inverse_scale=inverse_scale)
    N, K = weight.shape
    need = (K, N) if transposed else (N, K)
    if out is None:
        out = torch.empty(need, dtype=E4M3, device=device)
    if out.shape != need or out.dtype != E4M3 or (out.stride(1) != 1 and out.shape[1] != 1):
        raise BadInput(
            f"float8_weight writes {need} of float8_e4m3fn with contiguous rows; out has {tuple(out.shape)}, "
            f"strides {out.stride()} and {out.dtype}: pass a matching one, or none."
        )
    weight = weight.detach()
    rows = weight if weight.stride(1) == 1 or K == 1 else weight.contiguous()
    (_cuda_weight if passes_dispatcher(weight) else _float8_weight)(rows, inverse_scale, out, transposed)
    return out


def float8_weight_pair(weight: Tensor, *, inverse_scale: Tensor, out: Tensor, transposed: Tensor) -> None:
    """`float8_weight` of a dense weight (N, K) and of its transpose, which is read once for both.

    Args:
        weight: rows contiguous.
        inverse_scale: as in `float8_weight`.
        out: (N, K) float8_e4m3fn, its rows contiguous but perhaps apart.
        transposed: (K, N), likewise.
    """
    require_float8(weight.device)
    weight = weight.detach()
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    N, K = rows.shape
    for result, shape in ((out, (N, K)), (transposed, (K, N))):
        if result.shape != shape or result.dtype != E4M3 or (result.stride(1) != 1 and result.shape[1] != 1):
            raise BadInput(
                f"float8_weight_pair writes {shape} of float8_e4m3fn with contiguous rows; it got "
                f"{tuple(result.shape)}, strides {result.stride()} and {result.dtype}."
            )
    (_cuda_pair if passes_dispatcher(rows) else _float8_weight_pair)(rows, inverse_scale, out, transposed)


def float8_linear(
    q: Tensor,
    scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """``(q * scale) @ (w8 * w_scale)^T + bias``.

    Args:
        q: (M, K) float8_e4m3fn, rows contiguous.
        scale: (M, 1) float32, from `quantize_rows`.
        w8: (N, K) float8_e4m3fn, contiguous, from `float8_weight`; for a gradient the transposed weight.
        w_scale: float32, one for the weight, or (1, N): see `scale_row`.
        bias: (N,).
        out_dtype: bfloat16 is what the units write themselves; others take a second pass over y.
        fast: add up in the tensor cores' own, shorter, accumulator.
        out: (M, N) of out_dtype, bfloat16 only, contiguous, where to write; None allocates.

    Returns:
        y (M, N).

    Raises:
        Unsupported: the GPU has no 8-bit floating point, or N or K is no multiple of 16.
    """
    _check_product(q, scale, w8, w_scale)
    if not q.is_cuda:
        y = float8_linear_ref(q, scale, w8, w_scale, bias, out_dtype)
        return y if out is None else out.copy_(y)
    if out_dtype != torch.bfloat16:
        return _in_two_passes(q, scale, w8, w_scale, bias, out_dtype, fast, out)
    others: dict[str, Any] = {} if out is None else {"out": out}
    return torch._scaled_mm(
        q,
        w8.t(),
        scale,
        scale_row(w_scale, w8.shape[0]),
        bias=None if bias is None else bias.to(out_dtype),
        out_dtype=out_dtype,
        use_fast_accum=fast,
        **others,
    )


def scale_row(w_scale: Tensor, N: int) -> Tensor:
    """A weight's one scale as the (1, N) contiguous row that the product takes; worth keeping for a layer."""
    if w_scale.numel() == N:
        return w_scale.view(1, N)
    return w_scale.reshape(1, 1).expand(1, N).contiguous()


def _in_two_passes(
    q: Tensor,
    scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
    out: Tensor | None,
) -> Tensor:
    """The product of the codes in float32, then the scales; a GPU's row scales go with bfloat16 only."""
    one = torch.ones((), dtype=torch.float32, device=q.device)
    y = torch._scaled_mm(q, w8.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
    y.mul_(scale).mul_(w_scale.reshape(1, -1))
    y = (y if bias is None else y.add_(bias)).to(out_dtype)
    return y if out is None else out.copy_(y)


def _check_product(q: Tensor, scale: Tensor, w8: Tensor, w_scale: Tensor) -> None:
    require_float8(q.device)
    fits = q.dim() == 2 and w8.dim() == 2 and q.shape[1] == w8.shape[1] and q.dtype == w8.dtype == E4M3
    if not fits or scale.shape != (q.shape[0], 1) or w_scale.numel() not in (1, w8.shape[0]):
        raise BadInput(
            "float8_linear takes q (M, K) and w8 (N, K) of float8_e4m3fn, scale (M, 1), 1 or N w_scale; got "
            f"{tuple(q.shape)} {q.dtype}, {tuple(w8.shape)} {w8.dtype}, {tuple(scale.shape)} and "
            f"{tuple(w_scale.shape)}."
        )
    if w8.shape[0] % _MULTIPLE or w8.shape[1] % _MULTIPLE:
        raise Unsupported(
            f"a float8 product needs a weight whose sides are multiples of {_MULTIPLE}, not "
            f"{tuple(w8.shape)}: leave this linear in bfloat16."
        )


@lru_cache(maxsize=64)
@constant_when_compiled
def require_float8(device: torch.device) -> None:
    """Refuse a GPU without 8-bit floating point; a CPU runs the definition."""
    if device.type == "cuda":
        describe(device).require("float8", "a float8 product")


def _largest(weight: Packed | Tensor) -> Tensor:
    """The largest magnitude, float32, of no axes."""
    if isinstance(weight, Packed):
        slabs = [_largest(dequantize(slab, torch.float32)) for slab in _slabs(weight)]
        return torch.stack(slabs).amax()
    if not weight.numel():
        return torch.zeros((), device=weight.device, dtype=torch.float32)
    low, high = torch.aminmax(weight.detach())
    return torch.maximum(-low, high).float()


def _slabs(weight: Packed) -> list[Packed]:
    """The weight cut by rows into equal packed ones, as many as make slabs small, or itself."""
    N, K = weight.shape
    count = 1
    while N * K // count > _SLAB_VALUES and N % (2 * count) == 0:
        count *= 2
    while count > 1 and not _cuts(weight.format, N, K, count):
        count //= 2
    if count == 1:
        return [weight]
    layout = weight.format.layout((N // count, K))
    slabs = []
    for i in range(count):
        parts = {}
        for name, part in weight.parts.items():
            rows = layout[name].shape[0]
            parts[name] = part if layout[name].shape == part.shape else part[i * rows : (i + 1) * rows]
        slabs.append(Packed(weight.format, (N // count, K), weight.dtype, parts))
    return slabs


def _cuts(format: Format, N: int, K: int, count: int) -> bool:
    """Whether every part of the tensor is that of its slabs below each other, or the same for all.

    Asked of 4096 such tensors, so that no rounding up to whole blocks looks like a fit.
    """
    slab, whole = format.layout((N // count, K)), format.layout((N * 4096, K))
    return all(
        part.shape == slab[name].shape
        or part.shape == (slab[name].shape[0] * count * 4096, *slab[name].shape[1:])
        for name, part in whole.items()
    )
