"""The rows that go into a product of experts, with an adapter's inner values beside them.

Pairs of a token and an expert stand sorted by expert (`fewbits.nn.grouped.Table`); those of expert e end
before ends[e]. For the pair p of expert e, whose row of x is i[p]:

    inner[p] = s * A[e] x[i[p]]                    A (E, r, K), x (M, K), i (P,), inner (P, r)
    wide[p]  = [ x[i[p]] | inner[p] | 0 ]          (P, K + room), room at least r

(or inner alone, where the product takes other rows than x), so that one product with [ W | B ] side by side
gives W x + s B A x (`fewbits.nn.expert_products`). Without i the pair's row of x is its own number.

A is taken in x's dtype, sums are float32 (float64 for float64), and inner is rounded once.

Floor: x is read once for every pair, wide is written. 65,536 pairs of 2048 + 32 values in bfloat16 are 273
MB, 64 us at the 4.28 TB/s that a copy reaches on an H200, where x's 8192 rows come out of the cache.
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
MAX_RANK = 256  # of A: a program holds all inner values of its pairs
_BLOCK_P, _BLOCK_K = 64, 128
_FEW_VALUES = 32  # of a pair


class PairInputs(NamedTuple):
    """Rows, the adapter's first matrix, and which pair has which row and expert."""

    x: Tensor  # (M, K)
    a: Tensor  # (E, r, K)
    ends: Tensor  # (E,)
    rows: Tensor | None  # (P,)
    scaling: float
    room: int
    alone: bool  # wide is (P, 0)


# 1. The definition.


