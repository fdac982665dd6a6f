"""What an adapter's matrix gives to each pair of a token and an expert, added to rows that stand there.

Pairs of a token and an expert stand sorted by expert (`fewbits.nn.grouped.Table`); those of expert e end
before ends[e]. For the pair p of expert e:

    y[p] += A[e]^T t[p]                    y (P, N), t (P, r), A (E, r, N)

in place. A is taken in y's dtype, sums are float32 (float64 for float64), and y is rounded once.

Floor: y is read and written. 65,536 pairs of 2048 values in bfloat16 are 537 MB, 125 us at the 4.28 TB/s that
a copy reaches on an H200; torch's grouped product of so few inputs takes 430 us, and its result is added
elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.launch.matrix import dense_rows
from fewbits.kernels.launch.ops import one_by_one, run
from fewbits.kernels.launch.prepared import start_kernel

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RANK = 128
_BLOCK_P, _BLOCK_N = 64, 128


class LowRankPairs(NamedTuple):
    """Rows, what is added to them, and which pair has which expert."""

    y: Tensor  # (P, N)
    t: Tensor  # (P, r)
    a: Tensor  # (E, r, N)
    ends: Tensor  # (E,)


# 1. The definition.


def pair_low_rank_ref(o: LowRankPairs) -> None:
    """The formula above; see `pair_low_rank`."""
    wide, first = torch.promote_types(o.y.dtype, torch.float32), 0
    for matrix, last in zip(o.a.to(o.y.dtype).to(wide), o.ends.tolist(), strict=True):
        part = o.y[first:last]
        part.copy_(part.to(wide) + o.t[first:last].to(wide) @ matrix)
        first = last


# 2. The kernel.


@jit
def _pair_low_rank_kernel(
    y_ptr, t_ptr, a_ptr, ends_ptr, E, r, N, stride_y, stride_t, EVEN_N: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_P pairs of one expert and BLOCK_N columns, or none: there are more of them."""
    strips = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0) // strips
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    ends = tl.load(ends_ptr + offs_e, mask=mask_e, other=0)
    begins = tl.load(ends_ptr + offs_e - 1, mask=mask_e & (offs_e > 0), other=0)
    tiles = tl.where(mask_e, (ends - begins + BLOCK_P - 1) // BLOCK_P, 0)
    expert = tl.sum((mask_e & (tl.cumsum(tiles, 0) <= pid)).to(tl.int32), 0)
    if expert >= E:
        return
    is_expert = offs_e == expert
    tile = pid - tl.sum(tl.where(offs_e < expert, tiles, 0), 0)
    last = tl.sum(tl.where(is_expert, ends, 0), 0)
    pair = tl.sum(tl.where(is_expert, begins, 0), 0) + tile * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_p, pair = pair < last, pair.to(tl.int64)
    offs_n = tl.program_id(0) % strips * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    mask_n = offs_n < N
    mask = mask_p[:, None] if EVEN_N else mask_p[:, None] & mask_n[None, :]
    y_ptrs = y_ptr + pair[:, None] * stride_y + offs_n[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0)
    mask_t = mask_p[:, None] & (offs_r < r)[None, :]
    t = tl.load(t_ptr + pair[:, None] * stride_t + offs_r[None, :], mask=mask_t, other=0.0).to(y.dtype)
    mask_a = (offs_r < r)[:, None] & mask_n[None, :]
    a_ptrs = a_ptr + (expert.to(tl.int64) * r + offs_r)[:, None] * N + offs_n[None, :]
    a = tl.load(a_ptrs, mask=mask_a, other=0.0).to(y.dtype)
    total = tl.dot(t, a, y.to(tl.float32), input_precision="ieee")
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)


