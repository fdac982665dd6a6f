"""The Triton kernel of gated_lora_backward.py, which has the formulas, and its launch.

A program walks down a slab of columns: its share of the branches' weight gradients stays in registers, and
each tile's share of t is written as it comes. Shares are float32; a second kernel adds them in a fixed order,
and writes t as it is used: scaled, rounded, and where the caller wants it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.codec.quantize_float8_triton import to_float8
from fewbits.kernels.decoder.gated_activation_triton import (
    LowRank,
    Quantized8,
    activation_and_slope,
    largest_bits,
    weight,
)
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.launch.tuning import tile_for

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MAX_RANK = 32  # three accumulators of this rank stay in registers
_SUM_SIZE = 1024


# 1. The kernel.


@jit
def _rows_of(x_ptr, stride_x, offs_m, M, R, BLOCK_R: tl.constexpr):
    """A low-rank branch's rows, (BLOCK_M, BLOCK_R)."""
    offs_r = tl.arange(0, BLOCK_R)
    mask = (offs_m < M)[:, None] & (offs_r < R)[None, :]
    return tl.load(x_ptr + offs_m[:, None] * stride_x + offs_r[None, :], mask=mask, other=0.0)


@jit(do_not_specialize=("M",), do_not_specialize_on_alignment=("inverse_ptr", "qmax_ptr"))
def _gated_lora_bwd_kernel(
    dh_ptr, e_ptr, u_ptr, xd_ptr, wd_ptr, xe_ptr, we_ptr, xu_ptr, wu_ptr, de_ptr, du_ptr,
    q_ptr, inverse_ptr, qmax_ptr, t_ptr, dw_ptr, M, I, R, rows, stride_dh, stride_e, stride_u, stride_xd,
    stride_wdi, stride_wdr, stride_xe, stride_wei, stride_wer, stride_xu, stride_wui, stride_wur,
    stride_de, stride_du, stride_q, ACTIVATION: tl.constexpr, BLOCK_R: tl.constexpr, EVEN_R: tl.constexpr,
    WRITE_D: tl.constexpr, FLOAT8: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """de and du as in _gated_bwd_kernel; t_ptr (slabs, 2, BLOCK_R, rows), dw_ptr (splits, 3, I, BLOCK_R).

    ``rows`` are those of all programs, M or more: what lies beyond M is 0.
    """
    slabs = tl.cdiv(I, BLOCK_I)
    slab, split = tl.program_id(0) % slabs, tl.program_id(0) // slabs
    offs_i, offs_r = slab * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_R)
    wd = weight(wd_ptr, stride_wdi, stride_wdr, offs_i, I, R, BLOCK_R, EVEN_R)
    we = weight(we_ptr, stride_wei, stride_wer, offs_i, I, R, BLOCK_R, EVEN_R)
    wu = weight(wu_ptr, stride_wui, stride_wur, offs_i, I, R, BLOCK_R, EVEN_R)
    dwe = tl.zeros((BLOCK_I, BLOCK_R), dtype=tl.float32)
    dwu = tl.zeros((BLOCK_I, BLOCK_R), dtype=tl.float32)
    dwd = tl.zeros((BLOCK_I, BLOCK_R), dtype=tl.float32)
    if FLOAT8:
        inverse, qmax = tl.load(inverse_ptr), 0
    for step in tl.range(0, STEPS, num_stages=STAGES):
        offs_m = ((split * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask_m = offs_m < M
        mask = mask_m[:, None] & (offs_i < I)[None, :]
        dh_at = dh_ptr + offs_m[:, None] * stride_dh + offs_i[None, :]
        e_at = e_ptr + offs_m[:, None] * stride_e + offs_i[None, :]
        u_at = u_ptr + offs_m[:, None] * stride_u + offs_i[None, :]
        if EVEN:
            dh, e, u = tl.load(dh_at), tl.load(e_at), tl.load(u_at)
        else:
            dh, e = tl.load(dh_at, mask=mask, other=0.0), tl.load(e_at, mask=mask, other=0.0)
            u = tl.load(u_at, mask=mask, other=0.0)
        xd = _rows_of(xd_ptr, stride_xd, offs_m, M, R, BLOCK_R)
        xe = _rows_of(xe_ptr, stride_xe, offs_m, M, R, BLOCK_R)
        xu = _rows_of(xu_ptr, stride_xu, offs_m, M, R, BLOCK_R)
        dh = tl.dot(xd, wd, dh.to(tl.float32), input_precision="ieee")
        e = tl.dot(xe, we, e.to(tl.float32), input_precision="ieee")
        u = tl.dot(xu, wu, u.to(tl.float32), input_precision="ieee")
        s, ds = activation_and_slope(e, ACTIVATION, FAST)
        f = e * s
        h = (f * u).to(dh_ptr.dtype.element_ty)
        du = (dh * f).to(dh_ptr.dtype.element_ty)
        de = (dh * u * (s + e * ds)).to(dh_ptr.dtype.element_ty)
        if WRITE_D:
            tl.store(de_ptr + offs_m[:, None] * stride_de + offs_i[None, :], de, mask=mask)
            tl.store(du_ptr + offs_m[:, None] * stride_du + offs_i[None, :], du, mask=mask)
        if FLOAT8:
            q_at = q_ptr + offs_m[:, None] * stride_q + offs_i[None, :]
            tl.store(q_at, to_float8(de, inverse, q_ptr.dtype.element_ty, 448, True, not FAST), mask=mask)
            tl.store(q_at + I, to_float8(du, inverse, q_ptr.dtype.element_ty, 448, True, not FAST), mask=mask)
            qmax = largest_bits(largest_bits(qmax, de), du)
        t_at = t_ptr + (slab * 2 * BLOCK_R + offs_r).to(tl.int64)[:, None] * rows + offs_m[None, :]
        # Transposed, as a long contraction whose small operand comes first takes 90 registers less.
        tl.store(t_at, tl.dot(we, tl.trans(de), input_precision="ieee"))
        tl.store(t_at + BLOCK_R * rows, tl.dot(wu, tl.trans(du), input_precision="ieee"))
        dwe = tl.dot(tl.trans(de), xe, dwe, input_precision="ieee")
        dwu = tl.dot(tl.trans(du), xu, dwu, input_precision="ieee")
        dwd = tl.dot(tl.trans(h), xd, dwd, input_precision="ieee")
    if FLOAT8:
        tl.atomic_max(qmax_ptr, qmax, sem="relaxed")
    dw_at = dw_ptr + ((split * 3 * I + offs_i) * BLOCK_R)[:, None] + offs_r[None, :]
    mask_i = (offs_i < I)[:, None]
    tl.store(dw_at, dwe, mask=mask_i)
    tl.store(dw_at + I * BLOCK_R, dwu, mask=mask_i)
    tl.store(dw_at + 2 * I * BLOCK_R, dwd, mask=mask_i)


@jit(do_not_specialize=("M", "splits", "blocks"))
def _gated_lora_sum_kernel(
    t_ptr, dw_ptr, t_out_ptr, dw_out_ptr, M, I, R, slabs, splits, blocks, rows, stride_t, scale_e, scale_u,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, SIZE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The first 2 * blocks programs add t's shares: t_out (M, 2 R). The others dw's: dw_out (3, I, R)."""
    pid = tl.program_id(0)
    if pid < 2 * blocks:
        branch, offs_r = pid // blocks, tl.arange(0, BLOCK_R)
        offs_m = (pid % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        at = t_ptr + (branch * BLOCK_R + offs_r).to(tl.int64)[:, None] * rows + offs_m[None, :]
        step = tl.cast(rows, tl.int64) * (2 * BLOCK_R)
        t = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for first in tl.range(0, slabs, UNROLL):
            for j in tl.static_range(UNROLL):
                t += tl.load(at + (first + j) * step, mask=first + j < slabs, other=0.0)
        t *= tl.where(branch == 0, scale_e, scale_u)
        to = t_out_ptr + offs_m.to(tl.int64)[None, :] * stride_t + (branch * R + offs_r)[:, None]
        mask = (offs_r < R)[:, None] & (offs_m < M)[None, :]
        tl.store(to, t.to(t_out_ptr.dtype.element_ty), mask=mask)
    else:
        flat = (pid - 2 * blocks).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        count, dw = tl.cast(I, tl.int64) * (3 * BLOCK_R), tl.zeros((SIZE,), tl.float32)
        for first in tl.range(0, splits, UNROLL):
            for j in tl.static_range(UNROLL):
                there = (flat < count) & (first + j < splits)
                dw += tl.load(dw_ptr + (first + j) * count + flat, mask=there, other=0.0)
        row, r = flat // BLOCK_R, flat % BLOCK_R
        tl.store(dw_out_ptr + row * R + r, dw, mask=(flat < count) & (r < R))


# 2. The launches.


class GatedLoRATile(NamedTuple):
    """A program's tile, its warps, how many it takes one below the other, and loads in flight over these."""

    block_m: int
    block_i: int
    num_warps: int
    steps: int
    stages: int


# One that every GPU takes. On an H200 at M = 8192, I = 14336, rank 16 it takes 495 us and that of sm_90's
# table 473; with E4M3 in place of 16-bit gradients 590 and 496.
SAFE_TILE = GatedLoRATile(32, 64, 4, 32, 3)


class BackwardOperands(NamedTuple):
    """What the kernels of the backward pass read and write.

    Attributes:
        dh: (M, I).
        e: (M, I), of gate, as before its branch was added.
        u: (M, I), of up, likewise.
        activation: as in `gated_activation`.
        low_rank: the branches of e, of u and of dh, x (M, R) and w (I, R), all of one rank R.
        outputs: where de and du go, (M, I) each, or None.
        t: (M, 2 R), written.
        quantized: where de and du go in E4M3, (M, 2 I).
    """

    dh: Tensor
    e: Tensor
    u: Tensor
    activation: str
    low_rank: tuple[LowRank, LowRank, LowRank]
    outputs: tuple[Tensor | None, Tensor | None]
    t: Tensor
    quantized: Quantized8 | None = None


def launch(
    operands: BackwardOperands,
    scalings: tuple[float, float] = (1.0, 1.0),
    tile: GatedLoRATile | None = None,
) -> Tensor:
    """`gated_lora_backward_ref` by the Triton kernels, into the places that the operands name.

    Returns:
        dw (3, I, R), float32.
    """
    dh, e, u, activation, low_rank, outputs, t, quantized = operands
    M, I = e.shape
    (xe, we), (xu, wu), (xd, wd) = ((_contiguous(b.x.to(e.dtype)), b.w.to(e.dtype)) for b in low_rank)
    de, du = outputs
    R = xe.shape[1]
    block_r = max(16, next_power_of_2(R))
    tile = tile or tile_for("gated_lora", (block_r,), e, SAFE_TILE)
    slabs, each = cdiv(I, tile.block_i), tile.block_m * tile.steps
    splits = cdiv(M, each)
    t_shares = torch.empty((slabs, 2, block_r, splits * each), dtype=torch.float32, device=e.device)
    dw_shares = torch.empty((splits, 3, I, block_r), dtype=torch.float32, device=e.device)
    q, inverse, qmax = (e, e, e) if quantized is None else quantized
    with on_device_of(e):
        _gated_lora_bwd_kernel[(slabs * splits,)](
            dh, e, u, xd, wd, xe, we, xu, wu, e if de is None else de, e if du is None else du, q, inverse,
            qmax if quantized is None else qmax.view(torch.int32), t_shares, dw_shares, M, I, R,
            splits * each, dh.stride(0), e.stride(0), u.stride(0), xd.stride(0), *wd.stride(), xe.stride(0),
            *we.stride(), xu.stride(0), *wu.stride(), 0 if de is None else de.stride(0),
            0 if du is None else du.stride(0), q.stride(0), ACTIVATION=activation, BLOCK_R=block_r,
            EVEN_R=block_r == R, WRITE_D=de is not None, FLOAT8=quantized is not None,
            EVEN=M % each == 0 and I % tile.block_i == 0,
            BLOCK_M=tile.block_m, BLOCK_I=tile.block_i, STEPS=tile.steps, STAGES=tile.stages,
            FAST=e.is_cuda, num_warps=tile.num_warps,
        )  # fmt: skip
        return _sum(t_shares, dw_shares, t, (M, I, R), scalings, each)


def _sum(
    t_shares: Tensor,
    dw_shares: Tensor,
    t: Tensor,
    shape: tuple[int, int, int],
    scalings: tuple[float, float],
    each: int,
) -> Tensor:
    """The sums of both; blocks of rows that divide those of a program, so that all shares are there."""
    (M, I, R), (slabs, _, block_r, rows) = shape, t_shares.shape
    dw = torch.empty((3, I, R), dtype=torch.float32, device=t.device)
    block_m = min(each & -each, 1024 // block_r)
    blocks, splits = cdiv(M, block_m), dw_shares.shape[0]
    _gated_lora_sum_kernel[(2 * blocks + cdiv(3 * I * block_r, _SUM_SIZE),)](
        t_shares, dw_shares, t, dw, M, I, R, slabs, splits, blocks, rows, t.stride(0),
        float(scalings[0]), float(scalings[1]),
        BLOCK_R=block_r, BLOCK_M=block_m, SIZE=_SUM_SIZE, UNROLL=8, num_warps=4,
    )  # fmt: skip
    return dw


def _contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


_TYPES = dict.fromkeys(
    ("dh_ptr", "e_ptr", "u_ptr", "xd_ptr", "wd_ptr", "xe_ptr", "we_ptr", "xu_ptr"), "*bf16"
)
_TYPES |= dict.fromkeys(("wu_ptr", "de_ptr", "du_ptr"), "*bf16")
_TYPES |= {"q_ptr": "*bf16", "inverse_ptr": "*bf16", "qmax_ptr": "*bf16", "t_ptr": "*fp32", "dw_ptr": "*fp32"}
_TYPES |= dict.fromkeys(("M", "I", "R", "rows", "stride_dh", "stride_e", "stride_u", "stride_xd"), "i32")
_TYPES |= dict.fromkeys(("stride_wdi", "stride_wdr", "stride_xe", "stride_wei", "stride_wer"), "i32")
_TYPES |= dict.fromkeys(
    ("stride_xu", "stride_wui", "stride_wur", "stride_de", "stride_du", "stride_q"), "i32"
)
_FLOAT8 = {"q_ptr": "*fp8e4nv", "inverse_ptr": "*fp32", "qmax_ptr": "*i32"}
_CONSTANTS: dict[str, Any] = {
    "ACTIVATION": "silu", "BLOCK_R": 16, "EVEN_R": True, "WRITE_D": True, "FLOAT8": False, "EVEN": True,
    "BLOCK_M": 32, "BLOCK_I": 64, "STEPS": 32, "STAGES": 3, "FAST": True, "stride_wdi": 1, "stride_wer": 1,
    "stride_wur": 1,
}  # fmt: skip


def _case(float8: bool, num_warps: int, **changed: Any) -> CompileCase:
    types = _TYPES | (_FLOAT8 if float8 else {}) | dict.fromkeys(_CONSTANTS, "constexpr")
    aligned = tuple(n for n in types if n in ("I", "rows") or n.endswith("_ptr"))
    strides = tuple(n for n in types if n.startswith("stride") and n not in _CONSTANTS)
    constants = {**_CONSTANTS, "FLOAT8": float8, "WRITE_D": not float8, **changed}
    return CompileCase(
        _gated_lora_bwd_kernel, types, constants, aligned + strides, num_warps, 89 if float8 else 80
    )


_SUM = dict.fromkeys(("t_ptr", "dw_ptr"), "*fp32") | {"t_out_ptr": "*bf16", "dw_out_ptr": "*fp32"}
_SUM |= dict.fromkeys(("M", "I", "R", "slabs", "splits", "blocks", "rows", "stride_t"), "i32")
_SUM |= dict.fromkeys(("scale_e", "scale_u"), "fp32")
_SUM_CONSTANTS = {"BLOCK_R": 16, "BLOCK_M": 64, "SIZE": _SUM_SIZE, "UNROLL": 8}
_SUM |= dict.fromkeys(_SUM_CONSTANTS, "constexpr")
_SUM_ALIGNED = ("t_ptr", "dw_ptr", "t_out_ptr", "dw_out_ptr", "I", "R", "rows", "stride_t")

COMPILE_CASES = (
    _case(False, 4),
    _case(True, 4),
    _case(True, 4, BLOCK_R=32, EVEN_R=False),
    CompileCase(_gated_lora_sum_kernel, _SUM, _SUM_CONSTANTS, _SUM_ALIGNED),
    CompileCase(_gated_lora_sum_kernel, _SUM, {**_SUM_CONSTANTS, "BLOCK_R": 32, "BLOCK_M": 32}),
)
