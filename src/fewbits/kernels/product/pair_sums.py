"""What a layer of experts gives for each token: the weighted sum of its pairs' rows.

A token t has k pairs, one with each of its experts; pairs stand sorted by expert, so those of a token lie
apart (`fewbits.nn.grouped.Table`):

    y[t] = sum over j of c[t, j] * (x[i[t, j]] + extra[i[t, j]])     x, extra (P, H), i, c (T, k), y (T, H)

``extra`` is what an adapter adds to each pair: to add it here takes one read of it, where adding it to x
first takes two reads and a write more. Without weights c is 1, as in the backward pass.

float32 throughout (float64 for float64), in the order of j, and one rounding at the end; the same bits on
every run, where adding pairs to their tokens (``index_add``) takes any order.

Floor: x and extra are read once, y is written. 65,536 pairs of 2048 in bfloat16 are 268 MB and their 8192
tokens 34 MB, 71 us at the 4.28 TB/s that a copy reaches on an H200, and 133 us with extra; torch's
embedding_bag takes 390 us, and 520 with weights.
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
MOST_PAIRS = 32  # of a token: the kernel asks for all their rows before it adds the first
_BLOCK = 1024


class PairRows(NamedTuple):
    """The rows of pairs, and which of them belong to a token with which weight."""

    x: Tensor  # (P, H)
    pairs: Tensor  # (T, k)
    weights: Tensor | None  # (T, k)
    extra: Tensor | None  # (P, H)


# 1. The definition.


def pair_sums_ref(
    x: Tensor, index: Tensor, weights: Tensor | None = None, extra: Tensor | None = None
) -> Tensor:
    """The formula above; shapes as in `pair_sums`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x[index].to(wide)
    if extra is not None:
        rows = rows + extra[index].to(wide)
    if weights is not None:
        rows = rows * weights.to(wide)[..., None]
    return rows.sum(1).to(x.dtype)


# 2. The kernel.


@jit(do_not_specialize=("T",))
def _pair_sums_kernel(
    x_ptr, extra_ptr, index_ptr, weights_ptr, y_ptr, T, H, stride_x, stride_extra,
    EXTRA: tl.constexpr, WEIGHTED: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program adds up BLOCK columns of one token."""
    token = (tl.program_id(0) % T).to(tl.int64)
    columns = (tl.program_id(0) // T) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else columns < H
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(PAIRS):
        pair = tl.load(index_ptr + token * PAIRS + j).to(tl.int64)
        row = tl.load(x_ptr + pair * stride_x + columns, mask=mask).to(tl.float32)
        if EXTRA:
            row += tl.load(extra_ptr + pair * stride_extra + columns, mask=mask).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * PAIRS + j).to(tl.float32)
        y += row
    tl.store(y_ptr + token * H + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch(o: PairRows, y: Tensor) -> None:
    """`pair_sums_ref` of rows with contiguous columns into y (T, H), contiguous; not for float64."""
    (T, k), H = o.pairs.shape, y.shape[1]
    block = min(_BLOCK, max(next_power_of_2(H), 16))
    extra, weights = o.x if o.extra is None else o.extra, o.pairs if o.weights is None else o.weights
    with on_device_of(y):
        start_kernel(
            _pair_sums_kernel, (T * cdiv(H, block),), (o.x, extra, o.pairs, weights, y),
            T, H, o.x.stride(0), extra.stride(0), EXTRA=o.extra is not None, WEIGHTED=o.weights is not None,
            PAIRS=k, EVEN=H % block == 0, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip


_TYPES = {"x_ptr": "*bf16", "extra_ptr": "*bf16", "index_ptr": "*i64", "weights_ptr": "*bf16"}
_TYPES |= {"y_ptr": "*bf16", **dict.fromkeys(("T", "H", "stride_x", "stride_extra"), "i32")}
_TYPES |= dict.fromkeys(("EXTRA", "WEIGHTED", "PAIRS", "EVEN", "BLOCK"), "constexpr")
_CONSTANTS = {"EXTRA": True, "WEIGHTED": True, "PAIRS": 8, "EVEN": True, "BLOCK": _BLOCK}
_ALIGNED = (*(name for name in _TYPES if name.endswith("_ptr")), "H", "stride_x", "stride_extra")
COMPILE_CASES = (
    CompileCase(_pair_sums_kernel, _TYPES, _CONSTANTS, _ALIGNED),
    CompileCase(_pair_sums_kernel, _TYPES, {**_CONSTANTS, "EXTRA": False, "WEIGHTED": False}, _ALIGNED),
    CompileCase(
        _pair_sums_kernel, {**_TYPES, "weights_ptr": "*fp32"}, {**_CONSTANTS, "EVEN": False, "PAIRS": 3}
    ),
)


# 3. The op: on a CPU it runs the definition, on CUDA the kernel.


@torch.library.custom_op("fewbits::pair_sums", mutates_args=())
@one_by_one
def _pair_sums(o: PairRows) -> Tensor:
    return pair_sums_ref(*o)


def _cuda(o: PairRows) -> Tensor:
    if o.x.dtype not in KERNEL_DTYPES or not 0 < o.pairs.shape[1] <= MOST_PAIRS:
        return pair_sums_ref(*o)
    y = o.x.new_empty(o.pairs.shape[0], o.x.shape[1])
    if y.numel():
        rows = [dense_rows(o.x), None if o.extra is None else dense_rows(o.extra)]
        weights = None if o.weights is None else o.weights.contiguous()
        launch(PairRows(rows[0], o.pairs.contiguous(), weights, rows[1]), y)  # type: ignore[arg-type]
    return y


_pair_sums.register_kernel("cuda")(one_by_one(_cuda))


@_pair_sums.register_fake
@one_by_one
def _(o: PairRows) -> Tensor:
    return o.x.new_empty(o.pairs.shape[0], o.x.shape[1])


# 4. The public function, for hand-written autograd nodes.


def pair_sums(
    x: Tensor, index: Tensor, weights: Tensor | None = None, *, extra: Tensor | None = None
) -> Tensor:
    """The weighted sum of a few rows for each token.

    Args:
        x: (P, H), rows perhaps apart.
        index: (T, k) int64, rows of x.
        weights: (T, k), any floating dtype; None: ones.
        extra: (P, H) in x's dtype, rows perhaps apart, added to x's; None: nothing.

    Returns:
        (T, H) in x's dtype, contiguous; no gradient.

    Raises:
        BadInput: shapes do not fit.
    """
    if (
        index.dim() != 2
        or (weights is not None and weights.shape != index.shape)
        or (extra is not None and (extra.shape != x.shape or extra.dtype != x.dtype))
    ):
        have = [None if t is None else (tuple(t.shape), t.dtype) for t in (x, index, weights, extra)]
        raise BadInput(
            f"pair_sums takes x (P, H), index (T, k), weights (T, k), extra like x; these are {have}."
        )
    return run(_pair_sums, _cuda, x, PairRows(x, index, weights, extra))
