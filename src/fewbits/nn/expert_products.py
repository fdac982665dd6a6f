"""The two products of a layer of experts as autograd nodes: into the inner values, and out of them.

T rows of width H, P pairs of a row and an expert sorted by expert (`fewbits.nn.grouped.Table`), I' inner
values before the activation and I after it; A (E, r, inputs), B (E, outputs, r) and s an adapter's matrices
and scaling, r its rank.

Into the inner values, for the pair p of row t and expert e:

    y_p = W_e x_t + s B_e A_e x_t                                    dx_t = sum of dX_p over the pairs of t

Kept for the backward pass: the rows as they came, (T, H), and s A x (P, r). They are spread to pairs once
more there, which takes less time than P H values take room.

Out of them, with z_p the inner values, c_p the weight that routing gives the pair and b the host's bias:

    o_p = W_e z_p + s B_e A_e z_p + b_e        y_t = sum over the pairs of t: c_p o_p

The gradient of c_p is <o_p, dy_t>. With u_p = (W_e + s B_e A_e)^T dy_t, which the backward pass computes in
any case, it is <z_p, u_p> + <b_e, dy_t>, and that of z_p is c_p u_p: so o (P, H) need not be kept.

A branch as three operations of its own would write and read P outputs twice more. So B is written beside the
decoded weight, where the weight can be decoded with room (`Weights.with_room`), and s A x beside x
(`fewbits.kernels.product.pair_inputs`):

    W x + B (s A x)  =  [ W | B ] [ x ; s A x ]          one product, forward
    [ W | B ]^T dy   =  [ W^T dy ; B^T dy ]              one product, backward; the second part goes to A

and what A then gives back, A^T (s B^T dy), is added to the first part in place
(`fewbits.kernels.product.pair_low_rank`). Gradients of A and B are sums of outer products over
each expert's pairs (`pair_outer`).

With both operands in E4M3 (`Weights.float8`; rows under a scale each, a weight under one) a kernel finds the
row of each pair and adds the branch to the product itself, in both passes (`grouped_float8`): then neither
rows of pairs nor B beside W nor A^T (s B^T dy) are written.

Weights are decoded for each pass, unless the layer keeps them. Branches are computed in the products' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.product.expert_matrices import expert_matrices
from fewbits.kernels.product.grouped_float8 import MAX_RANK as MAX_FLOAT8_RANK
from fewbits.kernels.product.grouped_float8 import grouped_float8
from fewbits.kernels.product.pair_gradients import pair_gradients
from fewbits.kernels.product.pair_inputs import MAX_RANK, pair_inner, pair_inputs
from fewbits.kernels.product.pair_low_rank import MAX_RANK as MAX_LOW_RANK
from fewbits.kernels.product.pair_low_rank import pair_low_rank
from fewbits.kernels.product.pair_outer import pair_outer
from fewbits.kernels.product.pair_sums import pair_sums
from fewbits.nn.grouped import Table, grouped

_MOST_BYTES = 2 * MAX_FLOAT8_RANK  # of a pair's inner values that the kernel adds: in float32 half as many
_ALIGNED = 8  # values of which a row's length is a multiple where it holds a branch as well


def _no_room(columns: int) -> None:
    return None


Float8Rows = tuple[Tensor, Tensor] | None  # rows in E4M3 and their scales, where they are made already


class Weights(NamedTuple):
    """Where a product's matrices come from, in the products' dtype.

    Attributes:
        whole: gives (E, outputs, inputs), decoded or kept.
        with_room: gives (E, outputs, inputs + columns, or more), whose last columns hold nothing and may
            be written; or None where the weight cannot be decoded so.
        float8: gives E4M3 values (E, outputs, inputs), or turned (E, inputs, outputs), and their one scale;
            None where products take no such operands.
        few: multiplies pairs of tokens (T, K) and their rows (P,), or without rows (P, K), that end at (E,):
            (P, outputs), without decoded matrices; for a few pairs, where no gradient is asked for.
    """

    whole: Callable[[], Tensor]
    with_room: Callable[[int], Tensor | None] = _no_room
    float8: Callable[[bool], tuple[Tensor, Tensor]] | None = None
    few: Callable[[Tensor, Tensor | None, Tensor], Tensor] | None = None


class Branch(NamedTuple):
    """An adapter: ``s * B A`` beside each expert's weight."""

    a: Tensor | None  # (E, r, inputs)
    b: Tensor | None  # (E, outputs, r)
    scaling: float


NO_BRANCH = Branch(None, None, 0.0)


def into_experts(x: Tensor, table: Table, weights: Weights, branch: Branch) -> Tensor:
    """Rows (T, H) to each pair's inner values (P, I'), in x's dtype; differentiable in x and the branch."""
    y: Tensor = _Into.apply(x, branch.a, branch.b, _Call(branch.scaling, table, weights))  # type: ignore[no-untyped-call]
    return y


