"""Products of 8-bit rows with each expert's own 8-bit matrix, and an adapter's branch in the same pass.

Pairs of a token and an expert stand sorted by expert (`fewbits.nn.grouped.Table`); those of expert e end
before ends[e]. For the pair p of expert e, whose row of q is i[p]:

    y[p] = scale[i[p]] * w_scale * W[e] q[i[p]]  +  B[e] t[p]

q (M, K) and W (E, N, K) E4M3, scale (M,) float32 from `quantize_rows`, w_scale one float32 for all experts
(E4M3 is floating point: see `fewbits.decoder.products`), i (P,), B (E, N, r) and t (P, r) in y's dtype,
y (P, N). Without i the pair's row of q is its own number. The backward pass is the same product with W and A
turned: dx[p] = W[e]^T dy[i[p]] + A[e]^T t'[p].

Sums over K are the tensor cores' own, in float32 with fewer bits than usual; then the scales, the branch in
y's dtype with sums in float32, and one rounding of y.

Floor: 65,536 pairs of 2048 values to 1536 take 412 GFLOP, 0.29 ms at the 1,400 TFLOP/s that a dense product
in E4M3 reaches on an H200. There the kernel takes 0.457 ms, rows found by i and a branch of rank 16 in it;
torch's grouped product in E4M3 takes 0.452 for the product alone of rows that lie sorted already (and 0.05
to sort them), in bfloat16 0.710. 128 experts, about 512 pairs each: tiles of 128 rows that are not full cost
an eighth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.jit import (
    CompileCase,
    capability_of,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
)
from fewbits.kernels.launch.matrix import dense_rows
from fewbits.kernels.launch.ops import one_by_one, run
from fewbits.kernels.launch.prepared import start_kernel
from fewbits.kernels.product.matmul_float8 import require_float8

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RANK = 128  # of a branch: its two parts stand beside the tile that they are added to
_MULTIPLE = 16  # of both sides of a matrix


class GroupedTile(NamedTuple):
    """Pairs, outputs and inputs that a program takes at once, its warps, and how far it reads ahead."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


class GroupedRows(NamedTuple):
    """Operands of the product and of the branch, and which pair has which row and expert."""

    q: Tensor  # (M, K) E4M3
    scale: Tensor  # (M, 1)
    w: Tensor  # (E, N, K) E4M3
    w_scale: Tensor  # one value
    ends: Tensor  # (E,)
    rows: Tensor | None  # (P,)
    t: Tensor | None  # (P, r)
    b: Tensor | None  # (E, N, r)
    dtype: torch.dtype  # of y


# 1. The definition.


def grouped_float8_ref(o: GroupedRows) -> Tensor:
    """The formula above, sums in float32; see `grouped_float8`."""
    x = o.q.to(torch.float32) * o.scale
    x = x if o.rows is None else x[o.rows]
    y, first = torch.empty(len(x), o.w.shape[1], dtype=o.dtype, device=x.device), 0
    for e, last in enumerate(o.ends.tolist()):
        part = x[first:last] @ (o.w[e].to(torch.float32) * o.w_scale.reshape(())).t()
        if o.t is not None and o.b is not None:
            part = part + o.t[first:last].to(torch.float32) @ o.b[e].to(torch.float32).t()
        y[first:last] = part.to(o.dtype)
        first = last
    return y


# 2. The kernel.