def pair_inputs_ref(
    x: Tensor,
    a: Tensor,
    ends: Tensor,
    rows: Tensor | None = None,
    scaling: float = 1.0,
    room: int = 0,
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """The formulas above; shapes as in `pair_inputs`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x if rows is None else x[rows]
    inner, first = torch.empty(len(x), a.shape[1], dtype=x.dtype, device=x.device), 0
    for matrix, last in zip(a.to(x.dtype).to(wide), ends.tolist(), strict=True):
        inner[first:last] = (x[first:last].to(wide) @ matrix.t() * scaling).to(x.dtype)
        first = last
    if alone:
        return x.new_empty(len(x), 0), inner
    empty = x.new_zeros(len(x), room - a.shape[1])
    return torch.cat([x, inner, empty], 1), inner


# 2. The kernel.


@jit
def _pair_inputs_kernel(
    x_ptr, a_ptr, rows_ptr, ends_ptr, wide_ptr, inner_ptr, scaling, E, r, K, room, stride_x,
    ROWS: tl.constexpr, EVEN_K: tl.constexpr, ALONE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_P pairs of one expert, or none: there are more programs than such tiles."""
    pid = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    ends = tl.load(ends_ptr + offs_e, mask=mask_e, other=0)
    begins = tl.load(ends_ptr + offs_e - 1, mask=mask_e & (offs_e > 0), other=0)
    tiles = tl.where(mask_e, (ends - begins + BLOCK_P - 1) // BLOCK_P, 0)
    expert = tl.sum((mask_e & (tl.cumsum(tiles, 0) <= pid)).to(tl.int32), 0)
    is_expert = offs_e == expert
    tile = pid - tl.sum(tl.where(offs_e < expert, tiles, 0), 0)
    last = tl.sum(tl.where(is_expert, ends, 0), 0)  # 0 behind the last expert
    pair = tl.sum(tl.where(is_expert, begins, 0), 0) + tile * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_p = pair < last
    row = tl.load(rows_ptr + pair, mask=mask_p, other=0).to(tl.int64) if ROWS else pair.to(tl.int64)
    pair = pair.to(tl.int64)
    offs_r, offs_k = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row[:, None] * stride_x + offs_k[None, :]
    wide_ptrs = wide_ptr + pair[:, None] * (K + room) + offs_k[None, :]
    a_ptrs = a_ptr + (expert.to(tl.int64) * r + offs_r)[None, :] * K + offs_k[:, None]
    inner = tl.zeros((BLOCK_P, BLOCK_R), tl.float32)
    for first in range(0, tl.where(expert < E, K, 0), BLOCK_K):
        mask_k = first + offs_k < K
        mask = mask_p[:, None] if EVEN_K else mask_p[:, None] & mask_k[None, :]
        mask_a = (offs_r < r)[None, :] if EVEN_K else (offs_r < r)[None, :] & mask_k[:, None]
        x = tl.load(x_ptrs + first, mask=mask, other=0.0)
        if not ALONE:
            tl.store(wide_ptrs + first, x, mask=mask)
        a = tl.load(a_ptrs + first, mask=mask_a, other=0.0).to(x.dtype)
        inner = tl.dot(x, a, inner, input_precision="ieee")
    inner = (inner * scaling).to(inner_ptr.dtype.element_ty)  # zero behind column r
    to_inner = inner_ptr + pair[:, None] * r + offs_r[None, :]
    tl.store(to_inner, inner, mask=mask_p[:, None] & (offs_r < r)[None, :])
    if not ALONE:
        beside = wide_ptr + pair[:, None] * (K + room) + K + offs_r[None, :]
        tl.store(beside, inner, mask=mask_p[:, None] & (offs_r < room)[None, :])


def columns_at_once(block_r: int) -> int:
    """Columns of x and A that a program reads at once: so many fit into 99 KiB of shared memory.

    Three stages of 64 rows of x and ``block_r`` of A, in float32, with what A is rounded to: 72 to 96 KiB.
    """
    return _BLOCK_K if block_r <= _FEW_VALUES else min(_BLOCK_K // 2, 8192 // block_r)


def launch(
    o: PairInputs, wide: Tensor, inner: Tensor, *, block_p: int = _BLOCK_P, block_k: int | None = None
) -> None:
    """`pair_inputs_ref` into wide (P, K + room) and inner (P, r), contiguous; x has contiguous columns."""
    (E, r, K), P = o.a.shape, len(inner)
    block_r = max(16, next_power_of_2(max(o.room, r)))
    block_k = min(block_k or columns_at_once(block_r), max(16, next_power_of_2(K)))
    rows = o.ends if o.rows is None else o.rows
    wide = inner if o.alone else wide
    with on_device_of(inner):
        start_kernel(
            _pair_inputs_kernel, (cdiv(P, block_p) + E,), (o.x, o.a, rows, o.ends, wide, inner),
            float(o.scaling), E, r, K, o.room, o.x.stride(0),
            ROWS=o.rows is not None, EVEN_K=K % block_k == 0, ALONE=o.alone,
            BLOCK_E=next_power_of_2(E), BLOCK_R=block_r, BLOCK_K=block_k, BLOCK_P=block_p,
            num_warps=4 if block_r <= 64 else 8, num_stages=3,
        )  # fmt: skip


_TYPES = {"x_ptr": "*bf16", "a_ptr": "*fp32", "rows_ptr": "*i64", "ends_ptr": "*i32", "wide_ptr": "*bf16"}
_TYPES |= {"inner_ptr": "*bf16", "scaling": "fp32"}
_TYPES |= dict.fromkeys(("E", "r", "K", "room", "stride_x"), "i32")
_TYPES |= dict.fromkeys(("ROWS", "EVEN_K", "ALONE", "BLOCK_E", "BLOCK_R", "BLOCK_K", "BLOCK_P"), "constexpr")
_TILE = {"BLOCK_E": 128, "BLOCK_R": 32, "BLOCK_K": _BLOCK_K, "BLOCK_P": _BLOCK_P}
_CONSTANTS = {"ROWS": True, "EVEN_K": True, "ALONE": False, **_TILE}
_ALIGNED = (*(name for name in _TYPES if name.endswith("_ptr")), "E", "r", "K", "room", "stride_x")
COMPILE_CASES = (
    CompileCase(_pair_inputs_kernel, _TYPES, _CONSTANTS, _ALIGNED),
    CompileCase(_pair_inputs_kernel, {**_TYPES, "a_ptr": "*bf16"}, {**_CONSTANTS, "ALONE": True}, _ALIGNED),
    CompileCase(
        _pair_inputs_kernel,
        {**_TYPES, "a_ptr": "*bf16"},
        {**_CONSTANTS, "ROWS": False, "BLOCK_R": 16},
        _ALIGNED,
    ),
    CompileCase(
        _pair_inputs_kernel,
        {**_TYPES, "x_ptr": "*fp32", "wide_ptr": "*fp32", "inner_ptr": "*fp32"},
        {**_CONSTANTS, "EVEN_K": False},
    ),
    *(
        CompileCase(
            _pair_inputs_kernel,
            {**_TYPES, **dict.fromkeys(("x_ptr", "wide_ptr", "inner_ptr"), kind)},
            {**_CONSTANTS, "BLOCK_R": ranks, "BLOCK_K": columns_at_once(ranks)},
            _ALIGNED,
        )
        for ranks in (64, 128, 256)
        for kind in ("*fp32", "*bf16")
    ),
)


# 3. The op: on a CPU it runs the definition, on CUDA the kernel.


@torch.library.custom_op("fewbits::pair_inputs", mutates_args=())
@one_by_one
def _pair_inputs(o: PairInputs) -> tuple[Tensor, Tensor]:
    return pair_inputs_ref(*o)


def _empty(o: PairInputs) -> tuple[Tensor, Tensor]:
    P, r = len(o.x) if o.rows is None else len(o.rows), o.a.shape[1]
    return o.x.new_empty(P, 0 if o.alone else o.x.shape[1] + o.room), o.x.new_empty(P, r)


def _cuda(o: PairInputs) -> tuple[Tensor, Tensor]:
    if o.x.dtype not in KERNEL_DTYPES or max(o.room, o.a.shape[1]) > MAX_RANK:
        return pair_inputs_ref(*o)
    wide, inner = _empty(o)
    if inner.numel():
        launch(o._replace(x=dense_rows(o.x), a=o.a.contiguous()), wide, inner)
    return wide, inner


_pair_inputs.register_kernel("cuda")(one_by_one(_cuda))


@_pair_inputs.register_fake
@one_by_one
def _(o: PairInputs) -> tuple[Tensor, Tensor]:
    return _empty(o)


# 4. The public function, for hand-written autograd nodes.


def pair_inputs(
    x: Tensor, a: Tensor, ends: Tensor, *, rows: Tensor | None = None, scaling: float = 1.0, room: int
) -> tuple[Tensor, Tensor]:
    """Each pair's row with the inner values of its expert's adapter beside it.

    Args:
        x: (P, K), or with ``rows`` (M, K), rows perhaps apart.
        a: (E, r, K), any floating dtype.
        ends: (E,) int32, where each expert's pairs end.
        rows: (P,) int64, the row of x that belongs to each pair; None: its own number.
        scaling: of the inner values.
        room: columns behind K, at least r.

    Returns:
        (P, K + room), zero behind the inner values, and these alone (P, r), both in x's dtype, contiguous; no
        gradient.

    Raises:
        BadInput: shapes do not fit.
    """
    if x.dim() != 2 or a.dim() != 3 or a.shape[::2] != (len(ends), x.shape[1]) or room < a.shape[1]:
        have = [tuple(one.shape) for one in (x, a, ends)]
        raise BadInput(
            f"pair_inputs takes x (M, K), a (E, r, K), ends (E,), room >= r; these are {have}, {room}."
        )
    return run(_pair_inputs, _cuda, x, PairInputs(x, a, ends, rows, scaling, room, False))


def pair_inner(
    x: Tensor, a: Tensor, ends: Tensor, *, rows: Tensor | None = None, scaling: float = 1.0
) -> Tensor:
    """The inner values alone, (P, r) in x's dtype, contiguous; no gradient.

    Args:
        x: (P, K), or with ``rows`` (M, K), rows perhaps apart.
        a: (E, r, K), any floating dtype.
        ends: (E,) int32, where each expert's pairs end.
        rows: (P,) int64, the row of x that belongs to each pair; None: its own number.
        scaling: of the inner values.

    Raises:
        BadInput: shapes do not fit.
    """
    if x.dim() != 2 or a.dim() != 3 or a.shape[::2] != (len(ends), x.shape[1]):
        have = [tuple(one.shape) for one in (x, a, ends)]
        raise BadInput(f"pair_inner takes x (M, K), a (E, r, K), ends (E,); these are {have}.")
    return run(_pair_inputs, _cuda, x, PairInputs(x, a, ends, rows, scaling, 0, True))[1]
