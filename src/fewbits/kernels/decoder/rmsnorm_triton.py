"""The Triton kernels of rmsnorm.py, which has the formulas, and their launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.kernels.codec.quantize_float8_triton import inverse_of, row_largest, scale_of_largest, to_float8
from fewbits.kernels.launch.jit import (
    CompileCase,
    RowTile,
    cdiv,
    jit,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    tl,
)
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.launch.prepared import start_kernel
from fewbits.kernels.launch.tuning import tile_for

_MAX_N = 65536  # one program holds a whole row in registers
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# 1. The kernels.


@jit
def _store_float8(
    y, q_ptr, scale_ptr, offs_m, offs_n, mask_m, mask, N, LARGEST: tl.constexpr, CUT: tl.constexpr
):
    """A tile's rows, as they are stored in y's dtype, to float8: what quantize_rows makes of them."""
    scale = scale_of_largest(row_largest(y), LARGEST)
    q = to_float8(y, inverse_of(scale)[:, None], q_ptr.dtype.element_ty, LARGEST, False, CUT)
    tl.store(q_ptr + offs_m[:, None] * N + offs_n[None, :], q, mask=mask)
    tl.store(scale_ptr + offs_m, scale, mask=mask_m)


@jit(do_not_specialize=("M",))
def _rmsnorm_fwd_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, r_ptr, sum_ptr, q_ptr, scale_ptr,
    M, N, stride_xm, stride_rm, eps, offset,
    RESIDUAL: tl.constexpr, DENSE: tl.constexpr, QUANTIZE: tl.constexpr, LARGEST: tl.constexpr,
    CUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program normalises BLOCK_M rows; outputs are (M, N) contiguous, x's rows are stride_xm apart.

    RESIDUAL adds it to x first and writes the sum; DENSE writes y; QUANTIZE writes it in float8.
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    mask_n = offs_n < N
    mask = mask_m[:, None] & mask_n[None, :]
    out = offs_m[:, None] * N + offs_n[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual = tl.load(residual_ptr + offs_m[:, None] * stride_rm + offs_n[None, :], mask=mask, other=0.0)
        summed = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, summed, mask=mask)
        x = summed.to(tl.float32)
    w = tl.load(w_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32) + offset
    r = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    y = (x * r[:, None] * w[None, :]).to(y_ptr.dtype.element_ty)
    if DENSE:
        tl.store(y_ptr + out, y, mask=mask)
    tl.store(r_ptr + offs_m, r, mask=mask_m)
    if QUANTIZE:
        _store_float8(y, q_ptr, scale_ptr, offs_m, offs_n, mask_m, mask, N, LARGEST, CUT)


@jit(do_not_specialize=("M",))
def _rmsnorm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, r_ptr, residual_ptr, dx_ptr, dw_ptr, q_ptr, scale_ptr,
    M, N, stride_dym, stride_xm, stride_rm, offset,
    NEEDS_DW: tl.constexpr, RESIDUAL: tl.constexpr, QUANTIZE: tl.constexpr, LARGEST: tl.constexpr,
    CUT: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th block of rows; dw_ptr (num_programs, N) gets each one's sum.

    With RESIDUAL dx is that much more. dx may lie over dy, x or the residual, if those are contiguous: a
    program has read its rows before it writes them.
    """
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    w = tl.load(w_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32) + offset
    if NEEDS_DW:
        dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):
        offs_m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_n[None, :]
        dy = tl.load(dy_ptr + offs_m[:, None] * stride_dym + offs_n[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask=mask, other=0.0)
        if RESIDUAL:  # before the sum, which every warp waits for
            at = offs_m[:, None] * stride_rm + offs_n[None, :]
            residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        r = tl.load(r_ptr + offs_m, mask=mask_m, other=0.0)
        dy = dy.to(tl.float32)
        xhat = x.to(tl.float32) * r[:, None]
        g = dy * w[None, :]
        dx = r[:, None] * (g - xhat * (tl.sum(g * xhat, 1) / N)[:, None])
        if RESIDUAL:
            dx += residual.to(tl.float32)
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offs_m[:, None] * N + offs_n[None, :], dx, mask=mask)
        if QUANTIZE:
            _store_float8(dx, q_ptr, scale_ptr, offs_m, offs_n, mask_m, mask, N, LARGEST, CUT)
        if NEEDS_DW:
            dw += dy * xhat
    if NEEDS_DW:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * N + offs_n, tl.sum(dw, 0), mask=mask_n)


