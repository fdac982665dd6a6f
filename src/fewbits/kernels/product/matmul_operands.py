"""``y = activation(x) @ weight_operand(W)^T + b`` with a trained weight: all three products in few bits.

Shapes: x (..., K), W (N, K), b (N,), y (..., N); M is the number of rows of x.

* ``y  = activation(x) @ weight_operand(W)^T + b``          sums over K
* ``dx = gradient(dy) @ weight_operand(W^T)^T``             sums over N
* ``dW = gradient(dy^T) @ activation(x^T)^T``               sums over M
* ``db = sum of dy over rows``

An operand is rounded with its blocks along the axis that its product sums over, so x, W and dy are each
rounded twice, once along each axis, as Transformer Engine does. With a scale per tensor or per square block
both roundings agree. The roundings pass their gradient straight through. Kept for the backward pass: x and W
as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.formats.base import Format
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.product.matmul_packed import (
    PLAIN,
    Operands,
    backward_product,
    forward_product,
    product_dtype,
    round_operand,
)


class _OperandLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operands: Operands) -> Tensor:
        ctx.operands = operands
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return forward_product(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), operands)

    @staticmethod
    @once_differentiable("operand_linear with rounded operands", lambda ctx: ctx.operands != PLAIN)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias, _operands = ctx.needs_input_grad
        dx = dweight = dbias = None
        rows = rows_of(dy)
        if needs_dx:
            dx = backward_product(dy, weight.to(dy.dtype), ctx.operands)
        if needs_dweight:
            x_MK = rows_of(x)
            dweight = weight_gradient(rows, x_MK, ctx.operands).to(weight.dtype)
        if needs_dbias:
            dbias = rows.sum(0).to(ctx.bias_dtype)
        return dx, dweight, dbias, None


def weight_gradient(dy_MN: Tensor, x_MK: Tensor, operands: Operands) -> Tensor:
    """``dW = gradient(dy^T) @ activation(x^T)^T``, (N, K)."""
    dy_NM, x_KM = dy_MN.t(), x_MK.t()
    if operands.gradient is not None:
        dy_NM = round_operand(dy_NM.contiguous(), operands.gradient)
    if operands.activation is not None:
        x_KM = round_operand(x_KM.contiguous(), operands.activation)
    return dy_NM @ x_KM.t()


def operand_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_operand: Format | None = None,
    activation: Format | None = None,
    gradient: Format | None = None,
) -> Tensor:
    """A linear layer whose master weight stays as it is and whose products see operands of few bits.

    Args:
        x: (..., K) floating point.
        weight: (N, K) floating point, trained.
        bias: (N,) or None.
        weight_operand: format of the weight in the products for y and dx.
        activation: format of x in the products for y and dW.
        gradient: format of dy in the products for dx and dW.
    """
    operands = Operands(activation=activation, gradient=gradient, weight_operand=weight_operand)
    rows = rows_of(x.to(product_dtype(x)))  # so that what the function returns is no view
    y: Tensor = _OperandLinear.apply(rows, weight, bias, operands)
    return y.view(*x.shape[:-1], y.shape[-1])


def operand_linear_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, operands: Operands = PLAIN
) -> Tensor:
    """The forward definition; autograd derives the backward pass that takes the operands as they are.

    x is (..., K), ``weight`` (N, K), ``bias`` (N,); y is (..., N).
    """
    x = x + (round_operand(x, operands.activation) - x).detach()
    weight = weight + (round_operand(weight, operands.weight_operand) - weight).detach()
    return F.linear(x, weight, bias)
