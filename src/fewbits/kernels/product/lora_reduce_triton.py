"""The Triton kernels of lora_reduce.py, which has the formulas, and their launches.

dy is read once, in tiles that serve two products. A program walks down a slab of columns: its share of db
stays in registers, and each tile's share of t is written as it comes. Shares are float32 and are added in a
second kernel, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.launch.jit import (
    CompileCase,
    capability_of,
    cdiv,
    jit,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    tl,
)
from fewbits.kernels.launch.prepared import start_kernel

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MAX_RANK = 128
MAX_SLICES = 3
_SHARED_BYTES = 200 * 1024  # what programs of one multiprocessor may hold
_UNROLL = 8  # shares that the second kernel reads at once


# 1. The kernels.


@jit
def _pick(i, a, b, c):
    """One of three values."""
    return tl.where(i == 0, a, tl.where(i == 1, b, c))


@jit
def _slab_of_b(b_ptr, n, N, R, b_n, b_r, BLOCK_R: tl.constexpr):
    offs_r = tl.arange(0, BLOCK_R)
    mask = (n < N)[:, None] & (offs_r < R)[None, :]
    return tl.load(b_ptr + n.to(tl.int64)[:, None] * b_n + offs_r[None, :] * b_r, mask=mask, other=0.0)


@jit(do_not_specialize=("M", "tiles"))
def _lora_reduce_kernel(
    y_ptr, u_ptr, b0_ptr, b1_ptr, b2_ptr, t_ptr, d_ptr, M, tiles, y_m, u_m,
    start0, start1, start2, N0, N1, N2, R0, R1, R2, slabs0, slabs1, slabs2,
    b0_n, b0_r, b1_n, b1_r, b2_n, b2_r,
    EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program has ``tiles`` tiles of a slab. Shares: t (slabs, M, R), d (splits, slabs, N, R)."""
    slabs = slabs0 + slabs1 + slabs2
    slab, split = tl.program_id(0) % slabs, tl.program_id(0) // slabs
    i = (slab >= slabs0).to(tl.int32) + (slab >= slabs0 + slabs1).to(tl.int32)
    N, R, start = _pick(i, N0, N1, N2), _pick(i, R0, R1, R2), _pick(i, start0, start1, start2)
    offs_n, offs_r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    n = (slab - _pick(i, 0, slabs0, slabs0 + slabs1)) * BLOCK_N + offs_n
    u_ptr += _pick(i, 0, R0, R0 + R1)
    if i == 0:
        b = _slab_of_b(b0_ptr, n, N, R, b0_n, b0_r, BLOCK_R)
    elif i == 1:
        b = _slab_of_b(b1_ptr, n, N, R, b1_n, b1_r, BLOCK_R)
    else:
        b = _slab_of_b(b2_ptr, n, N, R, b2_n, b2_r, BLOCK_R)
    b = b.to(u_ptr.dtype.element_ty)
    first = split * tiles * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    y_ptrs = y_ptr + (first + offs_m).to(tl.int64)[:, None] * y_m + (start + n)[None, :]
    u_ptrs = u_ptr + (first + offs_m).to(tl.int64)[:, None] * u_m + offs_r[None, :]
    d = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        m = first + tile * BLOCK_M + offs_m
        mask_m = m < M
        mask = mask_m[:, None] if EVEN_N else mask_m[:, None] & (n < N)[None, :]
        y = tl.load(y_ptrs, mask=mask, other=0.0).to(u_ptr.dtype.element_ty)
        y_ptrs += BLOCK_M * y_m
        t = tl.dot(y, b, input_precision="ieee")
        u = tl.load(u_ptrs, mask=mask_m[:, None] & (offs_r < R)[None, :], other=0.0)
        u_ptrs += BLOCK_M * u_m
        d = tl.dot(tl.trans(y), u, d, input_precision="ieee")
        to = t_ptr + (slab.to(tl.int64) * M + m)[:, None] * BLOCK_R + offs_r[None, :]
        tl.store(to, t, mask=mask_m[:, None])
    row = (split * slabs + slab).to(tl.int64) * BLOCK_N + offs_n
    tl.store(d_ptr + row[:, None] * BLOCK_R + offs_r[None, :], d)


