"""The two products of a layer of experts as autograd nodes: into the inner values, and out of them.

T rows of width H, P pairs of a row and an expert sorted by expert (`fewbits.nn.grouped.Table`), I' inner
values before the activation and I after it; A (E, r, inputs), B (E, outputs, r) and s an adapter's matrices
and scaling, r its rank.

Into the inner values, for the pair p of row t and expert e:

    y_p = W_e x_t + s B_e A_e x_t                                    dx_t = sum of dX_p over the pairs of t

Kept for the backward pass: the rows as they came, (T, H), and A x (P, r). They are spread to pairs once more
there, which takes less time than P H values take room.

Out of them, with z_p the inner values, c_p the weight that routing gives the pair and b the host's bias:

    o_p = W_e z_p + s B_e A_e z_p + b_e        y_t = sum over the pairs of t: c_p o_p

The gradient of c_p is <o_p, dy_t>. With u_p = (W_e + s B_e A_e)^T dy_t, which the backward pass computes in
any case, it is <z_p, u_p> + <b_e, dy_t>, and that of z_p is c_p u_p: so o (P, H) need not be kept.

Weights are decoded for each pass, unless `Weights` keeps them. Branches are computed in the products' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.nn.grouped import Table, grouped, grouped_outer, sum_rows

Weights = Callable[[], Tensor]  # gives (E, outputs, inputs) in the products' dtype, decoded or kept


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
        pairs = x[table.rows]
        y, inner = _forward(pairs, weights(), Branch(a, b, scaling), table.ends)
        ctx.save_for_backward(x, a, b, inner)
        return y

    @staticmethod
    @once_differentiable("the product of experts")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, inner = ctx.saved_tensors
        scaling, table, weights = ctx.call
        ends, branch = table.ends, Branch(a, b, scaling)
        dinner = _through_b(dy, branch, ends)
        da = db = dx = None
        if dinner is not None and (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            da = grouped_outer(dinner, x[table.rows], ends).to(a.dtype)
            db = grouped_outer(dy * scaling, inner, ends).to(b.dtype)
        if ctx.needs_input_grad[0]:
            dx = sum_rows(_backward(dy, dinner, weights(), branch, ends), table.inverse)
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
        pairs, inner = _forward(z, weights(), Branch(a, b, scaling), table.ends)
        if bias is not None:
            pairs += bias.to(pairs.dtype)[table.experts]
        ctx.save_for_backward(z, routing, bias, a, b, inner)
        return sum_rows(pairs, table.inverse, routing)

    @staticmethod
    @once_differentiable("the product of experts")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        z, routing, bias, a, b, inner = ctx.saved_tensors
        scaling, table, weights = ctx.call
        branch = Branch(a, b, scaling)
        pairs = dy[table.rows]  # dy of each pair's row, not weighted yet
        dinner = _through_b(pairs, branch, table.ends)
        u = _backward(pairs, dinner, weights(), branch, table.ends)
        weight = routing.reshape(-1)[table.order, None]
        da = db = dbias = None
        if inner is not None and (ctx.needs_input_grad[3] or ctx.needs_input_grad[4]):
            da = grouped_outer((dinner * weight).to(z.dtype), z, table.ends).to(a.dtype)
            db = grouped_outer(pairs, (inner * (weight * scaling)).to(z.dtype), table.ends).to(b.dtype)
        drouting = None
        if ctx.needs_input_grad[1]:
            drouting = (z * u).sum(1, dtype=torch.promote_types(z.dtype, torch.float32))
            if bias is not None:
                drouting += (pairs * bias.to(pairs.dtype)[table.experts]).sum(1)
            drouting = drouting[table.inverse].to(routing.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = torch.zeros_like(bias).index_add_(0, table.experts, (pairs * weight).to(bias.dtype))
        dz = (u * weight).to(z.dtype) if ctx.needs_input_grad[0] else None
        return dz, drouting, dbias, da, db, None


def _forward(x: Tensor, weight: Tensor, branch: Branch, ends: Tensor) -> tuple[Tensor, Tensor | None]:
    """Products and branch of pairs (P, inputs): (P, outputs), and A x (P, r)."""
    y = grouped(x, weight, ends)
    if branch.a is None or branch.b is None:
        return y, None
    inner = grouped(x, branch.a.to(x.dtype), ends)
    return y.add_(grouped(inner, branch.b.to(x.dtype), ends), alpha=branch.scaling), inner


def _through_b(dy: Tensor, branch: Branch, ends: Tensor) -> Tensor | None:
    """``s B^T dy``: (P, outputs) to (P, r)."""
    if branch.b is None:
        return None
    return grouped(dy, branch.b.to(dy.dtype).transpose(1, 2), ends).mul_(branch.scaling)


def _backward(dy: Tensor, dinner: Tensor | None, weight: Tensor, branch: Branch, ends: Tensor) -> Tensor:
    """``(W + s B A)^T dy``: (P, outputs) to (P, inputs)."""
    dx = grouped(dy, weight.transpose(1, 2), ends)
    if dinner is not None and branch.a is not None:
        dx += grouped(dinner, branch.a.to(dy.dtype).transpose(1, 2), ends)
    return dx


__all__ = ["NO_BRANCH", "Branch", "Weights", "into_experts", "out_of_experts"]
