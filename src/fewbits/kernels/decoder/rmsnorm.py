"""Root-mean-square normalisation (Zhang and Sennrich 2019), forward and backward.

    y = x * r * (offset + w)       r = (mean(x^2) + eps)^(-1/2), one number a row       x, y (..., N)   w (N,)

    g  = dy * (offset + w)          xhat = x * r
    dx = r * (g - xhat * mean(g * xhat))
    dw = sum over rows of dy * xhat

``offset`` is 1 for Gemma, whose weights are stored as the difference from one, else 0. All arithmetic is in
float32 (float64 for float64), and y is rounded once, to x's dtype. Transformers' Llama rounds twice in 16
bits, first ``x * r`` and then its product with w: so the two agree bit for bit in float32, and to one
rounding in 16 bits.

Floor: the forward pass reads x and writes y, 2 * M * N * itemsize bytes; the backward pass reads dy and x
and writes dx, 3 * M * N * itemsize; r, w and dw are less than 1 % of that at N >= 512. M = 8192 rows of N =
4096 in bfloat16 are 134 MB and 201 MB: 31.4 us and 47.0 us at the 4.28 TB/s that a copy reaches on an H200.

In a decoder more stands beside a norm: x is a sum that has to be written too, the result goes into a product
of 8-bit operands (see quantize_float8.py), and the backward pass is followed by the addition of the gradient
that went round the norm. `rmsnorm_rows` and `rmsnorm_backward_rows` do all of it in the same pass: 2 more
bytes a value for the residual, 2 for the sum, 1 for float8.

The kernels are in rmsnorm_triton.py. dw is deterministic: each program sums its own rows, and a second pass
adds these sums in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.codec.quantize_float8 import quantize_rows_ref
from fewbits.kernels.codec.quantize_float8_triton import has_kernel as converts_float8
from fewbits.kernels.decoder.rmsnorm_triton import (
    KERNEL_DTYPES,
    Float8Rows,
    NormedRows,
    RowOutputs,
    SumTile,
    as_rows,
    launch_backward_rows,
    launch_rows,
)
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.launch.jit import RowTile
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.launch.ops import one_by_one, passes_dispatcher, run

# 1. The definition.


def rmsnorm_ref(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """y (..., N) in x's dtype, and r (...) in float32 or wider."""
    acc = torch.promote_types(x.dtype, torch.float32)
    xf = x.to(acc)
    r = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return (xf * r * (weight.to(acc) + offset)).to(x.dtype), r.squeeze(-1)


def rmsnorm_backward_ref(
    dy: Tensor, x: Tensor, weight: Tensor, r: Tensor, offset: float = 0.0, needs_dw: bool = True
) -> tuple[Tensor, Tensor]:
    """dx (..., N) in x's dtype, and dw (N,) in weight's; dw is empty unless it is needed."""
    acc = r.dtype
    dyf, xhat = dy.to(acc), x.to(acc) * r.unsqueeze(-1)
    g = dyf * (weight.to(acc) + offset)
    dx = r.unsqueeze(-1) * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if not needs_dw:
        return dx.to(x.dtype), weight.new_empty(0)
    dw = rows_of(dyf * xhat).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype)


class Normed(NamedTuple):
    """What `rmsnorm_rows` gives; None for what was not asked for."""

    y: Tensor | None  # (M, N) in x's dtype, or in the one asked for
    q: Tensor | None  # (M, N) float8: quantize_rows(y)
    scale: Tensor | None  # (M, 1) float32
    r: Tensor  # (M,) float32
    summed: Tensor | None  # (M, N): x + residual, of which y is the norm


class NormGradients(NamedTuple):
    """What `rmsnorm_backward_rows` gives; None for what was not asked for."""

    dx: Tensor  # (M, N) in x's dtype, with the residual
    dw: Tensor | None  # (N,) in the weight's dtype
    q: Tensor | None  # (M, N) float8: quantize_rows(dx)
    scale: Tensor | None  # (M, 1) float32


def rmsnorm_rows_ref(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    residual: Tensor | None = None,
    quantize: bool = False,
    dtype: torch.dtype | None = None,
) -> Normed:
    """The norm of ``x + residual``, which is rounded to x's dtype first, and of its rounded result q.

    x and ``residual`` are (M, N), ``weight`` (N,); y, q and the sum are (M, N), r (M,), the scale (M, 1).
    """
    summed = None if residual is None else x + residual
    y, r = rmsnorm_ref(x if summed is None else summed, weight, eps, offset)
    y = y if dtype is None else y.to(dtype)
    q, scale = quantize_rows_ref(y) if quantize else (None, None)
    return Normed(y, q, scale, r, summed)


