"""The Triton kernel of rope.py, which has the formulas, and its launch.

A program holds the cosines and sines of its rows in registers and takes several heads of q, k or v with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.launch.tuning import tile_for

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RANK = 128


# 1. The kernel.


@jit
def _segment(
    ptr, row, first, x, w_ptr, stride_wn, stride_wr, channel, mask_m, R,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """SIZE values of a head from ``first`` on, float32, with their low-rank product."""
    offs = tl.arange(0, BLOCK)
    mask = mask_m[:, None] & (offs < SIZE)[None, :]
    tile = tl.load(ptr + row[:, None] + first + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    if BLOCK_R:
        offs_r = tl.arange(0, BLOCK_R)
        at = (channel + first + offs)[None, :] * stride_wn + offs_r[:, None] * stride_wr
        w = tl.load(w_ptr + at, mask=(offs < SIZE)[None, :] & (offs_r < R)[:, None], other=0.0)
        tile = tl.dot(x, w, tile, input_precision="ieee")
    return tile


@jit
def _put(ptr, row, first, tile, mask_m, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = mask_m[:, None] & (offs < SIZE)[None, :]
    tl.store(ptr + row[:, None] + first + offs[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@jit
def _heads(
    group, in_ptr, out_ptr, x_ptr, w_ptr, H, in_b, in_h, in_s, out_b, out_h, out_s, stride_x, stride_wn,
    stride_wr, R, b, s, m, mask_m, cos, sin, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, ROTATE: tl.constexpr, COPY_REST: tl.constexpr,
):  # fmt: skip
    """The heads of one group of one tensor, rotated or only moved, for a block of rows."""
    in_row, out_row = b * in_b + s * in_s, b * out_b + s * out_s
    x = None
    if BLOCK_R:
        offs_r = tl.arange(0, BLOCK_R)
        mask_x = mask_m[:, None] & (offs_r < R)[None, :]
        x = tl.load(x_ptr + (m * stride_x)[:, None] + offs_r[None, :], mask=mask_x, other=0.0)
    for i in range(HEADS):
        head = (group * HEADS + i).to(tl.int64)
        mask = mask_m & (head < H)
        source, target = in_row + head * in_h, out_row + head * out_h
        channel = tl.minimum(head, H - 1) * D
        a = _segment(
            in_ptr, source, 0, x, w_ptr, stride_wn, stride_wr, channel, mask, R, HALF, BLOCK_HALF, BLOCK_R
        )
        c = _segment(
            in_ptr, source, HALF, x, w_ptr, stride_wn, stride_wr, channel, mask, R, HALF, BLOCK_HALF, BLOCK_R
        )
        if ROTATE:
            a, c = a * cos - c * sin, c * cos + a * sin
        _put(out_ptr, target, 0, a, mask, HALF, BLOCK_HALF)
        _put(out_ptr, target, HALF, c, mask, HALF, BLOCK_HALF)
        if REST and COPY_REST:
            rest = _segment(
                in_ptr, source, 2 * HALF, x, w_ptr, stride_wn, stride_wr, channel, mask, R, REST,
                BLOCK_REST, BLOCK_R,
            )  # fmt: skip
            _put(out_ptr, target, 2 * HALF, rest, mask, REST, BLOCK_REST)


@jit(do_not_specialize=("M", "S"))
def _rope_kernel(
    q_ptr, k_ptr, v_ptr, oq_ptr, ok_ptr, ov_ptr, xq_ptr, xk_ptr, xv_ptr, wq_ptr, wk_ptr, wv_ptr,
    cos_ptr, sin_ptr, position_ptr, M, S, HQ, HK, HV, RQ, RK, RV,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, oq_b, oq_h, oq_s, ok_b, ok_h, ok_s, ov_b, ov_h, ov_s,
    xq_m, xk_m, xv_m, wq_n, wq_r, wk_n, wk_r, wv_n, wv_r, cos_b, cos_s, sin_b, sin_s, position_b,
    POSITIONS: tl.constexpr, INVERSE: tl.constexpr, COPY_REST: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr, D: tl.constexpr,
    BLOCK_RQ: tl.constexpr, BLOCK_RK: tl.constexpr, BLOCK_RV: tl.constexpr, BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Programs run along groups of HEADS heads first (those of q, then of k, then of v), then along rows."""
    groups_q, groups_k, groups_v = tl.cdiv(HQ, HEADS), tl.cdiv(HK, HEADS), tl.cdiv(HV, HEADS)
    groups = groups_q + groups_k + groups_v
    group = tl.program_id(0) % groups
    m = (tl.program_id(0) // groups) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = m < M
    b, s = (m // S).to(tl.int64), (m % S).to(tl.int64)
    position = s
    if POSITIONS:
        position = tl.load(position_ptr + b * position_b + s, mask=mask_m, other=0).to(tl.int64)
    m = m.to(tl.int64)
    offs = tl.arange(0, BLOCK_HALF)
    mask = mask_m[:, None] & (offs < HALF)[None, :]
    at = offs[None, :]
    cos = tl.load(cos_ptr + (b * cos_b + position * cos_s)[:, None] + at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + (b * sin_b + position * sin_s)[:, None] + at, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    if group < groups_q:
        _heads(
            group, q_ptr, oq_ptr, xq_ptr, wq_ptr, HQ, q_b, q_h, q_s, oq_b, oq_h, oq_s, xq_m, wq_n, wq_r, RQ,
            b, s, m, mask_m, cos, sin, HALF, BLOCK_HALF, REST, BLOCK_REST, D, HEADS, BLOCK_RQ, True,
            COPY_REST or BLOCK_RQ > 0,
        )  # fmt: skip
    elif group < groups_q + groups_k:
        _heads(
            group - groups_q, k_ptr, ok_ptr, xk_ptr, wk_ptr, HK, k_b, k_h, k_s, ok_b, ok_h, ok_s, xk_m, wk_n,
            wk_r, RK, b, s, m, mask_m, cos, sin, HALF, BLOCK_HALF, REST, BLOCK_REST, D, HEADS, BLOCK_RK, True,
            COPY_REST or BLOCK_RK > 0,
        )  # fmt: skip
    else:
        _heads(
            group - groups_q - groups_k, v_ptr, ov_ptr, xv_ptr, wv_ptr, HV, v_b, v_h, v_s, ov_b, ov_h, ov_s,
            xv_m, wv_n, wv_r, RV, b, s, m, mask_m, cos, sin, HALF, BLOCK_HALF, REST, BLOCK_REST, D, HEADS,
            BLOCK_RV, False, True,
        )  # fmt: skip


# 2. The launch.


class RopeTile(NamedTuple):
    """Rows of a program, the heads it takes with one set of cosines, and its warps."""

    block_m: int
    heads: int
    num_warps: int


def rope_tile(half: int) -> RopeTile:
    """About 1024 cosines a program: on an H200 many small programs keep the most bytes in flight."""
    return RopeTile(max(16, min(64, 1024 // next_power_of_2(half))), 2, 4)


class Tables(NamedTuple):
    """cos, sin (B or 1, L, >= rotary_dim / 2) with contiguous rows, and positions (B or 1, S) or None."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    rotary_dim: int


def launch(
    sources: Sequence[Tensor],
    outputs: Sequence[Tensor],
    low_rank: Sequence[tuple[Tensor, Tensor]],
    tables: Tables,
    inverse: bool,
    tile: RopeTile | None = None,
) -> None:
    """q, k and perhaps v (B, H, S, D) from ``sources`` to ``outputs``, q and k rotated.

    ``low_rank`` has x (B * S, r) and w (H * D, r) for each; r = 0 is none. A v that stays where it is and has
    no low-rank branch is not touched.
    """
    q = sources[0]
    B, _, S, D = q.shape
    in_place = all(a.data_ptr() == b.data_ptr() for a, b in zip(sources, outputs, strict=True))
    tensors = list(zip(sources, outputs, low_rank, strict=True))
    if len(tensors) == 3 and in_place and low_rank[2][0].shape[1] == 0:
        tensors.pop()
    heads = [source.shape[1] for source, _, _ in tensors] + [0] * (3 - len(tensors))
    tensors += [tensors[0]] * (3 - len(tensors))
    half = tables.rotary_dim // 2
    rest = D - 2 * half
    tile = tile or tile_for("rope", (half,), q, rope_tile(half))
    groups = sum(cdiv(h, tile.heads) for h in heads)
    if groups * B * S * D == 0:
        return
    ranks = [x.shape[1] for _, _, (x, _) in tensors]
    xs = [x.to(q.dtype) if x.stride(1) == 1 else x.to(q.dtype).contiguous() for _, _, (x, _) in tensors]
    ws = [w.to(q.dtype) for _, _, (_, w) in tensors]
    xs, ws = ([t if r else q for t, r in zip(list_, ranks, strict=True)] for list_ in (xs, ws))
    positions = tables.positions
    with on_device_of(q):
        _rope_kernel[(groups * cdiv(B * S, tile.block_m),)](
            *(a for a, _, _ in tensors), *(b for _, b, _ in tensors), *xs, *ws,
            tables.cos, tables.sin, tables.cos if positions is None else positions,
            B * S, S, *heads, *ranks,
            *(n for a, _, _ in tensors for n in a.stride()[:3]),
            *(n for _, b, _ in tensors for n in b.stride()[:3]),
            *(x.stride(0) for x in xs), *(n for w in ws for n in w.stride()[:2]),
            *_batch_stride(tables.cos), *_batch_stride(tables.sin),
            0 if positions is None or positions.shape[0] == 1 else positions.stride(0),
            POSITIONS=positions is not None, INVERSE=inverse, COPY_REST=not in_place,
            HALF=half, BLOCK_HALF=max(16, next_power_of_2(half)), REST=rest,
            BLOCK_REST=max(16, next_power_of_2(rest)), D=D,
            **{f"BLOCK_R{n}": _rank_block(r) for n, r in zip("QKV", ranks, strict=True)},
            BLOCK_M=tile.block_m, HEADS=tile.heads, num_warps=tile.num_warps,
        )  # fmt: skip


def _batch_stride(table: Tensor) -> tuple[int, int]:
    return 0 if table.shape[0] == 1 else table.stride(0), table.stride(1)


def _rank_block(rank: int) -> int:
    return max(16, next_power_of_2(rank)) if rank else 0


_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "oq_ptr", "ok_ptr", "ov_ptr", "xq_ptr", "xk_ptr", "xv_ptr")
_SIGNATURE = dict.fromkeys((*_POINTERS, "wq_ptr", "wk_ptr", "wv_ptr", "cos_ptr", "sin_ptr"), "*bf16")
_SIGNATURE |= {"position_ptr": "*i64"}
_SIGNATURE |= dict.fromkeys(("M", "S", "HQ", "HK", "HV", "RQ", "RK", "RV"), "i32")
_STRIDES = tuple(f"{t}_{axis}" for t in ("q", "k", "v", "oq", "ok", "ov") for axis in "bhs")
_STRIDES += ("xq_m", "xk_m", "xv_m", "wq_n", "wq_r", "wk_n", "wk_r", "wv_n", "wv_r")
_STRIDES += ("cos_b", "cos_s", "sin_b", "sin_s", "position_b")
_SIGNATURE |= dict.fromkeys(_STRIDES, "i32")
_CONSTANTS: dict[str, Any] = {
    "POSITIONS": False, "INVERSE": False, "COPY_REST": False, "HALF": 64, "BLOCK_HALF": 64, "REST": 0,
    "BLOCK_REST": 16, "D": 128, "BLOCK_RQ": 16, "BLOCK_RK": 16, "BLOCK_RV": 16, "BLOCK_M": 32, "HEADS": 4,
}  # fmt: skip
_SIGNATURE |= dict.fromkeys(_CONSTANTS, "constexpr")
_ALIGNED = tuple(n for n in _SIGNATURE if n.endswith("_ptr") or (n in _STRIDES and not n.endswith("_r")))

COMPILE_CASES = (
    CompileCase(_rope_kernel, _SIGNATURE, _CONSTANTS, _ALIGNED),
    CompileCase(
        _rope_kernel,
        _SIGNATURE,
        {**_CONSTANTS, "BLOCK_RQ": 0, "BLOCK_RK": 0, "BLOCK_RV": 0, "COPY_REST": True, "INVERSE": True},
        _ALIGNED,
    ),
    CompileCase(
        _rope_kernel,
        _SIGNATURE,
        {**_CONSTANTS, "POSITIONS": True, "HALF": 48, "REST": 32, "BLOCK_REST": 32, "BLOCK_RQ": 128},
        _ALIGNED,
    ),
)