def out_of_experts(
    z: Tensor, routing: Tensor, bias: Tensor | None, table: Table, weights: Weights, branch: Branch
) -> Tensor:
    """Inner values (P, I) and routing weights (T, k) to rows (T, H), in z's dtype.

    Args:
        z: (P, I), sorted by expert.
        routing: (T, k), what each of a row's experts is weighted with.
        bias: (E, H) or None.
        table: of the pairs.
        weights: gives (E, H, I).
        branch: of rank r, or `NO_BRANCH`.

    Returns:
        (T, H), differentiable in z, routing, bias and the branch.
    """
    a, b, scaling = branch
    call = _Call(scaling, table, weights)
    y: Tensor = _OutOf.apply(z, routing, bias, a, b, call)  # type: ignore[no-untyped-call]
    return y


class _Call(NamedTuple):
    """What a product needs beside its differentiable tensors."""

    scaling: float
    table: Table
    weights: Weights


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor | None, b: Tensor | None, call: _Call) -> Tensor:
        scaling, table, weights = ctx.call = call
        y, inner = pair_products(x, table.rows, weights, Branch(a, b, scaling), table.ends)
        ctx.save_for_backward(x, a, b, inner)
        return y

    @staticmethod
    @once_differentiable("the product of experts")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, inner = ctx.saved_tensors
        scaling, table, weights = ctx.call
        needs_dx, needs_da, needs_db, _call = ctx.needs_input_grad
        branch, dx = Branch(a, b, scaling), None
        if needs_dx:
            through = pair_products_backward(dy, None, x.shape[1], weights, branch, table.ends)
            dx, dinner = pair_sums(through.dx, table.inverse), through.dinner
        else:
            dinner = through_b(dy, branch, table.ends)
        da = db = None
        if dinner is not None and (needs_da or needs_db):
            da = pair_outer(dinner, x, table.ends, rows=table.rows).to(a.dtype)
            db = as_peft_has_it(pair_outer(inner, dy, table.ends), b.dtype)
        return dx, da, db, None


class _OutOf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        routing: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        call: _Call,
    ) -> Tensor:
        scaling, table, weights = ctx.call = call
        pairs, inner = pair_products(z, None, weights, Branch(a, b, scaling), table.ends)
        if bias is not None:
            pairs += bias.to(pairs.dtype)[table.experts]
        ctx.save_for_backward(z, routing, bias, a, b, inner)
        return pair_sums(pairs, table.inverse, routing)

    @staticmethod
    @once_differentiable("the product of experts")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        z, routing, bias, a, b, inner = ctx.saved_tensors
        scaling, table, weights = ctx.call
        needs_dz, needs_drouting, needs_dbias, needs_da, needs_db, _call = ctx.needs_input_grad
        # dy of each pair's row, not weighted yet
        through = pair_products_backward(
            dy, table.rows, z.shape[1], weights, Branch(a, b, scaling), table.ends
        )
        weight = routing.reshape(-1)[table.order]
        dz, dweight = pair_gradients(z, through.dx, weight)
        da = db = dbias = drouting = None
        if through.dinner is not None and (needs_da or needs_db):
            da = pair_outer(through.dinner, z, table.ends, weights=weight).to(a.dtype)
            db = pair_outer(inner, dy, table.ends, rows=table.rows, weights=weight)
            db = as_peft_has_it(db, b.dtype)
        if needs_drouting:
            if bias is not None:
                dweight = dweight + (dy[table.rows] * bias.to(dy.dtype)[table.experts]).sum(1)
            drouting = dweight[table.inverse].to(routing.dtype)
        if bias is not None and needs_dbias:
            weighted = (dy[table.rows] * weight[:, None]).to(bias.dtype)
            dbias = torch.zeros_like(bias).index_add_(0, table.experts, weighted)
        return dz if needs_dz else None, drouting, dbias, da, db, None


