"""Linears side by side over one input, with their LoRA branches: the products of the fused decoder's nodes.

    y = x @ [W_1; W_2; ...]^T + b     + for each part    s * (x @ A_i^T) @ B_i^T

                 x     (M, K)      M rows of tokens, K inputs
    part i:      W_i   (N_i, K)    packed, or dense
                 b_i   (N_i,)      bias, or none
                 A_i   (r_i, K)    the branch: r_i is its rank, s_i its scaling
                 B_i   (N_i, r_i)
    together:    y     (M, N)      N the sum of N_i; part i owns the columns `slices()[i]`
                 xa    (M, R)      R the sum of r_i: s_i * x @ A_i^T, side by side, kept for the backward pass

Backward, for dy (M, N):

    t_i  = s_i * dy_i @ B_i        (M, r_i)   all side by side t (M, R)
    dB_i = dy_i^T @ xa_i           (N_i, r_i) read together with t in one pass over dy (`lora_reduce`)
    dA   = t^T @ x                 (R, K)     its rows are the dA_i
    dW_i = dy_i^T @ x              (N_i, K)   only for a weight that trains
    db_i = sum of dy_i over rows   (N_i,)
    dx   = dy @ W + t @ A          (M, K)

This file has all of that but the two products with W, which depend on how W is held. The halves take shorter
ways where they can: dA of a projection behind a norm is `gradient_of_a` in both_halves.py, and in the MLP
one kernel (kernels/decoder/gated_lora_backward.py) gives dB of gate and up and dA of down. The products with
W are three classes in `fewbits.decoder.products`, and a projection is exactly one of them:

    DenseProjection     W is packed, or dense, and is multiplied in x's dtype; branches stand beside it
    RoundedProjection   W is dense and trains towards a format (quantisation-aware training): W + s B A is
                        rounded as one matrix in each product, so no branch stands beside it
    Float8Projection    both operands are E4M3 values under scales; branches stand beside it, in x's dtype

What may train is named, not counted: `tensors`, the needs for gradients and `gradients` are one
`PerPart` (weight, bias, a, b) for each part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fewbits.decoder.trainable import PerPart
from fewbits.formats.base import Format, Packed
from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.low_rank_add import low_rank_add_
from fewbits.kernels.product.lora_reduce import ReduceSlice, lora_reduce

_ALIGNED = 64  # values between matrices that lie in one buffer: a multiple of 16 bytes in any dtype


class Rows(NamedTuple):
    """The rows of a product: dense (M, K), and in float8 also E4M3 values (M, K) with a scale (M, 1) each.

    Dense rows may be absent where only the float8 ones are needed.

    Attributes:
        one_scale: (1,), where all rows have the same scale.
        dtype: of the product, where there are no dense rows; with them it is theirs.
    """

    dense: Tensor | None
    values: Tensor | None = None
    scale: Tensor | None = None
    one_scale: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def product_dtype(self) -> torch.dtype:
        """What the product comes out in."""
        return self.dtype if self.dense is None else self.dense.dtype


@dataclass(frozen=True)
class Branch:
    """A low-rank branch: ``scaling * (x @ a^T) @ b^T`` with a (r, K) and b (N, r).

    It belongs to one pass, from the forward products to the backward ones. Adapters are mostly kept in
    float32 and multiplied in 16 bits: the 16 bits are written once for the pass, two bytes a value.
    """

    a: Tensor
    b: Tensor
    scaling: float

    def b_in(self, dtype: torch.dtype) -> Tensor:
        """b (N, r) in the dtype of a product."""
        if self.b.dtype == dtype:
            return self.b
        b: Tensor | None = self.__dict__.get("_b")
        if b is None or b.dtype != dtype:
            b = self.__dict__["_b"] = self.b.detach().to(dtype)
        return b


@dataclass(frozen=True)
class Part:
    """One linear: its weight (N, K), packed or dense, a bias (N,) and a branch where it has them."""

    weight: Packed | Tensor
    bias: Tensor | None = None
    branch: Branch | None = None

    @property
    def width(self) -> int:
        """N, its number of outputs."""
        return int(self.weight.shape[0])


@dataclass(frozen=True)
class RoundedPart(Part):
    """A linear under quantisation-aware training.

    Its dense weight and its branch are added and rounded to ``rounding`` as one matrix in each product;
    gradients pass straight through.
    """

    weight: Tensor
    rounding: Format = field(kw_only=True)


class InnerGradients(NamedTuple):
    """What the branches' gradients are made of.

    Attributes:
        t: (M, R), ``s_i * dy_i @ B_i`` side by side; None without branches.
        db: for each branch dB (N_i, r_i).
    """

    t: Tensor | None
    db: list[Tensor]


@dataclass(frozen=True)
class Projection(ABC):
    """Linears side by side; see the module's text.

    Attributes:
        parts: the linears, in the order of their outputs.
    """

    parts: tuple[Part, ...]
    is_float8: ClassVar[bool] = False  # its products take float8 operands
    branches_beside: ClassVar[bool] = True  # else a branch is part of the weight that is multiplied by

    @cached_property
    def width(self) -> int:
        """N, the sum of all parts' outputs."""
        return sum(part.width for part in self.parts)

    @cached_property
    def depth(self) -> int:
        """K, the number of inputs."""
        return int(self.parts[0].weight.shape[1])

    @cached_property
    def rank(self) -> int:
        """R, the sum of the branches' ranks."""
        return sum(part.branch.a.shape[0] for part in self.parts if part.branch is not None)

    def tensors(self) -> list[PerPart[Tensor | None]]:
        """What may train: dense weight (N_i, K), bias (N_i,), a (r_i, K), b (N_i, r_i) of each part."""
        per_part: list[PerPart[Tensor | None]] = []
        for part in self.parts:
            weight = part.weight if isinstance(part.weight, Tensor) else None
            a, b = (None, None) if part.branch is None else (part.branch.a, part.branch.b)
            per_part.append(PerPart(weight, part.bias, a, b))
        return per_part

    @cached_property
    def branches(self) -> list[Branch]:
        """The branches of the parts that have one."""
        return [part.branch for part in self.parts if part.branch is not None]

    def all_a(self, dtype: torch.dtype) -> Tensor:
        """Every branch's a below the other (R, K), in the dtype of a product; written once for a pass."""
        a: Tensor | None = self.__dict__.get("_all_a")
        if a is None or a.dtype != dtype:
            a = side_by_side([branch.a.detach() for branch in self.branches], dtype)
            self.__dict__["_all_a"] = a
        return a

    def bias(self) -> Tensor | None:
        """The biases side by side (N,), zeros for a part without one; None if no part has one."""
        biases = [part.bias for part in self.parts]
        like = next((b for b in biases if b is not None), None)
        if like is None or len(biases) == 1:
            return like
        return torch.cat(
            [like.new_zeros(p.width) if b is None else b for p, b in zip(self.parts, biases, strict=True)]
        )

    def slices(self) -> tuple[slice, ...]:
        """The columns of y that belong to each part."""
        return self._slices

    @cached_property
    def _slices(self) -> tuple[slice, ...]:
        ends = tuple(accumulate((part.width for part in self.parts), initial=0))
        return tuple(slice(*of_part) for of_part in pairwise(ends))

    # 1. Forward.

    @abstractmethod
    def product(self, x: Rows) -> Tensor:
        """``x @ W^T`` (M, N) for rows (M, K), without biases and branches."""

    def branch_inputs(self, x: Tensor) -> Tensor | None:
        """``xa`` (M, R), the branches' inner values with their scaling; None without branches."""
        branches = self.branches
        if not branches:
            return None
        scalings = {branch.scaling for branch in branches}
        a = self.all_a(x.dtype)  # (R, K)
        scaling = scalings.pop() if len(scalings) == 1 else None
        if scaling is not None:
            return _scaled_mm(x, a.t(), scaling)  # (M, K) @ (K, R): xa (M, R), scaled in the product
        xa = x @ a.t()  # (M, K) @ (K, R): (M, R)
        for branch, columns in zip(branches, _columns(branches), strict=True):
            xa[:, columns].mul_(branch.scaling)  # (M, r_i) each
        return xa

    def low_rank(self, xa: Tensor | None) -> list[LowRank | None]:
        """For each part what a kernel adds to its outputs; None where it has no branch beside its weight.

        xa is (M, R), the inner values of all branches; part i adds ``xa_i @ b_i^T`` (M, N_i).
        """
        branches: list[LowRank | None] = []
        start = 0
        for part in self.parts:
            if part.branch is None or xa is None or not self.branches_beside:
                branches.append(None)
                continue
            r = part.branch.a.shape[0]
            # Of shapes (M, r_i) and (N_i, r_i).
            branches.append(LowRank(xa[:, start : start + r], part.branch.b_in(xa.dtype)))
            start += r
        return branches

    def add_biases_(self, y: Tensor) -> Tensor:
        """Add the biases to ``y`` (M, N), in place."""
        for part, at in zip(self.parts, self.slices(), strict=True):
            if part.bias is not None:
                y[:, at].add_(part.bias.to(y.dtype))  # (M, N_i) + (N_i,)
        return y

    def finish_(self, y: Tensor, xa: Tensor | None, residual: Tensor | None) -> Tensor:
        """Add biases, branches and ``residual`` (M, N) to the product ``y`` (M, N), in place."""
        for branch, at in zip(self.low_rank(xa), self.slices(), strict=True):
            if branch is not None or residual is not None:
                low_rank_add_(y[:, at], branch, None if residual is None else residual[:, at])
        return self.add_biases_(y)

    # 2. Backward.

    @property
    def has_room_beside(self) -> bool:
        """Whether t lies beside dy and A below W, so that ``dy @ W + t @ A`` is one product."""
        return False

    def gradient_buffer(self, M: int, like: Tensor) -> Tensor:
        """Where dy is best written: (M, N), as the left part of rows that have room for t."""
        extra = self.rank if self.has_room_beside else 0
        return like.new_empty(M, self.width + extra)[:, : self.width]

    def inner_gradients(self, dy: Rows, xa: Tensor | None) -> InnerGradients:
        """t (M, R), beside dy where `gradient_buffer` left room, and every dB, for dy (M, N), xa (M, R)."""
        if xa is None:
            return InnerGradients(None, [])
        slices = [
            ReduceSlice(at.start, part.branch.b, part.branch.scaling)
            for part, at in zip(self.parts, self.slices(), strict=True)
            if part.branch is not None
        ]
        if dy.dense is not None:
            return InnerGradients(*lora_reduce(dy.dense, xa, slices, out=self.inner_buffer(dy.dense)))
        # The values as they are, their one scale afterwards.
        assert dy.values is not None and dy.one_scale is not None
        t, dbs = lora_reduce(dy.values, xa, slices, out=torch.empty_like(xa))  # t (M, R), each dB (N_i, r_i)
        for gradient in (t, *dbs):
            gradient.mul_(dy.one_scale)
        return InnerGradients(t, dbs)

    def inner_buffer(self, dy: Tensor) -> Tensor:
        """Where t (M, R) is best written: beside dy, if `gradient_buffer` left room for it."""
        if self.has_room_beside and dy.stride(0) == self.width + self.rank:
            return dy.as_strided((dy.shape[0], self.rank), dy.stride(), dy.storage_offset() + self.width)
        return dy.new_empty(dy.shape[0], self.rank)

    def gradients(
        self,
        dy: Tensor | None,
        inner: InnerGradients,
        x: Tensor | None,
        needs: Sequence[PerPart[bool]],
        *,
        da: Tensor | None = None,
    ) -> list[PerPart[Tensor | None]]:
        """The gradients of `tensors`, in their dtypes; None where none is needed.

        Args:
            dy: (M, N); may be absent where no weight and no bias trains.
            inner: what `inner_gradients` gave.
            x: (M, K) the rows of the forward product; may be absent where no weight and no A trains.
            needs: which of `tensors` need a gradient.
            da: (R, K), the gradient of all A's, where it is known already.
        """
        per_part: list[PerPart[Tensor | None]] = []
        (t, dbs), start = inner, 0
        of_b = iter(dbs)
        if da is None and t is not None and x is not None and any(need.a for need in needs):
            da = t.t() @ x  # (R, M) @ (M, K): every dA below the other, (R, K)
        dtypes = {branch.a.dtype for branch in self.branches}
        if da is not None and len(dtypes) == 1:
            da = da.to(dtypes.pop())  # all at once
        for part, at, need in zip(self.parts, self.slices(), needs, strict=True):
            of_part: PerPart[Tensor | None] = PerPart(None, None, None, None)
            per_part.append(of_part)
            if need.weight and isinstance(part.weight, Tensor):
                assert x is not None and dy is not None
                of_part.weight = (dy[:, at].t() @ x).to(part.weight.dtype)  # (N_i, M) @ (M, K)
            if need.bias and part.bias is not None:
                assert dy is not None
                of_part.bias = dy[:, at].sum(0, dtype=torch.float32).to(part.bias.dtype)
            if part.branch is None:
                continue
            end = start + part.branch.a.shape[0]
            if need.a:
                assert da is not None
                of_part.a = da[start:end].to(part.branch.a.dtype)  # (r_i, K)
            db = next(of_b)
            if need.b:
                of_part.b = db  # (N_i, r_i)
            start = end
        return per_part

    def outside(self, t: Tensor | None) -> Tensor | None:
        """What of t (M, R) is still to be added to dx: nothing where branches are part of the weights."""
        return t if self.branches_beside else None

    @abstractmethod
    def backward_product(self, dy: Rows, t: Tensor | None) -> Tensor:
        """``dx = dy @ W + t @ A`` (M, K).

        Args:
            dy: (M, N); in float8 by row if it is not in float8 yet.
            t: (M, R) from `inner_gradients`; None without branches, or where its part is added elsewhere.
        """