# 2. The launches.


class Float8Rows(NamedTuple):
    """Where to write rows in float8: q (M, N) contiguous and scale (M, 1)."""

    q: Tensor
    scale: Tensor


class RowOutputs(NamedTuple):
    """Where the forward pass writes: y (M, N) or None, r (M,), the sum with the residual (M, N), float8."""

    y: Tensor | None
    r: Tensor
    summed: Tensor | None = None
    float8: Float8Rows | None = None


class NormedRows(NamedTuple):
    """What the backward pass needs of the forward pass.

    Attributes:
        x: (M, N), what was normalised: the sum, where there was a residual.
        weight: (N,).
        r: (M,) float32, 1 / sqrt(mean of squares + eps) of each row, from the forward pass.
        offset: added to the weight.
    """

    x: Tensor
    weight: Tensor
    r: Tensor
    offset: float = 0.0


class SumTile(NamedTuple):
    """How the weight's gradient is summed: programs a multiprocessor, and rows in flight in each."""

    programs: int
    stages: int


def sum_tile_of(tile: RowTile, itemsize: int) -> SumTile:
    """Two programs a multiprocessor, with three blocks of rows in flight where shared memory holds them.

    Measured on an H200 at 8192 x 4096 in bfloat16: 77 % of a copy's rate, without blocks in flight 66 %.
    """
    ahead_bytes = 2 * 2 * tile.block_m * tile.block_n * itemsize  # dy and x of two blocks
    return SumTile(2, 3 if ahead_bytes <= 2**16 else 1)