def as_peft_has_it(db: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient (E, r, outputs) of B as (E, outputs, r), in memory as PEFT's matrix (outputs, r E) lies.

    So the views that lead back to that matrix copy nothing.
    """
    return expert_matrices(db.permute(2, 1, 0), dtype=dtype).permute(2, 0, 1)


def _with_branch(weights: Weights, branch: Branch, K: int) -> Tensor | None:
    """``[W | B]`` (E, outputs, K + r and some zeros), for inputs of K values; None without either."""
    if branch.a is None or branch.b is None:
        return None
    r = branch.b.shape[2]
    room = -(-r // _ALIGNED) * _ALIGNED
    beside = None if room > MAX_RANK else weights.with_room(room)
    if beside is not None:
        expert_matrices(branch.b, out=beside[:, :, K : K + r])
        if beside.shape[2] > K + r:
            beside[:, :, K + r :].zero_()
    return beside


def pair_products(
    x: Tensor,
    rows: Tensor | None,
    weights: Weights,
    branch: Branch,
    ends: Tensor,
    float8: Float8Rows = None,
) -> tuple[Tensor, Tensor | None]:
    """Products and branch of pairs: (P, outputs), and ``s A x`` (P, r).

    x is (P, K), or (T, K) with ``rows`` (P,), the row of each pair; ``float8`` what its producer made of it.
    """
    if weights.float8 is not None:
        inner, b = None, None
        if branch.a is not None and branch.b is not None:
            inner = pair_inner(x, branch.a, ends, rows=rows, scaling=branch.scaling)
            b = expert_matrices(branch.b, dtype=x.dtype)
        return _float8_product(x, rows, weights.float8(False), (inner, b), ends, float8), inner
    beside = None if weights.few is not None else _with_branch(weights, branch, x.shape[1])
    if beside is not None:
        assert branch.a is not None
        room = beside.shape[2] - x.shape[1]
        wide, inner = pair_inputs(x, branch.a, ends, rows=rows, scaling=branch.scaling, room=room)
        return grouped(wide, beside, ends), inner
    has_branch = branch.a is not None and branch.b is not None
    y = None if weights.few is None else weights.few(x, rows, ends)
    if y is not None and not has_branch:
        return y, None
    x = x if rows is None else x[rows]
    y = grouped(x, weights.whole(), ends) if y is None else y
    if branch.a is None or branch.b is None:
        return y, None
    inner = grouped(x, branch.a.to(x.dtype), ends).mul_(branch.scaling)
    return y.add_(grouped(inner, branch.b.to(x.dtype), ends)), inner


class Through(NamedTuple):
    """What comes back through an expert's matrix and its branch.

    Attributes:
        dx: (P, inputs), through the matrix and the branch.
        dinner: (P, r), ``s B^T dy``.
    """

    dx: Tensor
    dinner: Tensor | None


def pair_products_backward(
    dy: Tensor,
    rows: Tensor | None,
    K: int,
    weights: Weights,
    branch: Branch,
    ends: Tensor,
    float8: Float8Rows = None,
) -> Through:
    """``W^T dy`` and ``s A^T B^T dy`` for K inputs.

    dy is (P, outputs), or (T, outputs) with ``rows`` (P,), the row of each pair; ``float8`` what its producer
    made of it.
    """
    if weights.float8 is not None:
        dinner, a = None, None
        if branch.a is not None and branch.b is not None:
            b = expert_matrices(branch.b.transpose(1, 2), dtype=dy.dtype)
            dinner = pair_inner(dy, b, ends, rows=rows, scaling=branch.scaling)
            a = branch.a.to(dy.dtype).transpose(1, 2)
        dx = _float8_product(dy, rows, weights.float8(True), (dinner, a), ends, float8)
        return Through(dx, dinner)
    dy = dy if rows is None else dy[rows]
    beside = _with_branch(weights, branch, K)
    if beside is None:
        dx, dinner = grouped(dy, weights.whole().transpose(1, 2), ends), through_b(dy, branch, ends)
    else:
        assert branch.b is not None
        both = grouped(dy, beside.transpose(1, 2), ends)
        dx, dinner = both[:, :K], both[:, K : K + branch.b.shape[2]] * branch.scaling
    if dinner is None or branch.a is None:
        return Through(dx, dinner)
    if branch.a.shape[1] <= MAX_LOW_RANK:
        return Through(pair_low_rank(dx, dinner, branch.a, ends), dinner)
    return Through(dx.add_(grouped(dinner, branch.a.to(dy.dtype).transpose(1, 2), ends)), dinner)


def _float8_product(
    x: Tensor,
    rows: Tensor | None,
    weight: tuple[Tensor, Tensor],
    branch: tuple[Tensor | None, Tensor | None],
    ends: Tensor,
    float8: Float8Rows = None,
) -> Tensor:
    """Pairs' products (P, outputs) in E4M3, plus a branch t (P, r) and b (E, outputs, r), if it has one.

    x is (P, inputs), or (T, inputs) with ``rows`` (P,); the weight is (E, outputs, inputs) and its scale.
    """
    q, scale = float8 or quantize_rows(x)
    t, b = branch
    if t is None or b is None:
        return grouped_float8(q, scale, *weight, ends, rows=rows, dtype=x.dtype)
    if t.shape[1] * x.element_size() > _MOST_BYTES:
        y = grouped_float8(q, scale, *weight, ends, rows=rows, dtype=x.dtype)
        return y.add_(grouped(t, b, ends))
    return grouped_float8(q, scale, *weight, ends, rows=rows, branch=(t, b), dtype=x.dtype)


def through_b(dy: Tensor, branch: Branch, ends: Tensor) -> Tensor | None:
    """``s B^T dy``: (P, outputs) to (P, r)."""
    if branch.b is None:
        return None
    return grouped(dy, branch.b.to(dy.dtype).transpose(1, 2), ends).mul_(branch.scaling)


__all__ = [
    "NO_BRANCH",
    "Branch",
    "Through",
    "Weights",
    "as_peft_has_it",
    "into_experts",
    "out_of_experts",
    "pair_products",
    "pair_products_backward",
    "through_b",
]
