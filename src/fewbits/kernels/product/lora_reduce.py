"""The thin products of a LoRA linear's backward pass: t and the gradient of B, in one read of dy.

    t_i = s_i * dy_i @ B_i          dB_i = dy_i^T @ xa_i          dA = t^T @ x          xa_i = s_i * x @ A_i^T

Shapes: x (M, K), A (R, K), xa (M, R), dy (M, N). Linears side by side have slices of dy, dy_i (M, N_i), a B_i
(N_i, r_i) each, and columns of xa and t each, in the same order; R is the sum of r_i. With xa scaled as it is
here, dB_i is the gradient of B_i, and t that of ``x @ A^T``: dA follows from it, and dx gains ``t @ A``.

Rounding: each product is summed in float32, multiplied by its scaling, and rounded once.

Floor: dy is read once. 8192 rows in bfloat16, at the 4.28 TB/s that a copy reaches on an H200: 16 us for 4096
columns, 23 us for the 6144 of q, k and v, 110 us for the 28672 of gate and up. One product after the other
reads dy twice. xa and dA are left to cuBLAS: a kernel of our own that reads x once took as long there.

The kernels are in lora_reduce_triton.py; where they are not the faster way (`reduce_tile`), cuBLAS runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.ops import one_by_one, run
from fewbits.kernels.product.lora_reduce_triton import (
    KERNEL_DTYPES,
    MAX_SLICES,
    ReduceSlice,
    launch_reduce,
    reduce_tile,
)

__all__ = [
    "LoRAGradients",
    "ReduceSlice",
    "lora_gradients",
    "lora_reduce",
    "lora_reduce_ref",
]


_E4M3 = torch.float8_e4m3fn


class LoRAGradients(NamedTuple):
    """t (M, R) and dA (R, K) in dy's dtype, dA perhaps None, and dB_i (N_i, r_i) in B_i's dtype."""

    t: Tensor
    da: Tensor | None
    dbs: list[Tensor]


# 1. The definition.


def lora_reduce_ref(dy: Tensor, xa: Tensor, slices: Sequence[ReduceSlice]) -> tuple[Tensor, list[Tensor]]:
    """t (M, R) in dy's dtype and every dB_i in B_i's, from sums in float32 or wider."""
    dtype = xa.dtype if dy.dtype == _E4M3 else dy.dtype
    wide = torch.promote_types(dtype, torch.float32)
    ts, dbs, column = [], [], 0
    for start, b, scaling in slices:
        N, r = b.shape
        part = dy[:, start : start + N].to(wide)
        ts.append(scaling * (part @ b.to(wide)))
        dbs.append((part.t() @ xa[:, column : column + r].to(wide)).to(b.dtype))
        column += r
    return torch.cat(ts, 1).to(dtype), dbs


# 2. The ops: on a CPU they run the definition, on CUDA the kernel where it is the faster way, else cuBLAS.


class Reduced(NamedTuple):
    """The arguments of the op: the operands, where the results go, and the slices, each field of all."""

    dy: Tensor
    xa: Tensor
    t: Tensor
    dbs: Sequence[Tensor]
    bs: Sequence[Tensor]
    starts: Sequence[int]
    scalings: Sequence[float]

    def slices(self) -> list[ReduceSlice]:
        """What the definition and the kernel take."""
        return [ReduceSlice(*one) for one in zip(self.starts, self.bs, self.scalings, strict=True)]


@torch.library.custom_op("fewbits::lora_reduce", mutates_args=("t", "dbs"))
@one_by_one
def _lora_reduce(o: Reduced) -> None:
    t, dbs = lora_reduce_ref(o.dy, o.xa, o.slices())
    for out, result in zip((o.t, *o.dbs), (t, *dbs), strict=True):
        out.copy_(result)


def _cuda_reduce(o: Reduced) -> None:
    tile = None
    if _fits(o.dy, o.xa, o.t) and len(o.bs) <= MAX_SLICES and len({b.dtype for b in o.bs}) == 1:
        widths, rank = tuple(b.shape[0] for b in o.bs), max(b.shape[1] for b in o.bs)
        tile = reduce_tile(o.dy.device, o.dy.shape[0], widths, rank)
    if tile is None:
        thin_products(o.dy, o.xa, o.t, o.dbs, o.slices())
    else:
        launch_reduce(o.dy, o.xa, o.slices(), o.t, o.dbs, tile)


_lora_reduce.register_kernel("cuda")(one_by_one(_cuda_reduce))


def thin_products(
    dy: Tensor, xa: Tensor, t: Tensor, dbs: Sequence[Tensor], slices: Sequence[ReduceSlice]
) -> None:
    """One after the other, by cuBLAS: t (M, R) of dy (M, N), and each of ``dbs`` (N_i, r_i) of xa (M, R)."""
    column, dy = 0, dy.to(xa.dtype) if dy.dtype == _E4M3 else dy
    for db, (start, b, scaling) in zip(dbs, slices, strict=True):
        part, at = dy[:, start : start + b.shape[0]], slice(column, column + b.shape[1])
        _scaled_product(part, b.to(dy.dtype), scaling, t[:, at])
        if db.dtype == dy.dtype:
            torch.mm(part.t(), xa[:, at].to(dy.dtype), out=db)
        else:
            db.copy_(part.t() @ xa[:, at].to(dy.dtype))
        column += b.shape[1]


def _scaled_product(left: Tensor, right: Tensor, scaling: float, out: Tensor) -> Tensor:
    if scaling == 1:
        return torch.mm(left, right, out=out)
    return torch.addmm(out, left, right, beta=0, alpha=scaling, out=out)


def _fits(wide: Tensor, *thin: Tensor) -> bool:
    """True if the kernels can read these: of one 16-bit dtype, the wide one also E4M3; rows contiguous."""
    dtype = thin[0].dtype
    return (
        dtype in KERNEL_DTYPES
        and wide.dtype in (dtype, _E4M3)
        and all(t.dtype == dtype for t in thin)
        and all(t.stride(1) == 1 and t.numel() > 0 for t in (wide, *thin))
    )


# 3. The public functions, for hand-written autograd nodes.


def lora_reduce(
    dy: Tensor, xa: Tensor, slices: Sequence[ReduceSlice], *, out: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """t (M, R) and the gradient of every B.

    Args:
        dy: (M, >= N), rows perhaps apart; may be E4M3, whose scale is then the caller's matter.
        xa: (M, R), ``s_i * x @ A_i^T`` side by side; rows perhaps apart.
        slices: for each linear with a branch, where its columns of dy begin, its B (N_i, r_i), and its s.
        out: where t goes, (M, R) in dy's dtype, rows perhaps apart; None makes it.

    Raises:
        BadInput: shapes do not fit.
    """
    M, R = dy.shape[0], sum(s.b.shape[1] for s in slices)
    t = xa.new_empty(M, R) if out is None and dy.dtype == _E4M3 else out
    t = dy.new_empty(M, R) if t is None else t
    ends = [s.start + s.b.shape[0] for s in slices]
    if not slices or xa.shape != (M, R) or t.shape != (M, R) or max(ends) > dy.shape[1]:
        raise BadInput(
            f"lora_reduce takes dy (M, {max(ends, default=1)} or more), xa and out (M, {R}) for these B; got "
            f"{tuple(dy.shape)}, {tuple(xa.shape)} and {tuple(t.shape)}."
        )
    dbs = [torch.empty(s.b.shape, dtype=s.b.dtype, device=s.b.device) for s in slices]
    starts, scalings = [s.start for s in slices], [float(s.scaling) for s in slices]
    run(_lora_reduce, _cuda_reduce, dy, Reduced(dy, xa, t, dbs, [s.b for s in slices], starts, scalings))
    return t, dbs


def lora_gradients(
    dy: Tensor, x: Tensor | None, xa: Tensor, slices: Sequence[ReduceSlice], *, out: Tensor | None = None
) -> LoRAGradients:
    """t, dA and every dB of linears side by side.

    Args:
        dy: as in `lora_reduce`.
        x: (M, K), the input of the linears; None where no A trains.
        xa: as in `lora_reduce`.
        slices: as in `lora_reduce`.
        out: as in `lora_reduce`.

    Raises:
        BadInput: shapes do not fit.
    """
    t, dbs = lora_reduce(dy, xa, slices, out=out)
    return LoRAGradients(t, None if x is None else t.t() @ x, dbs)