def row_tile(N: int) -> RowTile:
    """About 4096 values for 4 warps, in 16 bits four 16-byte loads in flight a thread; more for wide rows."""
    block_n = next_power_of_2(N)
    block_m = max(1, 4096 // block_n)
    return RowTile(block_m, block_n, min(max(block_m * block_n // 1024, 4), 32))


def launch_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    into: RowOutputs,
    *,
    residual: Tensor | None = None,
    tile: RowTile | None = None,
) -> None:
    """`rmsnorm_rows_ref` of x (M, N), rows contiguous, into its places, all contiguous.

    Raises:
        Unsupported: a row is longer than 65,536 values.
    """
    y, r, summed, float8 = into
    M, N = x.shape
    if N > _MAX_N:
        raise Unsupported(
            f"rmsnorm's kernel takes rows of at most {_MAX_N} values, not {N}: use rmsnorm_ref."
        )
    if x.numel() == 0:
        return
    tile = tile or tile_for("rmsnorm_forward", (N, x.element_size()), x, row_tile(N))
    with on_device_of(x):
        start_kernel(
            _rmsnorm_fwd_kernel, (cdiv(M, tile.block_m),),
            (x, x if residual is None else residual, weight, x if y is None else y, r,
             x if summed is None else summed, *_float8_pointers(float8, x)),
            M, N, x.stride(0), 0 if residual is None else residual.stride(0), eps, offset,
            RESIDUAL=residual is not None, DENSE=y is not None, **_float8_constants(float8, x),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
        )  # fmt: skip


def launch_backward_rows(
    dy: Tensor,
    normed: NormedRows,
    dx: Tensor,
    *,
    needs_dw: bool = False,
    residual: Tensor | None = None,
    float8: Float8Rows | None = None,
    tile: RowTile | None = None,
    sum_tile: SumTile | None = None,
) -> Tensor | None:
    """`rmsnorm_backward_rows_ref` of dy and x (M, N), rows contiguous, into dx and float8; dw if needed."""
    x, weight, r, offset = normed
    M, N = x.shape
    if x.numel() == 0:
        return weight.new_zeros(N) if needs_dw else None
    tile = tile or tile_for("rmsnorm_backward", (N, x.element_size(), needs_dw), x, row_tile(N))
    sum_tile = sum_tile or sum_tile_of(tile, x.element_size())
    blocks = cdiv(M, tile.block_m)
    programs = min(blocks, sum_tile.programs * multiprocessors(x.device)) if needs_dw else blocks
    partial = torch.empty((programs, N) if needs_dw else (1, 1), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        start_kernel(
            _rmsnorm_bwd_kernel, (programs,),
            (dy, x, weight, r, dy if residual is None else residual, dx, partial,
             *_float8_pointers(float8, x)),
            M, N, dy.stride(0), x.stride(0), 0 if residual is None else residual.stride(0), offset,
            NEEDS_DW=needs_dw, RESIDUAL=residual is not None, **_float8_constants(float8, x),
            STAGES=sum_tile.stages if needs_dw else 1,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
        )  # fmt: skip
    return partial.sum(0).to(weight.dtype) if needs_dw else None


def _float8_pointers(float8: Float8Rows | None, like: Tensor) -> tuple[Tensor, Tensor]:
    return (like, like) if float8 is None else (float8.q, float8.scale)


def _float8_constants(float8: Float8Rows | None, like: Tensor) -> dict[str, Any]:
    largest = 0 if float8 is None else int(torch.finfo(float8.q.dtype).max)
    return {"QUANTIZE": float8 is not None, "LARGEST": largest, "CUT": not like.is_cuda}


def as_rows(x: Tensor) -> Tensor:
    """``x`` as (M, N) with contiguous rows: a view where its strides allow one."""
    rows = rows_of(x)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


_FWD = dict.fromkeys(("x_ptr", "residual_ptr", "w_ptr", "y_ptr"), "*bf16")
_FWD |= {"r_ptr": "*fp32", "sum_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
_FWD |= dict.fromkeys(("M", "N", "stride_xm", "stride_rm"), "i32") | {"eps": "fp32", "offset": "fp32"}
_FWD_CONSTANTS: dict[str, Any] = {"RESIDUAL": False, "DENSE": True, "QUANTIZE": False, "LARGEST": 448}
_FWD_CONSTANTS |= {"CUT": False, "BLOCK_M": 1, "BLOCK_N": 4096}
_BWD = {"dy_ptr": "*bf16", "x_ptr": "*bf16", "w_ptr": "*bf16", "r_ptr": "*fp32", "residual_ptr": "*bf16"}
_BWD |= {"dx_ptr": "*bf16", "dw_ptr": "*fp32", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
_BWD |= dict.fromkeys(("M", "N", "stride_dym", "stride_xm", "stride_rm"), "i32") | {"offset": "fp32"}
_BWD_CONSTANTS: dict[str, Any] = {"NEEDS_DW": False, "RESIDUAL": False, "QUANTIZE": False, "LARGEST": 448}
_BWD_CONSTANTS |= {"CUT": False, "STAGES": 1, "BLOCK_M": 1, "BLOCK_N": 4096}


def _case(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int = 4, **changed: Any
) -> CompileCase:
    """A case with some constants changed; one that does not quantise has no float8 pointer."""
    constants = {**constants, **changed}
    quantize = constants["QUANTIZE"]
    types = types if quantize else types | {"q_ptr": "*bf16"}
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = tuple(n for n in types if n.endswith("_ptr") or n == "N" or n.startswith("stride"))
    return CompileCase(kernel, signature, constants, aligned, num_warps, 89 if quantize else 80)


COMPILE_CASES = (
    _case(_rmsnorm_fwd_kernel, _FWD, _FWD_CONSTANTS),
    _case(_rmsnorm_fwd_kernel, _FWD, _FWD_CONSTANTS, BLOCK_M=32, BLOCK_N=128),
    _case(
        _rmsnorm_fwd_kernel,
        _FWD | {"x_ptr": "*fp32", "y_ptr": "*fp32"},
        _FWD_CONSTANTS,
        BLOCK_M=4,
        BLOCK_N=1024,
    ),
    _case(_rmsnorm_fwd_kernel, _FWD, _FWD_CONSTANTS, RESIDUAL=True, QUANTIZE=True),
    _case(_rmsnorm_fwd_kernel, _FWD, _FWD_CONSTANTS, DENSE=False, QUANTIZE=True),
    _case(_rmsnorm_bwd_kernel, _BWD, _BWD_CONSTANTS, NEEDS_DW=True, STAGES=3),
    _case(_rmsnorm_bwd_kernel, _BWD, _BWD_CONSTANTS, 16, BLOCK_N=16384),
    _case(_rmsnorm_bwd_kernel, _BWD, _BWD_CONSTANTS, RESIDUAL=True, QUANTIZE=True),
)