def launch(o: LowRankPairs) -> None:
    """`pair_low_rank_ref` of rows with contiguous columns and a contiguous ``a``; not for float64."""
    (E, r, N), P = o.a.shape, len(o.y)
    block_n = min(_BLOCK_N, max(16, next_power_of_2(N)))
    with on_device_of(o.y):
        start_kernel(
            _pair_low_rank_kernel,
            ((cdiv(P, _BLOCK_P) + E) * cdiv(N, block_n),),
            (o.y, o.t, o.a, o.ends),
            E,
            r,
            N,
            o.y.stride(0),
            o.t.stride(0),
            EVEN_N=N % block_n == 0,
            BLOCK_E=next_power_of_2(E),
            BLOCK_R=max(16, next_power_of_2(r)),
            BLOCK_N=block_n,
            BLOCK_P=_BLOCK_P,
            num_warps=4,
        )


_TYPES = {"y_ptr": "*bf16", "t_ptr": "*bf16", "a_ptr": "*fp32", "ends_ptr": "*i32"}
_TYPES |= dict.fromkeys(("E", "r", "N", "stride_y", "stride_t"), "i32")
_TYPES |= dict.fromkeys(("EVEN_N", "BLOCK_E", "BLOCK_R", "BLOCK_N", "BLOCK_P"), "constexpr")
_CONSTANTS = {"EVEN_N": True, "BLOCK_E": 128, "BLOCK_R": 16, "BLOCK_N": _BLOCK_N, "BLOCK_P": _BLOCK_P}
_ALIGNED = ("y_ptr", "t_ptr", "a_ptr", "ends_ptr", "E", "r", "N", "stride_y", "stride_t")
COMPILE_CASES = (
    CompileCase(_pair_low_rank_kernel, _TYPES, _CONSTANTS, _ALIGNED),
    CompileCase(
        _pair_low_rank_kernel,
        {**_TYPES, "y_ptr": "*fp32", "t_ptr": "*fp32"},
        {**_CONSTANTS, "EVEN_N": False, "BLOCK_R": MAX_RANK},
    ),
)


# 3. The op: on a CPU it runs the definition, on CUDA the kernel.


@torch.library.custom_op("fewbits::pair_low_rank", mutates_args=("y",))
@one_by_one
def _pair_low_rank(o: LowRankPairs) -> None:
    pair_low_rank_ref(o)


def _cuda(o: LowRankPairs) -> None:
    rows_apart = o.y.stride(1) != 1 and o.y.shape[1] > 1
    if o.y.dtype not in KERNEL_DTYPES or o.a.shape[1] > MAX_RANK or rows_apart:
        pair_low_rank_ref(o)
    elif o.y.numel() and o.a.shape[1]:
        launch(o._replace(t=dense_rows(o.t), a=o.a.contiguous()))


_pair_low_rank.register_kernel("cuda")(one_by_one(_cuda))


# 4. The public function, for hand-written autograd nodes.


def pair_low_rank(y: Tensor, t: Tensor, a: Tensor, ends: Tensor) -> Tensor:
    """Add to each pair's row what its expert's matrix makes of a few values.

    Args:
        y: (P, N), sorted by expert, rows perhaps apart; it is added to.
        t: (P, r) in y's dtype, rows perhaps apart; ranks above 128 take the definition, and wait for a GPU.
        a: (E, r, N), any floating dtype.
        ends: (E,) int32, where each expert's pairs end.

    Returns:
        y; no gradient.

    Raises:
        BadInput: shapes or dtypes do not fit.
    """
    fits = y.dim() == t.dim() == 2 and a.dim() == 3 and y.dtype == t.dtype and len(y) == len(t)
    if not fits or a.shape != (len(ends), t.shape[1], y.shape[1]):
        have = [(tuple(one.shape), one.dtype) for one in (y, t, a, ends)]
        raise BadInput(
            f"pair_low_rank takes y (P, N), t (P, r) like y, a (E, r, N), ends (E,); these are {have}."
        )
    run(_pair_low_rank, _cuda, y, LowRankPairs(y, t, a, ends))
    return y