def write_adapters(projections: Sequence[Projection], dtype: torch.dtype) -> None:
    """Write all branches in ``dtype`` at once, for this pass: `all_a` and `b_in` find them.

    A layer with adapters on all seven linears would otherwise take fourteen launches for it.
    """
    beside = [projection for projection in projections if projection.branches_beside and projection.branches]
    matrices = [matrix for p in beside for branch in p.branches for matrix in (branch.a, branch.b)]
    if not matrices or any(type(m) not in (Tensor, nn.Parameter) or m.dtype == dtype for m in matrices):
        return
    if len({m.device for m in matrices}) > 1:
        return
    with torch.no_grad():
        sizes = [[p.rank * p.depth, *(branch.b.numel() for branch in p.branches)] for p in beside]
        aligned = [-(-size // _ALIGNED) * _ALIGNED for of_projection in sizes for size in of_projection]
        flat = torch.empty(sum(aligned), dtype=dtype, device=matrices[0].device)  # all A's and B's in a row
        pieces, targets, sources = iter(flat.split(aligned)), [], []
        for projection in beside:
            a = next(pieces)[: projection.rank * projection.depth].view(projection.rank, projection.depth)
            projection.__dict__["_all_a"] = a
            targets += a.split([branch.a.shape[0] for branch in projection.branches])
            sources += [branch.a for branch in projection.branches]
            for branch in projection.branches:
                b = branch.__dict__["_b"] = next(pieces)[: branch.b.numel()].view(branch.b.shape)
                targets.append(b)
                sources.append(branch.b)
        torch._foreach_copy_(targets, sources)


def side_by_side(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rows of all ``matrices`` (r_i, K) in one (R, K), in ``dtype``."""
    if len(matrices) == 1:
        return matrices[0].to(dtype)
    if len({m.dtype for m in matrices}) == 1:
        return torch.cat(list(matrices)).to(dtype)  # two launches, however many there are
    return torch.cat([m.to(dtype) for m in matrices])


def _columns(branches: Sequence[Branch]) -> list[slice]:
    slices, start = [], 0
    for branch in branches:
        slices.append(slice(start, start + branch.a.shape[0]))
        start += branch.a.shape[0]
    return slices


def _scaled_mm(x: Tensor, w: Tensor, scaling: float, out: Tensor | None = None) -> Tensor:
    """``scaling * x @ w``, the scaling taken before the one rounding."""
    out = x.new_empty(x.shape[0], w.shape[1]) if out is None else out
    if scaling == 1:
        return torch.mm(x, w, out=out)
    return torch.addmm(out, x, w, beta=0, alpha=scaling, out=out)