def rmsnorm_backward_rows_ref(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    offset: float = 0.0,
    residual: Tensor | None = None,
    needs_dw: bool = False,
) -> NormGradients:
    """dx, plus the residual in float32 or wider, rounded once; dx in float8 is quantize_rows_ref(dx).

    dy, x and ``residual`` are (M, N), ``weight`` (N,), r (M,); dx is (M, N), dw (N,) or None.
    """
    dx, dw = rmsnorm_backward_ref(dy, x.to(r.dtype), weight, r, offset, needs_dw)
    if residual is not None:
        dx = dx + residual.to(r.dtype)
    return NormGradients(dx.to(x.dtype), dw if needs_dw else None, None, None)


# 2. The launches.


def launch_fwd(
    x: Tensor, weight: Tensor, eps: float, offset: float, tile: RowTile | None = None
) -> tuple[Tensor, Tensor]:
    """`rmsnorm_ref` by the Triton kernel; float64 has none and runs the reference.

    Raises:
        Unsupported: a row is longer than 65,536 values.
    """
    if x.dtype not in KERNEL_DTYPES:
        return _rmsnorm_default(x, weight, eps, offset)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    r = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    launch_rows(as_rows(x), weight.contiguous(), eps, offset, RowOutputs(y, r), tile=tile)
    return y, r


def launch_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    offset: float,
    needs_dw: bool,
    tile: RowTile | None = None,
    sum_tile: SumTile | None = None,
) -> tuple[Tensor, Tensor]:
    """`rmsnorm_backward_ref` by the Triton kernel; float64 has none and runs the reference."""
    if x.dtype not in KERNEL_DTYPES:
        return _rmsnorm_backward_default(dy, x, weight, r, offset, needs_dw)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = NormedRows(as_rows(x), weight.contiguous(), r, offset)
    dw = launch_backward_rows(as_rows(dy), normed, dx, needs_dw=needs_dw, tile=tile, sum_tile=sum_tile)
    return dx, weight.new_empty(0) if dw is None else dw


# 3. The ops: on a CPU they run the definition, on CUDA the kernels.


