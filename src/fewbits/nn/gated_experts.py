"""All of a layer's experts as one autograd node, where each is two products around a gated SiLU.

T rows of width H, P pairs of a row and an expert sorted by expert (`fewbits.nn.grouped.Table`), I inner
values; products, branches and names are those of `fewbits.nn.expert_products`:

    g_p = W1_e x_t + s1 B1_e A1_e x_t            z_p = silu(gate) * up of g_p            (P, 2 I), (P, I)
    o_p = W2_e z_p + s2 B2_e A2_e z_p            y_t = sum over the pairs of t: c_p o_p

Kept for the backward pass: the rows as they came, (T, H), g (P, 2 I), and the branches' few values. z and the
gradients of g and c come out of one kernel (`fewbits.kernels.decoder.gated_pairs`), which rounds them to E4M3
too where the next product takes that. The same numbers as `into_experts`, the activation and
`out_of_experts`, but for one rounding: c_p times what comes back is not rounded before the activation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.decoder.gated_pairs import gated_pairs, gated_pairs_backward
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.product.pair_outer import pair_outer
from fewbits.kernels.product.pair_sums import pair_sums
from fewbits.nn.expert_products import (
    Branch,
    Weights,
    as_peft_has_it,
    pair_products,
    pair_products_backward,
    through_b,
)
from fewbits.nn.grouped import Table


def gated_experts(
    x: Tensor, routing: Tensor, table: Table, first: tuple[Weights, Branch], last: tuple[Weights, Branch]
) -> Tensor:
    """Rows through their experts and back.

    Args:
        x: (T, H).
        routing: (T, k), what each of a row's experts is weighted with.
        table: of the pairs.
        first: gives (E, 2 I, H), gate and up one above the other, and its branch or `NO_BRANCH`.
        last: gives (E, H, I), and its branch.

    Returns:
        (T, H) in x's dtype, differentiable in x, routing and the branches.
    """
    (w1, branch1), (w2, branch2) = first, last
    call = _Call(table, w1, w2, branch1.scaling, branch2.scaling)
    tensors = (x, routing, branch1.a, branch1.b, branch2.a, branch2.b)
    if not torch.is_grad_enabled():
        return _compute(*tensors, call).y
    y: Tensor = _GatedExperts.apply(*tensors, call)  # type: ignore[no-untyped-call]
    return y


class _Call(NamedTuple):
    """What the node needs beside its differentiable tensors."""

    table: Table
    first: Weights
    last: Weights
    first_scaling: float
    last_scaling: float


class _Computed(NamedTuple):
    """What a forward pass makes: y (T, H), g (P, 2 I), and ``s A x`` of both branches (P, r)."""

    y: Tensor
    gate_up: Tensor
    first_inner: Tensor | None
    last_inner: Tensor | None


def _compute(
    x: Tensor,
    routing: Tensor,
    a1: Tensor | None,
    b1: Tensor | None,
    a2: Tensor | None,
    b2: Tensor | None,
    call: _Call,
) -> _Computed:
    """Shapes as in `gated_experts`; A (E, r, inputs) and B (E, outputs, r)."""
    table = call.table
    branch1, branch2 = Branch(a1, b1, call.first_scaling), Branch(a2, b2, call.last_scaling)
    gate_up, inner1 = pair_products(x, table.rows, call.first, branch1, table.ends)
    z, float8 = gated_pairs(gate_up, quantize=call.last.float8 is not None)
    pairs, inner2 = pair_products(z, None, call.last, branch2, table.ends, float8)
    return _Computed(pair_sums(pairs, table.inverse, routing), gate_up, inner1, inner2)


class _GatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.call = arguments
        x, routing, a1, b1, a2, b2 = tensors
        computed = _compute(x, routing, a1, b1, a2, b2, ctx.call)
        ctx.save_for_backward(*tensors, *computed[1:])
        return computed.y

    @staticmethod
    @once_differentiable("the experts of a layer")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, routing, a1, b1, a2, b2, gate_up, inner1, inner2 = ctx.saved_tensors
        table, first, last, scaling1, scaling2 = ctx.call
        needs_dx, needs_drouting, *needs = ctx.needs_input_grad[:6]
        branch1, branch2 = Branch(a1, b1, scaling1), Branch(a2, b2, scaling2)
        dy = dy.contiguous()
        I = gate_up.shape[1] // 2
        # of each pair's row, not weighted yet
        back = pair_products_backward(dy, table.rows, I, last, branch2, table.ends)
        trains2, quantize = back.dinner is not None and any(needs[2:]), first.float8 is not None and needs_dx
        through = gated_pairs_backward(
            back.dx, gate_up, routing, table.order, quantize=quantize, needs_z=trains2
        )
        dgate_up, da1, db1, da2, db2 = through.dgate_up, None, None, None, None
        if trains2:
            assert back.dinner is not None and through.z is not None
            weight = routing.reshape(-1)[table.order]
            da2 = pair_outer(back.dinner, through.z, table.ends, weights=weight).to(a2.dtype)
            db2 = pair_outer(inner2, dy, table.ends, rows=table.rows, weights=weight)
            db2 = as_peft_has_it(db2, b2.dtype)
        dx, dinner = None, None
        if needs_dx:
            H = x.shape[1]
            to_rows = pair_products_backward(dgate_up, None, H, first, branch1, table.ends, through.float8)
            dx, dinner = pair_sums(to_rows.dx, table.inverse), to_rows.dinner
        elif any(needs[:2]):
            dinner = through_b(dgate_up, branch1, table.ends)
        if dinner is not None and any(needs[:2]):
            da1 = pair_outer(dinner, x, table.ends, rows=table.rows).to(a1.dtype)
            db1 = as_peft_has_it(pair_outer(inner1, dgate_up, table.ends), b1.dtype)
        return dx, through.drouting if needs_drouting else None, da1, db1, da2, db2, None


__all__ = ["gated_experts"]
