"""The gradient of an adapter's matrix in a layer of experts: a sum over each expert's own pairs.

Pairs of a token and an expert stand sorted by expert (`fewbits.nn.grouped.Table`); those of expert e end
before ends[e]. With t[p] (r,) a pair's few values, x[i[p]] (N,) its many, w[p] its weight and s a number:

    y[e] = s * sum over the pairs p of e: w[p] * t[p] x[i[p]]^T               (E, r, N)

Without i the pair's row of x is its own number, without w its weight is 1. An expert without pairs has zeros.

w and s come to t in float32, and that is rounded to t's dtype once; sums are float32 (float64 for float64),
and so is y, in the order of the pairs: the same bits on every run.

Floor: t is read, x once for every pair, and y is written. 65,536 pairs of 2048 values in bfloat16 are 268 MB,
63 us at the 4.28 TB/s that a copy reaches on an H200; where they are 8192 rows that i repeats, they come out
of the cache. To gather the rows first takes as long again, twice.
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
_BLOCK_R, _BLOCK_N, _BLOCK_P = 64, 128, 64


class OuterPairs(NamedTuple):
    """Both sides of the products, and which pair has which row, weight and expert."""

    t: Tensor  # (P, r)
    x: Tensor  # (M, N)
    ends: Tensor  # (E,)
    rows: Tensor | None  # (P,)
    weights: Tensor | None  # (P,)
    scaling: float


# 1. The definition.


def pair_outer_ref(
    t: Tensor,
    x: Tensor,
    ends: Tensor,
    rows: Tensor | None = None,
    weights: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """The formula above; shapes as in `pair_outer`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = scaling if weights is None else scaling * weights.to(wide)[:, None]
    t = (t.to(wide) * factor).to(t.dtype).to(wide)
    x = (x if rows is None else x[rows]).to(wide)
    y, first = torch.zeros(len(ends), t.shape[1], x.shape[1], dtype=wide, device=x.device), 0
    for e, last in enumerate(ends.tolist()):
        y[e] = t[first:last].t() @ x[first:last]
        first = last
    return y


# 2. The kernel.