def _rmsnorm_default(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    y, r = rmsnorm_ref(x, weight, eps, offset)
    return y.contiguous(), r.contiguous()


def _rmsnorm_backward_default(
    dy: Tensor, x: Tensor, weight: Tensor, r: Tensor, offset: float, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    dx, dw = rmsnorm_backward_ref(dy, x, weight, r, offset, needs_dw)
    return dx.contiguous(), dw


_rmsnorm = torch.library.custom_op("fewbits::rmsnorm", _rmsnorm_default, mutates_args=())
_rmsnorm.register_kernel("cuda")(launch_fwd)

_rmsnorm_backward = torch.library.custom_op(
    "fewbits::rmsnorm_backward", _rmsnorm_backward_default, mutates_args=()
)
_rmsnorm_backward.register_kernel("cuda")(launch_bwd)


class RowsForward(NamedTuple):
    """The arguments of the op of `rmsnorm_rows`; what is None is not wanted."""

    x: Tensor
    weight: Tensor
    eps: float
    offset: float
    residual: Tensor | None
    y: Tensor | None
    q: Tensor | None
    scale: Tensor | None
    r: Tensor
    summed: Tensor | None


class RowsBackward(NamedTuple):
    """The arguments of the op of `rmsnorm_backward_rows`; what is None is not wanted."""

    dy: Tensor
    x: Tensor
    weight: Tensor
    r: Tensor
    offset: float
    residual: Tensor | None
    dx: Tensor
    dw: Tensor | None
    q: Tensor | None
    scale: Tensor | None


def _rmsnorm_rows_default(o: RowsForward) -> None:
    dtype = None if o.y is None else o.y.dtype
    results = rmsnorm_rows_ref(o.x, o.weight, o.eps, o.offset, o.residual, o.q is not None, dtype)
    _copy((o.y, o.q, o.scale, o.r, o.summed), results)


def _rmsnorm_backward_rows_default(o: RowsBackward) -> None:
    needs_dw = o.dw is not None
    results = rmsnorm_backward_rows_ref(o.dy, o.x, o.weight, o.r, o.offset, o.residual, needs_dw)
    float8 = (None, None) if o.q is None else quantize_rows_ref(results.dx)
    _copy((o.dx, o.dw, o.q, o.scale), (results.dx, results.dw, *float8))


def _copy(outputs: tuple[Tensor | None, ...], results: tuple[Tensor | None, ...]) -> None:
    for output, result in zip(outputs, results, strict=True):
        if output is not None and result is not None:
            output.copy_(result)


def _has_kernel(x: Tensor, q: Tensor | None) -> bool:
    """Whether the kernels read rows x (M, N), and write the float8 ones that are wanted."""
    return x.dtype in KERNEL_DTYPES and (q is None or converts_float8(x))


def _cuda_rows(o: RowsForward) -> None:
    if not _has_kernel(o.x, o.q):
        _rmsnorm_rows_default(o)
        return
    float8 = None if o.q is None or o.scale is None else Float8Rows(o.q, o.scale)
    into = RowOutputs(o.y, o.r, o.summed, float8)
    launch_rows(o.x, o.weight.contiguous(), o.eps, o.offset, into, residual=o.residual)


def _cuda_backward_rows(o: RowsBackward) -> None:
    if not _has_kernel(o.x, o.q):
        _rmsnorm_backward_rows_default(o)
        return
    normed = NormedRows(o.x, o.weight.contiguous(), o.r, o.offset)
    float8 = None if o.q is None or o.scale is None else Float8Rows(o.q, o.scale)
    needs_dw = o.dw is not None
    dw = launch_backward_rows(o.dy, normed, o.dx, needs_dw=needs_dw, residual=o.residual, float8=float8)
    _copy((o.dw,), (dw,))


_rmsnorm_rows = torch.library.custom_op(
    "fewbits::rmsnorm_rows",
    one_by_one(_rmsnorm_rows_default),
    mutates_args=("y", "q", "scale", "r", "summed"),
)
_rmsnorm_rows.register_kernel("cuda")(one_by_one(_cuda_rows))

_rmsnorm_backward_rows = torch.library.custom_op(
    "fewbits::rmsnorm_backward_rows",
    one_by_one(_rmsnorm_backward_rows_default),
    mutates_args=("dx", "dw", "q", "scale"),
)
_rmsnorm_backward_rows.register_kernel("cuda")(one_by_one(_cuda_backward_rows))


@_rmsnorm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    acc = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=acc)


@_rmsnorm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, r: Tensor, offset: float, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if needs_dw else (0,))


# 4. The gradient, and the public functions.


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


@once_differentiable("rmsnorm")
def _backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
    x, weight, r = ctx.saved_tensors
    _needs_dx, needs_dw, *_ = ctx.needs_input_grad
    dx, dw = _rmsnorm_backward(dy, x, weight, r, ctx.offset, needs_dw)
    return dx, dw if needs_dw else None, None, None


_rmsnorm.register_autograd(_backward, setup_context=_setup_context)


