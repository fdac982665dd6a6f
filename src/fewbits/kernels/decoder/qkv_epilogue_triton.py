"""The Triton kernels of qkv_epilogue.py, which has the formulas, and their launches.

A program holds the cosines and sines of its rows and takes a few heads of q, k or v with them. A head has
three segments: the two halves that turn together, and the rest that stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.decoder.rope_triton import Tables
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.launch.prepared import start_kernel

# 1. The kernels.


@jit
def _load(ptr, row, first, mask_m, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Channels [first, first + SIZE) of each row in float32, zeros beyond."""
    offs = tl.arange(0, BLOCK)
    mask = mask_m[:, None] & (offs < SIZE)[None, :]
    return tl.load(ptr + row[:, None] + first + offs[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def _store(ptr, row, first, tile, mask_m, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = mask_m[:, None] & (offs < SIZE)[None, :]
    tl.store(ptr + row[:, None] + first + offs[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@jit
def _vector(ptr, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    return tl.load(ptr + first + offs, mask=offs < SIZE, other=0.0).to(tl.float32)


@jit
def _segment(
    ptr, row, first, mask_m, x, w_ptr, w_n, w_r, bias_ptr, R,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A segment of the product with its bias and low-rank product; w_ptr and bias_ptr are at its head."""
    tile = _load(ptr, row, first, mask_m, SIZE, BLOCK)
    if BIAS:
        tile += _vector(bias_ptr, first, SIZE, BLOCK)[None, :]
    if BLOCK_R:
        offs, offs_r = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
        at = (first + offs)[None, :] * w_n + offs_r[:, None] * w_r
        w = tl.load(w_ptr + at, mask=(offs < SIZE)[None, :] & (offs_r < R)[:, None], other=0.0)
        tile = tl.dot(x, w.to(x.dtype), tile, input_precision="ieee")
    return tile


@jit
def _low_rank_rows(x_ptr, m, x_m, mask_m, R, BLOCK_R: tl.constexpr):
    offs_r = tl.arange(0, BLOCK_R)
    mask = mask_m[:, None] & (offs_r < R)[None, :]
    return tl.load(x_ptr + (m * x_m)[:, None] + offs_r[None, :], mask=mask, other=0.0)


@jit
def _forward_heads(
    group, first, H, qkv_ptr, out_ptr, x_ptr, w_ptr, bias_ptr, weight_ptr, qkv_m, out_m, x_m, w_n, w_r, R,
    eps, offset, m, mask_m, cos, sin, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK_R: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, COPY_REST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A group of the H heads that begin with head ``first`` of the product, for a block of rows."""
    x = None
    if BLOCK_R:
        x = _low_rank_rows(x_ptr, m, x_m, mask_m, R, BLOCK_R)
    for i in tl.range(0, HEADS, num_stages=STAGES):
        head = (group * HEADS + i).to(tl.int64)
        mask = mask_m & (head < H)
        source, target = m * qkv_m + (first + head) * D, m * out_m + (first + head) * D
        channel = tl.minimum(head, H - 1) * D
        w, bias = w_ptr + channel * w_n, bias_ptr + first * D + channel
        a = _segment(qkv_ptr, source, 0, mask, x, w, w_n, w_r, bias, R, HALF, BLOCK_HALF, BLOCK_R, BIAS)
        c = _segment(qkv_ptr, source, HALF, mask, x, w, w_n, w_r, bias, R, HALF, BLOCK_HALF, BLOCK_R, BIAS)
        if REST and COPY_REST:
            rest = _segment(
                qkv_ptr, source, 2 * HALF, mask, x, w, w_n, w_r, bias, R, REST, BLOCK_REST, BLOCK_R, BIAS
            )
        if NORM:
            square = tl.sum(a * a, 1) + tl.sum(c * c, 1)
            if REST:
                square += tl.sum(rest * rest, 1)
            r = tl.rsqrt(square / D + eps)[:, None]
            a *= r * (offset + _vector(weight_ptr, 0, HALF, BLOCK_HALF))[None, :]
            c *= r * (offset + _vector(weight_ptr, HALF, HALF, BLOCK_HALF))[None, :]
            if REST:
                rest *= r * (offset + _vector(weight_ptr, 2 * HALF, REST, BLOCK_REST))[None, :]
        if ROTATE:
            a, c = a * cos - c * sin, c * cos + a * sin
        _store(out_ptr, target, 0, a, mask, HALF, BLOCK_HALF)
        _store(out_ptr, target, HALF, c, mask, HALF, BLOCK_HALF)
        if REST and COPY_REST:
            _store(out_ptr, target, 2 * HALF, rest, mask, REST, BLOCK_REST)


@jit
def _angles(
    cos_ptr, sin_ptr, position_ptr, m, S, mask_m, cos_b, cos_s, sin_b, sin_s, position_b,
    POSITIONS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """The cosines and sines of a block of rows."""
    b, s = m // S, m % S
    position = s
    if POSITIONS:
        position = tl.load(position_ptr + b * position_b + s, mask=mask_m, other=0).to(tl.int64)
    cos = _load(cos_ptr, b * cos_b + position * cos_s, 0, mask_m, HALF, BLOCK_HALF)
    return cos, _load(sin_ptr, b * sin_b + position * sin_s, 0, mask_m, HALF, BLOCK_HALF)


@jit(do_not_specialize=("M", "S"))
def _qkv_forward_kernel(
    qkv_ptr, out_ptr, xq_ptr, xk_ptr, xv_ptr, wq_ptr, wk_ptr, wv_ptr, bias_ptr, weight_q_ptr, weight_k_ptr,
    cos_ptr, sin_ptr, position_ptr, eps, offset, M, S, HQ, HK, HV, RQ, RK, RV, qkv_m, out_m, xq_m, xk_m,
    xv_m, wq_n, wq_r, wk_n, wk_r, wv_n, wv_r, cos_b, cos_s, sin_b, sin_s, position_b,
    POSITIONS: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    D: tl.constexpr, BLOCK_RQ: tl.constexpr, BLOCK_RK: tl.constexpr, BLOCK_RV: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs run along groups of HEADS heads first (those of q, then of k, then of v), then along rows."""
    groups_q, groups_k, groups_v = tl.cdiv(HQ, HEADS), tl.cdiv(HK, HEADS), tl.cdiv(HV, HEADS)
    groups = groups_q + groups_k + groups_v
    group = tl.program_id(0) % groups
    m = (tl.program_id(0) // groups) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    mask_m = m < M
    cos, sin = None, None
    if ROTATE:
        cos, sin = _angles(
            cos_ptr, sin_ptr, position_ptr, m, S, mask_m, cos_b, cos_s, sin_b, sin_s, position_b, POSITIONS,
            HALF, BLOCK_HALF,
        )  # fmt: skip
    if group < groups_q:
        _forward_heads(
            group, 0, HQ, qkv_ptr, out_ptr, xq_ptr, wq_ptr, bias_ptr, weight_q_ptr, qkv_m, out_m, xq_m, wq_n,
            wq_r, RQ, eps, offset, m, mask_m, cos, sin, HALF, BLOCK_HALF, REST, BLOCK_REST, D, HEADS,
            BLOCK_RQ, BIAS, NORM, ROTATE, NORM or BIAS or BLOCK_RQ > 0, STAGES,
        )  # fmt: skip
    elif group < groups_q + groups_k:
        _forward_heads(
            group - groups_q, HQ, HK, qkv_ptr, out_ptr, xk_ptr, wk_ptr, bias_ptr, weight_k_ptr, qkv_m, out_m,
            xk_m, wk_n, wk_r, RK, eps, offset, m, mask_m, cos, sin, HALF, BLOCK_HALF, REST, BLOCK_REST, D,
            HEADS, BLOCK_RK, BIAS, NORM, ROTATE, NORM or BIAS or BLOCK_RK > 0, STAGES,
        )  # fmt: skip
    else:
        _forward_heads(
            group - groups_q - groups_k, HQ + HK, HV, qkv_ptr, qkv_ptr, xv_ptr, wv_ptr, bias_ptr,
            weight_q_ptr, qkv_m, qkv_m, xv_m, wv_n, wv_r, RV, eps, offset, m, mask_m, cos, sin, HALF,
            BLOCK_HALF, REST, BLOCK_REST, D, HEADS, BLOCK_RV, BIAS, False, False, True, STAGES,
        )  # fmt: skip


@jit
def _normed(
    ptr, row, mask, x, w, w_n, w_r, bias, R, eps, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A head's three segments over their root mean square, and one over that: n' and r backward."""
    a = _segment(ptr, row, 0, mask, x, w, w_n, w_r, bias, R, HALF, BLOCK_HALF, BLOCK_R, BIAS)
    c = _segment(ptr, row, HALF, mask, x, w, w_n, w_r, bias, R, HALF, BLOCK_HALF, BLOCK_R, BIAS)
    rest = a
    square = tl.sum(a * a, 1) + tl.sum(c * c, 1)
    if REST:
        rest = _segment(ptr, row, 2 * HALF, mask, x, w, w_n, w_r, bias, R, REST, BLOCK_REST, BLOCK_R, BIAS)
        square += tl.sum(rest * rest, 1)
    r = tl.rsqrt(square / D + eps)[:, None]
    return a * r, c * r, rest * r, r


@jit
def _through_norm(
    a, c, rest, na, nc, nr, r, weight_ptr, offset, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The gradient before the norm of one after it."""
    a *= (offset + _vector(weight_ptr, 0, HALF, BLOCK_HALF))[None, :]
    c *= (offset + _vector(weight_ptr, HALF, HALF, BLOCK_HALF))[None, :]
    along = tl.sum(a * na, 1) + tl.sum(c * nc, 1)
    if REST:
        rest *= (offset + _vector(weight_ptr, 2 * HALF, REST, BLOCK_REST))[None, :]
        along += tl.sum(rest * nr, 1)
    along = (along / D)[:, None]
    return r * (a - na * along), r * (c - nc * along), r * (rest - nr * along)


@jit
def _backward_heads(
    group, first, H, dy_ptr, qkv_ptr, out_ptr, dw_ptr, x_ptr, w_ptr, bias_ptr, weight_ptr, dy_b, dy_h, dy_s,
    qkv_m, out_m, x_m, w_n, w_r, R, eps, offset, m, S, mask_m, cos, sin, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    ROTATE: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a group of heads; dw_ptr is where this program's share of the weight's goes."""
    x = None
    if NORM and BLOCK_R:
        x = _low_rank_rows(x_ptr, m, x_m, mask_m, R, BLOCK_R)
    dw_a, dw_c = tl.zeros((BLOCK_HALF,), tl.float32), tl.zeros((BLOCK_HALF,), tl.float32)
    dw_rest = tl.zeros((BLOCK_REST,), tl.float32)
    for i in tl.range(0, HEADS, num_stages=STAGES):
        head = (group * HEADS + i).to(tl.int64)
        mask = mask_m & (head < H)
        source = (m // S) * dy_b + (m % S) * dy_s + head * dy_h
        target = m * out_m + (first + head) * D
        a = _load(dy_ptr, source, 0, mask, HALF, BLOCK_HALF)
        c = _load(dy_ptr, source, HALF, mask, HALF, BLOCK_HALF)
        rest = a
        if REST:
            rest = _load(dy_ptr, source, 2 * HALF, mask, REST, BLOCK_REST)
        if ROTATE:
            a, c = a * cos + c * sin, c * cos - a * sin
        if NORM:
            raw = m * qkv_m + (first + head) * D
            channel = tl.minimum(head, H - 1) * D
            w, bias = w_ptr + channel * w_n, bias_ptr + first * D + channel
            na, nc, nr, r = _normed(
                qkv_ptr, raw, mask, x, w, w_n, w_r, bias, R, eps, HALF, BLOCK_HALF, REST, BLOCK_REST, D,
                BLOCK_R, BIAS,
            )  # fmt: skip
            if WEIGHT_GRADIENT:
                dw_a += tl.sum(a * na, 0)
                dw_c += tl.sum(c * nc, 0)
                if REST:
                    dw_rest += tl.sum(rest * nr, 0)
            a, c, rest = _through_norm(
                a, c, rest, na, nc, nr, r, weight_ptr, offset, HALF, BLOCK_HALF, REST, BLOCK_REST, D
            )
        _store(out_ptr, target, 0, a, mask, HALF, BLOCK_HALF)
        _store(out_ptr, target, HALF, c, mask, HALF, BLOCK_HALF)
        if REST:
            _store(out_ptr, target, 2 * HALF, rest, mask, REST, BLOCK_REST)
    if NORM and WEIGHT_GRADIENT:
        offs, offs_rest = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
        tl.store(dw_ptr + offs, dw_a, mask=offs < HALF)
        tl.store(dw_ptr + HALF + offs, dw_c, mask=offs < HALF)
        tl.store(dw_ptr + 2 * HALF + offs_rest, dw_rest, mask=offs_rest < REST)


@jit(do_not_specialize=("M", "S"))
def _qkv_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, out_ptr, dw_ptr, xq_ptr, xk_ptr, wq_ptr, wk_ptr, bias_ptr, weight_q_ptr,
    weight_k_ptr, cos_ptr, sin_ptr, position_ptr, eps, offset, M, S, HQ, HK, RQ, RK, dq_b, dq_h, dq_s, dk_b,
    dk_h, dk_s, dv_b, dv_h, dv_s, qkv_m, out_m, xq_m, xk_m, wq_n, wq_r, wk_n, wk_r, cos_b, cos_s, sin_b,
    sin_s, position_b,
    POSITIONS: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, D: tl.constexpr, BLOCK_RQ: tl.constexpr, BLOCK_RK: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs as in the forward kernel; dw_ptr has a row of D for each program."""
    groups_q, groups_k = tl.cdiv(HQ, HEADS), tl.cdiv(HK, HEADS)
    groups = groups_q + 2 * groups_k
    group = tl.program_id(0) % groups
    m = (tl.program_id(0) // groups) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    mask_m = m < M
    dw_ptr += tl.program_id(0).to(tl.int64) * D
    cos, sin = None, None
    if ROTATE:
        cos, sin = _angles(
            cos_ptr, sin_ptr, position_ptr, m, S, mask_m, cos_b, cos_s, sin_b, sin_s, position_b, POSITIONS,
            HALF, BLOCK_HALF,
        )  # fmt: skip
    if group < groups_q:
        _backward_heads(
            group, 0, HQ, dq_ptr, qkv_ptr, out_ptr, dw_ptr, xq_ptr, wq_ptr, bias_ptr, weight_q_ptr, dq_b,
            dq_h, dq_s, qkv_m, out_m, xq_m, wq_n, wq_r, RQ, eps, offset, m, S, mask_m, cos, sin, HALF,
            BLOCK_HALF, REST, BLOCK_REST, D, HEADS, BLOCK_RQ, BIAS, NORM, ROTATE, WEIGHT_GRADIENT,
            STAGES,
        )  # fmt: skip
    elif group < groups_q + groups_k:
        _backward_heads(
            group - groups_q, HQ, HK, dk_ptr, qkv_ptr, out_ptr, dw_ptr, xk_ptr, wk_ptr, bias_ptr,
            weight_k_ptr, dk_b, dk_h, dk_s, qkv_m, out_m, xk_m, wk_n, wk_r, RK, eps, offset, m, S, mask_m,
            cos, sin, HALF, BLOCK_HALF, REST, BLOCK_REST, D, HEADS, BLOCK_RK, BIAS, NORM, ROTATE,
            WEIGHT_GRADIENT, STAGES,
        )  # fmt: skip
    else:
        _backward_heads(
            group - groups_q - groups_k, HQ + HK, HK, dv_ptr, qkv_ptr, out_ptr, dw_ptr, xk_ptr, wk_ptr,
            bias_ptr, weight_k_ptr, dv_b, dv_h, dv_s, qkv_m, out_m, xk_m, wk_n, wk_r, RK, eps, offset, m, S,
            mask_m, cos, sin, HALF, BLOCK_HALF, REST, BLOCK_REST, D, HEADS, 0, False, False, False, False,
            STAGES,
        )  # fmt: skip


# 2. The launches.


class QKVTile(NamedTuple):
    """Rows of a program, the heads it takes with one set of cosines, its warps, and the heads in flight."""

    block_m: int
    heads: int
    num_warps: int
    stages: int = 1


class Operands(NamedTuple):
    """What is common to both directions: the widths, and what is added and multiplied before the rotation.

    Attributes:
        S: tokens of a sequence; row m of the product is token m % S of sequence m // S.
        heads: of q, of k and of v, D wide.
        D: width of a head.
        low_rank: x (M, r) and w (H * D, r) for q, k and v; r = 0 is none.
        bias: ((H + 2 Hk) * D,) or None.
        weights: (D,) of the norms of q and of k, or nothing.
        eps: of the norms.
        offset: added to their weights.
        tables: the rotation, or None.
    """

    S: int
    heads: tuple[int, int, int]
    D: int
    low_rank: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None
    weights: Sequence[Tensor]
    eps: float
    offset: float
    tables: Tables | None


def qkv_tile(D: int, rank: int, normed_backward: bool = False) -> QKVTile:
    """As measured on an H200, with branches of the largest ``rank``.

    Without branches many small programs keep the most bytes in flight. A branch's product stands in the way
    of the next head's loads: these are made ahead, as far as shared memory goes.
    """
    half = next_power_of_2(D // 2)
    if rank == 0:
        return QKVTile(max(16, min(64, 1024 // half)), 4 if normed_backward else 2, 4)
    if rank <= 64 and D <= 128:
        return QKVTile(max(16, min(64, 2048 // half)), 8, 4, 3 if rank <= 16 else 2)
    return QKVTile(max(16, min(64, 1024 // half)), 4, 4)


def launch_fwd(qkv: Tensor, out: Tensor, operands: Operands, tile: QKVTile | None = None) -> None:
    """q and k of ``qkv`` (M, >= (H + 2 Hk) D) to ``out`` (M, >= (H + Hk) D), which may be qkv; v in place."""
    o, M = operands, qkv.shape[0]
    tile = tile or qkv_tile(o.D, max(x.shape[1] for x, _ in o.low_rank))
    heads = list(o.heads)
    if o.bias is None and o.low_rank[2][0].shape[1] == 0:
        heads[2] = 0
        if o.tables is None and not o.weights and not any(x.shape[1] for x, _ in o.low_rank):
            return
    groups = sum(cdiv(h, tile.heads) for h in heads)
    if M * groups == 0:
        return
    xs, ws, ranks = _branches(qkv, o.low_rank)
    with on_device_of(qkv):
        start_kernel(
            _qkv_forward_kernel, (groups * cdiv(M, tile.block_m),),
            (qkv, out, *xs, *ws, *_vectors(qkv, o), *_table_pointers(qkv, o.tables)), o.eps, o.offset,
            M, o.S, *heads, *ranks, qkv.stride(0), out.stride(0), *(x.stride(0) for x in xs),
            *(n for w in ws for n in w.stride()[:2]), *_table_strides(o.tables),
            NORM=bool(o.weights), BIAS=o.bias is not None, **_shape_constants(o),
            **{f"BLOCK_R{n}": _rank_block(r) for n, r in zip("QKV", ranks, strict=True)},
            BLOCK_M=tile.block_m, HEADS=tile.heads, STAGES=tile.stages, num_warps=tile.num_warps,
        )  # fmt: skip


def launch_bwd(
    gradients: Sequence[Tensor],
    qkv: Tensor,
    dqkv: Tensor,
    operands: Operands,
    weight_gradient: bool,
    tile: QKVTile | None = None,
) -> Tensor:
    """dq, dk, dv (B, H, S, D) to ``dqkv`` (M, >= (H + 2 Hk) D); ``qkv`` is read where there are norms.

    Returns the gradients of the norms' weights (2, D) in float32, or (0, D).
    """
    o, M = operands, dqkv.shape[0]
    rank = max(x.shape[1] for x, _ in o.low_rank) if o.weights else 0
    tile = tile or qkv_tile(o.D, rank, bool(o.weights))
    groups = [cdiv(h, tile.heads) for h in o.heads]
    blocks = cdiv(M, tile.block_m)
    weight_gradient = weight_gradient and bool(o.weights)
    if M == 0:
        return dqkv.new_zeros(2 if weight_gradient else 0, o.D, dtype=torch.float32)
    parts = dqkv.new_empty(blocks if weight_gradient else 0, sum(groups), o.D, dtype=torch.float32)
    xs, ws, ranks = _branches(dqkv, o.low_rank[:2] if o.weights else [(dqkv[:, :0],) * 2] * 2)
    with on_device_of(dqkv):
        start_kernel(
            _qkv_backward_kernel, (sum(groups) * blocks,),
            (*gradients, qkv, dqkv, parts, *xs, *ws, *_vectors(dqkv, o), *_table_pointers(dqkv, o.tables)),
            o.eps, o.offset, M, o.S, *o.heads[:2], *ranks, *(n for g in gradients for n in g.stride()[:3]),
            qkv.stride(0), dqkv.stride(0), *(x.stride(0) for x in xs),
            *(n for w in ws for n in w.stride()[:2]), *_table_strides(o.tables),
            NORM=bool(o.weights), BIAS=o.bias is not None, WEIGHT_GRADIENT=weight_gradient,
            **_shape_constants(o),
            **{f"BLOCK_R{n}": _rank_block(r) for n, r in zip("QK", ranks, strict=True)},
            BLOCK_M=tile.block_m, HEADS=tile.heads, STAGES=tile.stages, num_warps=tile.num_warps,
        )  # fmt: skip
    if not weight_gradient:
        return parts.new_empty(0, o.D)
    return torch.stack([p.sum((0, 1)) for p in parts.split(groups, 1)[:2]])


def _branches(
    like: Tensor, low_rank: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    ranks = [x.shape[1] for x, _ in low_rank]
    xs = [x.to(like.dtype) if x.stride(1) == 1 else x.to(like.dtype).contiguous() for x, _ in low_rank]
    xs, ws = (
        [t if r else like for t, r in zip(list_, ranks, strict=True)]
        for list_ in (xs, [w for _, w in low_rank])
    )
    return xs, ws, ranks


def _vectors(like: Tensor, o: Operands) -> list[Tensor]:
    return [like if o.bias is None else o.bias, *(o.weights or (like, like))]


def _table_pointers(like: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
    if tables is None:
        return like, like, like
    return tables.cos, tables.sin, like if tables.positions is None else tables.positions


def _table_strides(tables: Tables | None) -> tuple[int, ...]:
    if tables is None:
        return (0, 0, 0, 0, 0)
    cos, sin, positions = tables.cos, tables.sin, tables.positions
    rows = (n for t in (cos, sin) for n in (0 if t.shape[0] == 1 else t.stride(0), t.stride(1)))
    return *rows, 0 if positions is None or positions.shape[0] == 1 else positions.stride(0)


def _shape_constants(o: Operands) -> dict[str, Any]:
    half = (o.D if o.tables is None else o.tables.rotary_dim) // 2
    rest = o.D - 2 * half
    return {
        "POSITIONS": o.tables is not None and o.tables.positions is not None,
        "ROTATE": o.tables is not None,
        "HALF": half,
        "BLOCK_HALF": max(16, next_power_of_2(half)),
        "REST": rest,
        "BLOCK_REST": max(16, next_power_of_2(rest)),
        "D": o.D,
    }


def _rank_block(rank: int) -> int:
    return max(16, next_power_of_2(rank)) if rank else 0


# 3. How the kernels are compiled.


def _signature(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    types = {"eps": "fp32", "offset": "fp32", "position_ptr": "*i64", "dw_ptr": "*fp32"}

    def of(name: str) -> str:
        if name in constants:
            return "constexpr"
        return types.get(name) or ("*bf16" if name.endswith("_ptr") else "i32")

    return {name: of(name) for name in getattr(kernel, "arg_names", ())}


def _case(kernel: Any, norm: bool, **constants: Any) -> CompileCase:
    every = {
        "POSITIONS": False, "ROTATE": True, "NORM": norm, "BIAS": False, "HALF": 64, "BLOCK_HALF": 64,
        "REST": 0, "BLOCK_REST": 16, "D": 128, "BLOCK_RQ": 16, "BLOCK_RK": 16, "BLOCK_M": 32, "HEADS": 4,
        "STAGES": 1,
        **({"BLOCK_RV": 16} if kernel is _qkv_forward_kernel else {"WEIGHT_GRADIENT": norm}), **constants,
    }  # fmt: skip
    signature = _signature(kernel, every)
    loose = ("M", "S", "HQ", "HK", "HV", "RQ", "RK", "RV", "eps", "offset")
    aligned = [n for n, t in signature.items() if n not in loose and t != "constexpr" and n[-2:] != "_r"]
    return CompileCase(kernel, signature, every, tuple(aligned))


COMPILE_CASES = (
    _case(_qkv_forward_kernel, False, HEADS=8, STAGES=3),
    _case(_qkv_forward_kernel, False, HEADS=8, STAGES=2, BLOCK_RQ=64, BLOCK_RK=64, BLOCK_RV=64),
    _case(_qkv_forward_kernel, True, BLOCK_RQ=0, BLOCK_RK=0, BLOCK_RV=0),
    _case(_qkv_forward_kernel, True, BIAS=True, HALF=48, REST=32, BLOCK_REST=32, BLOCK_RQ=128),
    _case(_qkv_forward_kernel, False, BLOCK_RQ=0, BLOCK_RK=0, BLOCK_RV=0, POSITIONS=True),
    _case(_qkv_backward_kernel, False, BLOCK_RQ=0, BLOCK_RK=0),
    _case(_qkv_backward_kernel, True, HALF=48, REST=32, BLOCK_REST=32, HEADS=8, STAGES=3),
    _case(_qkv_backward_kernel, True, BLOCK_RQ=128, BIAS=True, HALF=128, BLOCK_HALF=128, D=256, BLOCK_M=16),
)