@jit
def _pair_outer_kernel(
    t_ptr, x_ptr, rows_ptr, weights_ptr, ends_ptr, y_ptr, scaling, r, N, stride_t, stride_x,
    ROWS: tl.constexpr, WEIGHTED: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_R times BLOCK_N values of one expert, and walks over that expert's pairs."""
    slabs, strips = tl.cdiv(N, BLOCK_N), tl.cdiv(r, BLOCK_R)
    pid = tl.program_id(0)
    expert = (pid // (slabs * strips)).to(tl.int64)
    offs_r = pid // slabs % strips * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_n = pid % slabs * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_r, mask_n = offs_r < r, offs_n < N
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends_ptr + expert)
    y = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        mask_p = pair < last
        row = tl.load(rows_ptr + pair, mask=mask_p, other=0).to(tl.int64) if ROWS else pair.to(tl.int64)
        mask_x = mask_p[:, None] if EVEN_N else mask_p[:, None] & mask_n[None, :]
        x = tl.load(x_ptr + row[:, None] * stride_x + offs_n[None, :], mask=mask_x, other=0.0)
        t_ptrs = t_ptr + pair.to(tl.int64)[:, None] * stride_t + offs_r[None, :]
        t = tl.load(t_ptrs, mask=mask_p[:, None] & mask_r[None, :], other=0.0)
        factor = tl.full((BLOCK_P,), 1.0, tl.float32) * scaling
        if WEIGHTED:
            factor *= tl.load(weights_ptr + pair, mask=mask_p, other=0.0).to(tl.float32)
        t = (t.to(tl.float32) * factor[:, None]).to(x.dtype)
        y = tl.dot(tl.trans(t), x, y, input_precision="ieee")
    y_ptrs = y_ptr + (expert * r + offs_r)[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y, mask=mask_r[:, None] & mask_n[None, :])


def launch(o: OuterPairs, y: Tensor, *, block_n: int = _BLOCK_N, block_p: int = _BLOCK_P) -> None:
    """`pair_outer_ref` of rows with contiguous columns into y (E, r, N) float32; not for float64."""
    E, r, N = y.shape
    block_r, block_n = min(_BLOCK_R, max(16, next_power_of_2(r))), min(block_n, max(16, next_power_of_2(N)))
    rows, weights = o.ends if o.rows is None else o.rows, o.t if o.weights is None else o.weights
    with on_device_of(y):
        start_kernel(
            _pair_outer_kernel, (E * cdiv(r, block_r) * cdiv(N, block_n),),
            (o.t, o.x, rows, weights, o.ends, y), float(o.scaling), r, N, o.t.stride(0), o.x.stride(0),
            ROWS=o.rows is not None, WEIGHTED=o.weights is not None, EVEN_N=N % block_n == 0,
            BLOCK_R=block_r, BLOCK_N=block_n, BLOCK_P=block_p, num_warps=4, num_stages=3,
        )  # fmt: skip


_TYPES = {"t_ptr": "*bf16", "x_ptr": "*bf16", "rows_ptr": "*i64", "weights_ptr": "*bf16", "ends_ptr": "*i32"}
_TYPES |= {"y_ptr": "*fp32", "scaling": "fp32", **dict.fromkeys(("r", "N", "stride_t", "stride_x"), "i32")}
_TYPES |= dict.fromkeys(("ROWS", "WEIGHTED", "EVEN_N", "BLOCK_R", "BLOCK_N", "BLOCK_P"), "constexpr")
_TILE = {"BLOCK_R": 32, "BLOCK_N": _BLOCK_N, "BLOCK_P": _BLOCK_P}
_CONSTANTS = {"ROWS": True, "WEIGHTED": False, "EVEN_N": True, **_TILE}
_ALIGNED = (*(name for name in _TYPES if name.endswith("_ptr")), "r", "N", "stride_t", "stride_x")
COMPILE_CASES = (
    CompileCase(_pair_outer_kernel, _TYPES, _CONSTANTS, _ALIGNED),
    CompileCase(
        _pair_outer_kernel, _TYPES, {**_CONSTANTS, "ROWS": False, "WEIGHTED": True, "BLOCK_R": 16}, _ALIGNED
    ),
    CompileCase(
        _pair_outer_kernel,
        {**_TYPES, "t_ptr": "*fp32", "x_ptr": "*fp32", "weights_ptr": "*fp32"},
        {**_CONSTANTS, "WEIGHTED": True, "EVEN_N": False},
    ),
)


# 3. The op: on a CPU it runs the definition, on CUDA the kernel.


@torch.library.custom_op("fewbits::pair_outer", mutates_args=())
@one_by_one
def _pair_outer(o: OuterPairs) -> Tensor:
    return pair_outer_ref(*o)


def _cuda(o: OuterPairs) -> Tensor:
    if o.x.dtype not in KERNEL_DTYPES:
        return pair_outer_ref(*o)
    y = torch.empty(len(o.ends), o.t.shape[1], o.x.shape[1], dtype=torch.float32, device=o.x.device)
    if y.numel():
        weights = None if o.weights is None else o.weights.contiguous()
        launch(OuterPairs(dense_rows(o.t), dense_rows(o.x), o.ends, o.rows, weights, o.scaling), y)
    return y


_pair_outer.register_kernel("cuda")(one_by_one(_cuda))


@_pair_outer.register_fake
@one_by_one
def _(o: OuterPairs) -> Tensor:
    wide = torch.promote_types(o.x.dtype, torch.float32)
    return o.x.new_empty(len(o.ends), o.t.shape[1], o.x.shape[1], dtype=wide)


# 4. The public function, for hand-written autograd nodes.


def pair_outer(
    t: Tensor,
    x: Tensor,
    ends: Tensor,
    *,
    rows: Tensor | None = None,
    weights: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """Each expert's sum of outer products of its pairs' two sides.

    Args:
        t: (P, r), sorted by expert, rows perhaps apart.
        x: (P, N), or with ``rows`` (M, N), in t's dtype, rows perhaps apart.
        ends: (E,) int32, where each expert's pairs end.
        rows: (P,) int64, the row of x that belongs to each pair; None: its own number.
        weights: (P,), any floating dtype; None: ones.
        scaling: of all.

    Returns:
        (E, r, N) in float32 (float64 for float64), contiguous; no gradient.

    Raises:
        BadInput: shapes do not fit.
    """
    pairs = x.shape[:1] if rows is None else rows.shape
    if (
        t.dim() != 2
        or x.dim() != 2
        or t.dtype != x.dtype
        or pairs != t.shape[:1]
        or (weights is not None and weights.shape != t.shape[:1])
    ):
        have = [None if one is None else (tuple(one.shape), one.dtype) for one in (t, x, rows, weights)]
        raise BadInput(
            f"pair_outer takes t (P, r), x (M, N) like t, rows (P,), weights (P,); these are {have}."
        )
    return run(_pair_outer, _cuda, x, OuterPairs(t, x, ends, rows, weights, scaling))