class _Straight(torch.autograd.Function):
    """The same without the dispatcher, which costs the host more than a kernel takes, or a definition.

    Forward and backward of 512 rows of 192 on a CPU: 0.45 ms, through the op 0.81 ms (one core, torch 2.13).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        y, r = (launch_fwd if x.is_cuda else _rmsnorm_default)(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, r)
        ctx.offset = offset
        return y

    @staticmethod
    @once_differentiable("rmsnorm")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        _needs_dx, needs_dw, *_ = ctx.needs_input_grad
        x, weight, r = ctx.saved_tensors
        f = launch_bwd if x.is_cuda else _rmsnorm_backward_default
        dx, dw = f(dy, x, weight, r, ctx.offset, needs_dw)
        return dx, dw if needs_dw else None, None, None


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """``x * (mean(x^2) + eps)^(-1/2) * (offset + weight)`` along the last axis.

    Args:
        x: (..., N), any strides.
        weight: (N,), in any floating dtype; frozen ones cost no gradient.
        eps: added to the mean square.
        offset: 1 for Gemma, whose weights are stored as the difference from one.

    Returns:
        (..., N), contiguous, in x's dtype.
    """
    if weight.shape != x.shape[-1:]:
        need, have = tuple(x.shape[-1:]), tuple(weight.shape)
        raise BadInput(f"rmsnorm's weight must have shape {need}, as x's rows do; it has {have}.")
    if passes_dispatcher(x) or (x.device.type == "cpu" and not torch.compiler.is_compiling()):
        return _Straight.apply(x, weight, eps, offset)
    return _rmsnorm(x, weight, eps, offset)[0]


def rmsnorm_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: Tensor | None = None,
    quantize: bool = False,
    keep_dense: bool = True,
    dtype: torch.dtype | None = None,
) -> Normed:
    """The forward pass alone, with what stands beside a norm: for autograd nodes of half a decoder layer.

    Args:
        x: (M, N); rows contiguous but perhaps apart.
        weight: (N,).
        eps: added to the mean square.
        offset: as in `rmsnorm`.
        residual: (M, N), added to x first; the sum is rounded to x's dtype and given back.
        quantize: give the result in E4M3 too, a scale for each row: that of quantize_rows(y), bit for bit.
        keep_dense: False gives float8 alone.
        dtype: of the dense result, from which float8 is made; None is x's. Under autocast x and the weight
            are float32, and the product that follows takes 16 bits.

    Returns:
        `Normed`.
    """
    _check_rows(x, weight, residual)
    if not (quantize or keep_dense):
        raise BadInput(
            "rmsnorm_rows without float8 and without its dense result computes nothing: ask for one."
        )
    (M, N), empty = x.shape, x.new_empty
    # float8 is made of the dense result as ``dtype`` has it: where that is not x's, a buffer says so.
    y = empty(M, N, dtype=dtype or x.dtype) if keep_dense or dtype not in (None, x.dtype) else None
    q, scale = _float8_rows(x) if quantize else (None, None)
    r = empty(M, dtype=torch.promote_types(x.dtype, torch.float32))
    summed = None if residual is None else empty(M, N)
    arguments = RowsForward(x, weight, eps, offset, residual, y, q, scale, r, summed)
    run(_rmsnorm_rows, _cuda_rows, x, arguments)
    return Normed(y if keep_dense else None, q, scale, r, summed)


def rmsnorm_backward_rows(
    dy: Tensor,
    normed: NormedRows,
    *,
    residual: Tensor | None = None,
    needs_dw: bool = False,
    out: Tensor | None = None,
    quantize: bool = False,
) -> NormGradients:
    """The backward pass alone, and in the same pass the gradient that goes round the norm.

    Args:
        dy: (M, N), of any dtype; rows contiguous but perhaps apart, as are those of x and residual.
        normed: x (`Normed.summed` where there was a residual), the weight, r from `rmsnorm_rows`, and the
            offset as in `rmsnorm`.
        residual: (M, N), added to dx before its one rounding: the gradient of the connection round the norm.
        needs_dw: give the weight's gradient.
        out: (M, N) contiguous, where to write dx; may be dy, x or residual itself.
        quantize: give dx in E4M3 too, for the next product: quantize_rows(dx), bit for bit.

    Returns:
        `NormGradients`.
    """
    x, weight, r, offset = normed
    _check_rows(x, weight, residual)
    _check_rows(dy, weight, None)
    dx = x.new_empty(x.shape) if out is None else out
    if dx.shape != x.shape or dx.dtype != x.dtype or not dx.is_contiguous():
        raise BadInput(
            f"out must be {tuple(x.shape)} {x.dtype}, contiguous; it is {tuple(dx.shape)} {dx.dtype}."
        )
    dw = weight.new_empty(weight.shape) if needs_dw else None
    q, scale = _float8_rows(x) if quantize else (None, None)
    arguments = RowsBackward(dy, x, weight, r, offset, residual, dx, dw, q, scale)
    run(_rmsnorm_backward_rows, _cuda_backward_rows, x, arguments)
    return NormGradients(dx, dw, q, scale)


def _float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return q, torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)


def _check_rows(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    for t in (x, residual):
        if t is not None and (t.dim() != 2 or t.shape != x.shape or t.dtype != x.dtype or _gaps(t)):
            raise BadInput(
                "rmsnorm_rows takes x and residual (M, N) of one dtype with contiguous rows; got "
                f"{tuple(t.shape)} {t.dtype} {t.stride()} beside {tuple(x.shape)} {x.dtype}."
            )
    if weight.shape != x.shape[-1:]:
        need, have = tuple(x.shape[-1:]), tuple(weight.shape)
        raise BadInput(f"rmsnorm's weight must have shape {need}, as x's rows do; it has {have}.")


def _gaps(x: Tensor) -> bool:
    return x.stride(1) != 1 and x.shape[1] > 1