@jit
def _grouped_float8_kernel(
    q_ptr, scale_ptr, w_ptr, w_scale_ptr, rows_ptr, ends_ptr, t_ptr, b_ptr, y_ptr,
    E, N, K, r, stride_q, stride_we, stride_wn, stride_t, stride_be, stride_bn, stride_br,
    ROWS: tl.constexpr, BRANCH: tl.constexpr, WIDE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_M pairs of one expert and BLOCK_N outputs, or none: there are more of them."""
    strips = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0) // strips
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    ends = tl.load(ends_ptr + offs_e, mask=mask_e, other=0)
    begins = tl.load(ends_ptr + offs_e - 1, mask=mask_e & (offs_e > 0), other=0)
    tiles = tl.where(mask_e, (ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    expert = tl.sum((mask_e & (tl.cumsum(tiles, 0) <= pid)).to(tl.int32), 0)
    if expert >= E:
        return
    is_expert = offs_e == expert
    tile = pid - tl.sum(tl.where(offs_e < expert, tiles, 0), 0)
    last = tl.sum(tl.where(is_expert, ends, 0), 0)
    pair = tl.sum(tl.where(is_expert, begins, 0), 0) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = pair < last
    pair = tl.where(mask_m, pair, last - 1).to(tl.int64)  # so that loads need no mask
    row = tl.load(rows_ptr + pair).to(tl.int64) if ROWS else pair
    expert = expert.to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_n = tl.program_id(0) % strips * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    safe_n = tl.where(mask_n, offs_n, 0).to(tl.int64)
    q_ptrs = q_ptr + row[:, None] * stride_q + offs_k[None, :]
    w_ptrs = w_ptr + expert * stride_we + safe_n[:, None] * stride_wn + offs_k[None, :]
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        if EVEN_K:
            q, w = tl.load(q_ptrs + first), tl.load(w_ptrs + first)
        else:
            mask_k = (first + offs_k < K)[None, :]
            q, w = (
                tl.load(q_ptrs + first, mask=mask_k, other=0.0),
                tl.load(w_ptrs + first, mask=mask_k, other=0.0),
            )
        if WIDE:
            q, w = q.to(tl.float32), w.to(tl.float32)
        y = tl.dot(q, tl.trans(w), y)
    y *= (tl.load(scale_ptr + row) * tl.load(w_scale_ptr))[:, None]
    if BRANCH:
        offs_r = tl.arange(0, BLOCK_R)
        mask_r = (offs_r < r)[None, :]
        t = tl.load(t_ptr + pair[:, None] * stride_t + offs_r[None, :], mask=mask_r, other=0.0)
        at = b_ptr + expert * stride_be + safe_n[:, None] * stride_bn + offs_r[None, :] * stride_br
        y = tl.dot(t, tl.trans(tl.load(at, mask=mask_r, other=0.0)), y, input_precision="ieee")
    y_ptrs = y_ptr + pair[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


LARGE = GroupedTile(128, 256, 128, 8, 3)
SMALL = GroupedTile(128, 128, 64, 8, 3)  # 48 KiB


def _tile(device: torch.device) -> GroupedTile:
    """The larger one asks for 144 KiB of shared memory, which GPUs of data centres have."""
    return LARGE if device.type == "cuda" and capability_of(device)[0] in (9, 10) else SMALL


def launch(o: GroupedRows, y: Tensor, tile: GroupedTile | None = None) -> None:
    """`grouped_float8_ref` into y (P, N), contiguous; rows of q, w and t have contiguous columns."""
    E, N, K = o.w.shape
    m, n, k, num_warps, num_stages = tile or _tile(y.device)
    k = min(k, max(32, next_power_of_2(K)))
    r, t, b = (0, o.ends, o.ends) if o.t is None or o.b is None else (o.t.shape[1], o.t, o.b)
    of_t, of_b = (0, (0, 0, 0)) if r == 0 else (t.stride(0), b.stride())
    rows = o.ends if o.rows is None else o.rows
    with on_device_of(y):
        start_kernel(
            _grouped_float8_kernel, ((cdiv(len(y), m) + E) * cdiv(N, n),),
            (o.q, o.scale, o.w, o.w_scale, rows, o.ends, t, b, y),
            E, N, K, r, o.q.stride(0), o.w.stride(0), o.w.stride(1), of_t, *of_b,
            ROWS=o.rows is not None, BRANCH=r > 0, WIDE=not y.is_cuda, EVEN_K=K % k == 0,
            BLOCK_E=next_power_of_2(E), BLOCK_R=max(16, next_power_of_2(r)),
            BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip


_TYPES = {"q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "w_ptr": "*fp8e4nv", "w_scale_ptr": "*fp32"}
_TYPES |= {"rows_ptr": "*i64", "ends_ptr": "*i32", "t_ptr": "*bf16", "b_ptr": "*bf16", "y_ptr": "*bf16"}
_NUMBERS = ("E", "N", "K", "r", "stride_q", "stride_we", "stride_wn", "stride_t", "stride_be", "stride_bn")
_TYPES |= dict.fromkeys((*_NUMBERS, "stride_br"), "i32")
_FLAGS = ("ROWS", "BRANCH", "WIDE", "EVEN_K", "BLOCK_E", "BLOCK_R", "BLOCK_M", "BLOCK_N", "BLOCK_K")
_TYPES |= dict.fromkeys(_FLAGS, "constexpr")
_ALIGNED = (
    *(name for name in _TYPES if name.endswith("_ptr")),
    "N",
    "K",
    "stride_q",
    "stride_we",
    "stride_wn",
)


def _case(tile: GroupedTile, types: dict[str, str], **flags: bool) -> CompileCase:
    constants = {"ROWS": True, "BRANCH": True, "WIDE": False, "EVEN_K": True, "BLOCK_E": 128, "BLOCK_R": 32}
    constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, **flags}
    return CompileCase(_grouped_float8_kernel, {**_TYPES, **types}, constants, _ALIGNED, tile.num_warps, 89)


COMPILE_CASES = (
    _case(SMALL, {}),
    _case(SMALL, {}, ROWS=False, BRANCH=False, EVEN_K=False),
    _case(SMALL, dict.fromkeys(("t_ptr", "b_ptr", "y_ptr"), "*fp32")),
)


# 3. The op: on a CPU it runs the definition, on CUDA the kernel.


@torch.library.custom_op("fewbits::grouped_float8", mutates_args=())
@one_by_one
def _grouped_float8(o: GroupedRows) -> Tensor:
    return grouped_float8_ref(o)


def _empty(o: GroupedRows) -> Tensor:
    P = len(o.q) if o.rows is None else len(o.rows)
    return torch.empty(P, o.w.shape[1], dtype=o.dtype, device=o.q.device)


def _cuda(o: GroupedRows) -> Tensor:
    if o.dtype not in KERNEL_DTYPES:
        return grouped_float8_ref(o)
    y = _empty(o)
    if y.numel():
        w = o.w if o.w.stride(2) == 1 else o.w.contiguous()
        t = None if o.t is None else dense_rows(o.t)
        launch(o._replace(q=dense_rows(o.q), w=w, t=t, scale=o.scale.contiguous()), y)
    return y


_grouped_float8.register_kernel("cuda")(one_by_one(_cuda))


@_grouped_float8.register_fake
@one_by_one
def _(o: GroupedRows) -> Tensor:
    return _empty(o)


# 4. The public function, for hand-written autograd nodes.


def grouped_float8(
    q: Tensor,
    scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    ends: Tensor,
    *,
    rows: Tensor | None = None,
    branch: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Each pair's row by the matrix of its expert, and its branch.

    Args:
        q: (P, K) float8_e4m3fn sorted by expert, or with ``rows`` (M, K); rows perhaps apart.
        scale: (P, 1) or (M, 1) float32, from `quantize_rows`.
        w: (E, N, K) float8_e4m3fn; any strides whose last is one.
        w_scale: float32, one value.
        ends: (E,) int32, where each expert's pairs end.
        rows: (P,) int64, the row of q that belongs to each pair; None: its own number.
        branch: t (P, r) and B (E, N, r) in ``dtype``, r at most 128, B of any strides; None: none.
        dtype: of the result.

    Returns:
        (P, N), contiguous; no gradient.

    Raises:
        BadInput: shapes or dtypes do not fit, or a side of w is no multiple of 16.
        Unsupported: the GPU has no 8-bit floating point.
    """
    require_float8(q.device)
    t, b = branch or (None, None)
    E, N, K = w.shape
    P = len(q) if rows is None else len(rows)
    fits = q.dim() == 2 and q.shape[1] == K and scale.shape == (len(q), 1) and ends.shape == (E,)
    fits = fits and q.dtype == w.dtype == torch.float8_e4m3fn and w_scale.numel() == 1
    if t is not None and b is not None:
        r = t.shape[-1]
        fits = fits and t.shape == (P, r) and b.shape == (E, N, r) and t.dtype == b.dtype == dtype
        fits = fits and 0 < r <= MAX_RANK
    if not fits or N % _MULTIPLE or K % _MULTIPLE:
        have = [None if one is None else (tuple(one.shape), one.dtype) for one in (q, scale, w, ends, t, b)]
        raise BadInput(
            "grouped_float8 takes q (M, K) and w (E, N, K) of float8_e4m3fn with N and K multiples of 16, "
            f"scale (M, 1), ends (E,), t (P, r) and B (E, N, r) of {dtype}; these are {have}."
        )
    return run(_grouped_float8, _cuda, q, GroupedRows(q, scale, w, w_scale, ends, rows, t, b, dtype))