@jit
def _sum(ptr, count, stride, at, SIZE: tl.constexpr, UNROLL: tl.constexpr):
    """The sum of ``count`` shares, each ``stride`` numbers after the one before; UNROLL loads at a time."""
    total = tl.zeros((SIZE,), tl.float32)
    for first in tl.range(0, count, UNROLL):
        for j in tl.static_range(UNROLL):
            there = (at >= 0) & (first + j < count)
            total += tl.load(ptr + tl.cast(first + j, tl.int64) * stride + at, mask=there, other=0.0)
    return total


@jit(do_not_specialize=("M", "splits", "blocks"))
def _lora_sum_kernel(
    t_ptr, d_ptr, t_out_ptr, d0_ptr, d1_ptr, d2_ptr, M, splits, slices, blocks, out_m, s0, s1, s2,
    N0, N1, N2, R0, R1, R2, slabs0, slabs1, slabs2,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SIZE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The first ``slices * blocks`` programs add shares of t and write SIZE numbers each, the others db's."""
    pid = tl.program_id(0)
    offs = tl.arange(0, SIZE)
    if pid < slices * blocks:
        i = pid // blocks
        at = (pid % blocks).to(tl.int64) * SIZE + offs
        m, r = at // BLOCK_R, at % BLOCK_R
        inside = m < M
        stride = tl.cast(M, tl.int64) * BLOCK_R
        shares = t_ptr + _pick(i, 0, slabs0, slabs0 + slabs1) * stride
        total = _sum(shares, _pick(i, slabs0, slabs1, slabs2), stride, tl.where(inside, at, -1), SIZE, UNROLL)
        total *= _pick(i, s0, s1, s2)
        t_ptrs = t_out_ptr + m * out_m + _pick(i, 0, R0, R0 + R1) + r
        tl.store(t_ptrs, total.to(t_out_ptr.dtype.element_ty), mask=inside & (r < _pick(i, R0, R1, R2)))
    else:
        first = (pid - slices * blocks).to(tl.int64) * SIZE
        slabs = slabs0 + slabs1 + slabs2
        slab = first // (BLOCK_R * BLOCK_N)
        at = first + offs
        total = _sum(d_ptr, splits, tl.cast(slabs, tl.int64) * (BLOCK_N * BLOCK_R), at, SIZE, UNROLL)
        i = (slab >= slabs0).to(tl.int32) + (slab >= slabs0 + slabs1).to(tl.int32)
        n, r = at // BLOCK_R - _pick(i, 0, slabs0, slabs0 + slabs1) * BLOCK_N, at % BLOCK_R
        N, R = _pick(i, N0, N1, N2), _pick(i, R0, R1, R2)
        mask = (n < N) & (r < R)
        to = n * R + r
        d = total.to(d0_ptr.dtype.element_ty)
        tl.store(d0_ptr + to, d, mask=mask & (i == 0))
        tl.store(d1_ptr + to, d, mask=mask & (i == 1))
        tl.store(d2_ptr + to, d, mask=mask & (i == 2))


# 2. The launches.


class ReduceTile(NamedTuple):
    """Rows and columns of a tile, warps, tiles in flight, programs that share a slab (0: as many as fit)."""

    block_m: int
    block_n: int
    num_warps: int
    stages: int
    splits: int = 0


class ReduceSlice(NamedTuple):
    """Columns [start, start + N) of dy, b (N, r), and the factor of their t."""

    start: int
    b: Tensor
    scaling: float


@lru_cache(maxsize=256)
def reduce_tile(device: torch.device, M: int, widths: tuple[int, ...], rank: int) -> ReduceTile | None:
    """The tile, or None where two products by cuBLAS are the better or the only known choice."""
    wide = capability_of(device)[0] == 9  # its shared memory holds the tiles
    if not wide or rank > 16 or M < 4096 or sum(widths) < 2048:
        return None
    return ReduceTile(64, 512, 8, 3)


@lru_cache(maxsize=256)
def splits_of(tiles: int, slabs: int, programs: int) -> int:
    """Into how many runs of rows to cut, so that programs end at about the same time and shares are few."""

    def time(splits: int) -> float:
        rounds = cdiv(splits * slabs, programs) if splits * slabs > programs else 1
        return rounds * (cdiv(tiles, splits) + 1.0) + 0.02 * splits  # one tile's time to start

    return min(range(1, min(tiles, 64) + 1), key=time)


def launch_reduce(
    dy: Tensor, u: Tensor, slices: Sequence[ReduceSlice], t: Tensor, ds: Sequence[Tensor], tile: ReduceTile
) -> None:
    """``t[:, i] = s_i * dy_i @ b_i`` and ``ds[i] = dy_i^T @ u_i``.

    Args:
        dy: (M, N), contiguous along a row.
        u: (M, sum of r), contiguous along a row.
        slices: at most three, with b of one dtype.
        t: (M, sum of r), contiguous along a row.
        ds: (N_i, r_i) contiguous, of one dtype.
        tile: see `ReduceTile`.
    """
    M, widths, ranks = dy.shape[0], [s.b.shape[0] for s in slices], [s.b.shape[1] for s in slices]
    block_r = max(16, next_power_of_2(max(ranks)))
    slabs, tiles = [cdiv(n, tile.block_n) for n in widths], cdiv(M, tile.block_m)
    per_sm = max(1, min(4, _SHARED_BYTES // (tile.block_m * tile.block_n * dy.itemsize * tile.stages)))
    splits = tile.splits or splits_of(tiles, sum(slabs), per_sm * multiprocessors(dy.device))
    tiles_each = cdiv(tiles, splits)
    splits = cdiv(tiles, tiles_each)
    t_shares = dy.new_empty(sum(slabs) * M * block_r, dtype=torch.float32)
    d_shares = dy.new_empty(splits * sum(slabs) * tile.block_n * block_r, dtype=torch.float32)
    bs = _three([s.b for s in slices], slices[0].b)
    numbers = [n for of in (widths, ranks, slabs) for n in _three(of, 0)]
    size = min(512, tile.block_n * block_r)
    blocks = cdiv(M * block_r, size)
    with on_device_of(dy):
        start_kernel(
            _lora_reduce_kernel, (sum(slabs) * splits,), (dy, u, *bs, t_shares, d_shares),
            M, tiles_each, dy.stride(0), u.stride(0),
            *_three([s.start for s in slices], 0), *numbers, *(n for b in bs for n in b.stride()),
            EVEN_N=all(n % tile.block_n == 0 for n in widths), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_R=block_r, STAGES=tile.stages, num_warps=tile.num_warps,
        )  # fmt: skip
        start_kernel(
            _lora_sum_kernel, (len(slices) * blocks + sum(slabs) * tile.block_n * block_r // size,),
            (t_shares, d_shares, t, *_three(ds, ds[0])), M, splits, len(slices), blocks, t.stride(0),
            *_three([float(s.scaling) for s in slices], 1.0), *numbers, BLOCK_N=tile.block_n, BLOCK_R=block_r,
            SIZE=size, UNROLL=_UNROLL, num_warps=4,
        )  # fmt: skip


def _three(values: Sequence[Any], filler: Any) -> list[Any]:
    return [*values, *[filler] * (MAX_SLICES - len(values))]


# 3. How the kernels are compiled.


def _case(kernel: Any, **constants: Any) -> CompileCase:
    def of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            shares = name in ("t_ptr", "d_ptr")
            return "*fp32" if shares else "*bf16"
        return "fp32" if name in ("s0", "s1", "s2") else "i32"

    signature = {name: of(name) for name in getattr(kernel, "arg_names", ())}
    aligned = [n for n, t in signature.items() if t[0] == "*" or n[-2:] in ("_m", "_n") or n[:5] == "start"]
    return CompileCase(kernel, signature, constants, tuple(aligned))


_TILE: dict[str, Any] = {
    "EVEN_N": True,
    "BLOCK_M": 64,
    "BLOCK_N": 128,
    "BLOCK_R": 16,
    "STAGES": 3,
}

COMPILE_CASES = (
    _case(_lora_reduce_kernel, **_TILE),
    _case(_lora_reduce_kernel, **{**_TILE, "BLOCK_R": 64, "EVEN_N": False}),
    _case(_lora_sum_kernel, BLOCK_N=128, BLOCK_R=16, SIZE=512, UNROLL=8),
)
