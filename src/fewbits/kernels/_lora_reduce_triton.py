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

from fewbits.kernels._launch import (
    CompileCase,
    cdiv,
    jit,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    tl,
)

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MAX_RANK = 128
MAX_SLICES = 3
_CHUNK = 16  # shares that the second kernel reads at once


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


@jit
def _lora_reduce_kernel(
    y_ptr, u_ptr, b0_ptr, b1_ptr, b2_ptr, t_ptr, d_ptr, M, tiles, y_m, u_m,
    start0, start1, start2, N0, N1, N2, R0, R1, R2, slabs0, slabs1, slabs2,
    b0_n, b0_r, b1_n, b1_r, b2_n, b2_r,
    WANT_T: tl.constexpr, WANT_D: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has ``tiles`` tiles of a slab. Shares: t (slabs, M, R), d (splits, slabs, N, R)."""
    slabs = slabs0 + slabs1 + slabs2
    slab, split = tl.program_id(0) % slabs, tl.program_id(0) // slabs
    i = (slab >= slabs0).to(tl.int32) + (slab >= slabs0 + slabs1).to(tl.int32)
    N, R, start = _pick(i, N0, N1, N2), _pick(i, R0, R1, R2), _pick(i, start0, start1, start2)
    offs_n, offs_r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    n = (slab - _pick(i, 0, slabs0, slabs0 + slabs1)) * BLOCK_N + offs_n
    u_ptr += _pick(i, 0, R0, R0 + R1)
    if WANT_T:
        if i == 0:
            b = _slab_of_b(b0_ptr, n, N, R, b0_n, b0_r, BLOCK_R)
        elif i == 1:
            b = _slab_of_b(b1_ptr, n, N, R, b1_n, b1_r, BLOCK_R)
        else:
            b = _slab_of_b(b2_ptr, n, N, R, b2_n, b2_r, BLOCK_R)
        b = b.to(y_ptr.dtype.element_ty)
    first = split * tiles * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    y_ptrs = y_ptr + (first + offs_m).to(tl.int64)[:, None] * y_m + (start + n)[None, :]
    u_ptrs = u_ptr + (first + offs_m).to(tl.int64)[:, None] * u_m + offs_r[None, :]
    d = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        m = first + tile * BLOCK_M + offs_m
        mask_m = m < M
        mask = mask_m[:, None] if EVEN_N else mask_m[:, None] & (n < N)[None, :]
        y = tl.load(y_ptrs, mask=mask, other=0.0)
        y_ptrs += BLOCK_M * y_m
        if WANT_T:
            t = tl.dot(y, b)
            to = t_ptr + (slab.to(tl.int64) * M + m)[:, None] * BLOCK_R + offs_r[None, :]
            tl.store(to, t, mask=mask_m[:, None])
        if WANT_D:
            u = tl.load(u_ptrs, mask=mask_m[:, None] & (offs_r < R)[None, :], other=0.0)
            u_ptrs += BLOCK_M * u_m
            d = tl.dot(tl.trans(y), u, d)
    if WANT_D:
        row = (split * slabs + slab).to(tl.int64) * BLOCK_N + offs_n
        tl.store(d_ptr + row[:, None] * BLOCK_R + offs_r[None, :], d)


@jit
def _sum(ptr, count, stride, at, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """The sum of ``count`` shares, each ``stride`` numbers after the one before."""
    total = tl.zeros((SIZE,), tl.float32)
    for first in tl.range(0, count, CHUNK):
        share = first + tl.arange(0, CHUNK)
        offs = share.to(tl.int64)[:, None] * stride + at[None, :]
        total += tl.sum(tl.load(ptr + offs, mask=(share < count)[:, None], other=0.0), 0)
    return total


@jit
def _lora_sum_kernel(
    t_ptr, d_ptr, t_out_ptr, d0_ptr, d1_ptr, d2_ptr, M, splits, slices, blocks, out_m, s0, s1, s2,
    N0, N1, N2, R0, R1, R2, slabs0, slabs1, slabs2,
    TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
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
        total = _sum(shares, _pick(i, slabs0, slabs1, slabs2), stride, tl.where(inside, at, 0), CHUNK, SIZE)
        total *= _pick(i, s0, s1, s2)
        t_ptrs = t_out_ptr + m * out_m + _pick(i, 0, R0, R0 + R1) + r
        tl.store(t_ptrs, total.to(t_out_ptr.dtype.element_ty), mask=inside & (r < _pick(i, R0, R1, R2)))
    else:
        first = (pid - slices * blocks).to(tl.int64) * SIZE
        slabs = slabs0 + slabs1 + slabs2
        slab = first // (BLOCK_R * BLOCK_N)
        at = first + offs
        total = _sum(d_ptr, splits, tl.cast(slabs, tl.int64) * (BLOCK_N * BLOCK_R), at, CHUNK, SIZE)
        i = (slab >= slabs0).to(tl.int32) + (slab >= slabs0 + slabs1).to(tl.int32)
        n, r = at // BLOCK_R - _pick(i, 0, slabs0, slabs0 + slabs1) * BLOCK_N, at % BLOCK_R
        N, R = _pick(i, N0, N1, N2), _pick(i, R0, R1, R2)
        mask = (n < N) & (r < R)
        to = r * N + n if TRANSPOSED else n * R + r
        d = total.to(d0_ptr.dtype.element_ty)
        tl.store(d0_ptr + to, d, mask=mask & (i == 0))
        tl.store(d1_ptr + to, d, mask=mask & (i == 1))
        tl.store(d2_ptr + to, d, mask=mask & (i == 2))


@jit
def _lora_down_kernel(
    x_ptr, a_ptr, out_ptr, M, K, R, scaling, x_m, a_r, out_m,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """xa for BLOCK_M rows: the whole of K, so that nothing is left to add."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k, offs_r = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    mask_m, mask_r = m < M, offs_r < R
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_m + offs_k[None, :]
    a_ptrs = a_ptr + offs_r[None, :] * a_r + offs_k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        mask_x, mask_a = mask_m[:, None], mask_r[None, :]
        if not EVEN_K:
            mask_x &= (first + offs_k < K)[None, :]
            mask_a &= (first + offs_k < K)[:, None]
        x = tl.load(x_ptrs, mask=mask_x, other=0.0)
        a = tl.load(a_ptrs, mask=mask_a, other=0.0)
        total = tl.dot(x, a.to(x.dtype), total)
        x_ptrs += BLOCK_K
        a_ptrs += BLOCK_K
    to = out_ptr + m.to(tl.int64)[:, None] * out_m + offs_r[None, :]
    tl.store(to, (total * scaling).to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_r[None, :])


# 2. The launches.


class ReduceTile(NamedTuple):
    """Rows and columns of a tile, warps, tiles in flight, programs that share a slab (0: as many as fit)."""

    block_m: int
    block_n: int
    num_warps: int
    stages: int
    splits: int = 0


class DownTile(NamedTuple):
    """Rows and inputs of a tile, warps, and tiles in flight."""

    block_m: int
    block_k: int
    num_warps: int
    stages: int


class ReduceSlice(NamedTuple):
    """Columns [start, start + N) of dy, b (N, r), and the factor of their t."""

    start: int
    b: Tensor
    scaling: float


def reduce_tile(device: torch.device, M: int, widths: tuple[int, ...], rank: int) -> ReduceTile | None:
    """For t and db at once; None where the products one by one are faster."""
    return None


def gradient_tile(device: torch.device, shape: Sequence[int], rank: int) -> ReduceTile | None:
    """For dA; None where cuBLAS is faster."""
    return None


def down_tile(device: torch.device, shape: Sequence[int], rank: int) -> DownTile | None:
    """For xa; None where cuBLAS is faster."""
    return None


@lru_cache(maxsize=256)
def splits_of(tiles: int, slabs: int, programs: int) -> int:
    """Into how many runs of rows to cut, so that programs end at about the same time and shares are few."""

    def time(splits: int) -> float:
        rounds = cdiv(splits * slabs, programs) if splits * slabs > programs else 1
        return rounds * (cdiv(tiles, splits) + 1.0) + 0.02 * splits  # one tile's time to start

    return min(range(1, min(tiles, 64) + 1), key=time)


def launch_reduce(
    dy: Tensor,
    u: Tensor | None,
    slices: Sequence[ReduceSlice],
    t_out: Tensor | None,
    d_outs: Sequence[Tensor],
    tile: ReduceTile,
    transposed: bool = False,
) -> None:
    """``t_out[:, i] = s_i * dy_i @ b_i`` and ``d_outs[i] = dy_i^T @ u_i``, either of which may be absent.

    Args:
        dy: (M, N), contiguous along a row.
        u: (M, sum of r), contiguous along a row; or None with no d_outs.
        slices: at most three; without ``t_out`` only the shape of b is read.
        t_out: (M, sum of r), contiguous along a row, or None.
        d_outs: (N_i, r_i) contiguous, of one dtype, or empty.
        tile: see `ReduceTile`.
        transposed: d_outs are (r_i, N_i).
    """
    M, want_t, want_d = dy.shape[0], t_out is not None, len(d_outs) > 0
    widths = [s.b.shape[0] for s in slices]
    ranks = [s.b.shape[1] for s in slices]
    block_r = max(16, next_power_of_2(max(ranks)))
    slabs = [cdiv(n, tile.block_n) for n in widths]
    tiles = cdiv(M, tile.block_m)
    per_sm = max(1, min(4, 200 * 1024 // (tile.block_m * tile.block_n * 2 * max(tile.stages, 1))))
    splits = tile.splits or splits_of(tiles, sum(slabs), per_sm * multiprocessors(dy.device))
    tiles_each = cdiv(tiles, splits)
    splits = cdiv(tiles, tiles_each)
    t_parts = dy.new_empty(sum(slabs) * M * block_r if want_t else 0, dtype=torch.float32)
    d_parts = dy.new_empty(splits * sum(slabs) * tile.block_n * block_r if want_d else 0, dtype=torch.float32)
    bs = [s.b for s in slices] if want_t else [dy] * len(slices)
    numbers = [_three(n, 0) for n in ([s.start for s in slices], widths, ranks, slabs)]
    even = all(n % tile.block_n == 0 for n in widths)
    size = min(256, tile.block_n * block_r)
    blocks = cdiv(M * block_r, size) if want_t else 0
    sums = len(slices) * blocks + (sum(slabs) * tile.block_n * block_r // size if want_d else 0)
    with on_device_of(dy):
        _lora_reduce_kernel[(sum(slabs) * splits,)](
            dy, dy if u is None else u, *_three(bs, bs[0]), t_parts, d_parts, M, tiles_each, dy.stride(0),
            0 if u is None else u.stride(0), *(n for three in numbers for n in three),
            *(n for b in _three(bs, bs[0]) for n in b.stride()[:2]),
            WANT_T=want_t, WANT_D=want_d, EVEN_N=even, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_R=block_r, STAGES=tile.stages, num_warps=tile.num_warps,
        )  # fmt: skip
        outs = list(d_outs) or [d_parts]
        _lora_sum_kernel[(sums,)](
            t_parts, d_parts, t_parts if t_out is None else t_out, *_three(outs, outs[0]), M, splits,
            len(slices), blocks, 0 if t_out is None else t_out.stride(0),
            *_three([float(s.scaling) for s in slices], 1.0), *(n for three in numbers[1:] for n in three),
            TRANSPOSED=transposed, BLOCK_N=tile.block_n, BLOCK_R=block_r, SIZE=size,
            CHUNK=min(_CHUNK, next_power_of_2(max(splits, *slabs))), num_warps=4,
        )  # fmt: skip


def launch_down(x: Tensor, a: Tensor, out: Tensor, scaling: float, tile: DownTile) -> None:
    """``out = scaling * x @ a^T`` for x (M, K) and a (R, K), both contiguous along a row."""
    (M, K), R = x.shape, a.shape[0]
    with on_device_of(x):
        _lora_down_kernel[(cdiv(M, tile.block_m),)](
            x, a, out, M, K, R, float(scaling), x.stride(0), a.stride(0), out.stride(0),
            EVEN_K=K % tile.block_k == 0, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k,
            BLOCK_R=max(16, next_power_of_2(R)), STAGES=tile.stages, num_warps=tile.num_warps,
        )  # fmt: skip


def _three(values: Sequence[Any], filler: Any) -> list[Any]:
    return [*values, *[filler] * (MAX_SLICES - len(values))]


# 3. How the kernels are compiled.


def _case(kernel: Any, num_warps: int, **constants: Any) -> CompileCase:
    def of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("s0", "s1", "s2", "scaling"):
            return "fp32"
        if not name.endswith("_ptr"):
            return "i32"
        shares = kernel is not _lora_down_kernel and name in ("t_ptr", "d_ptr")
        return "*fp32" if shares else "*bf16"

    signature = {name: of(name) for name in getattr(kernel, "arg_names", ())}
    aligned = [
        n for n, t in signature.items() if t[0] == "*" or n[-2:] in ("_m", "_n", "a_r") or n[:5] == "start"
    ]
    return CompileCase(kernel, signature, constants, tuple(aligned), num_warps)


_TILE: dict[str, Any] = {"EVEN_N": True, "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_R": 16, "STAGES": 3}

COMPILE_CASES = (
    _case(_lora_reduce_kernel, 4, WANT_T=True, WANT_D=True, **_TILE),
    _case(_lora_reduce_kernel, 4, WANT_T=False, WANT_D=True, **{**_TILE, "BLOCK_R": 64, "EVEN_N": False}),
    _case(_lora_sum_kernel, 4, TRANSPOSED=False, BLOCK_N=128, BLOCK_R=16, SIZE=256, CHUNK=16),
    _case(_lora_down_kernel, 4, EVEN_K=True, BLOCK_M=64, BLOCK_K=128, BLOCK_R=64, STAGES=3),
)
