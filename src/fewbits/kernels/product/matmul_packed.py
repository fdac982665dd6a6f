"""``y = x @ dequantize(W)^T + b`` for a weight that is stored packed, whatever its format.

Shapes: x (..., K), W (N, K) packed, b (N,), y (..., N).

With formats for the operands of the product (each may be absent, then the operand is taken as it is):

* forward: ``y = activation(x) @ weight_operand(W)^T + b``
* backward: ``dx = gradient(dy) @ weight_operand(W^T)^T``, ``db = sum of dy over rows``; the rounding of x
  passes its gradient straight through; the packed weight has no gradient.

Each operand is rounded with its blocks along the axis over which the product sums, because that is the only
way in which hardware can take the scales out of the sum. The forward pass keeps the packed weight for the
backward pass and decodes it there again: ``bits_per_value / 8 * N * K`` bytes are read twice, no dequantised
copy is held in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.formats.base import Format, Packed
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.product.cpu_products import cpu_product


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Formats to which the operands of a product are brought; None takes an operand as it is."""

    activation: Format | None = None
    gradient: Format | None = None
    weight_operand: Format | None = None


PLAIN = Operands()


def round_operand(x: Tensor, format: Format | None) -> Tensor:
    """``x`` (..., K) rounded to ``format`` with its blocks along K; no gradient of its own."""
    if format is None:
        return x
    if x.dim() == 2:
        return format.fake_quantize(x)
    return format.fake_quantize(rows_of(x)).view(x.shape)


def forward_product(x: Tensor, weight: Tensor, bias: Tensor | None, operands: Operands) -> Tensor:
    """``activation(x) @ weight_operand(weight)^T + bias`` with a decoded weight (N, K) in x's dtype."""
    x = round_operand(x, operands.activation)
    return F.linear(x, round_operand(weight, operands.weight_operand), bias)


def backward_product(dy: Tensor, weight: Tensor, operands: Operands) -> Tensor:
    """``dx = gradient(dy) @ weight_operand(weight^T)^T`` with a decoded weight (N, K) in dy's dtype."""
    if operands.weight_operand is not None:
        weight = operands.weight_operand.fake_quantize(weight.t().contiguous()).t()
    return round_operand(dy, operands.gradient) @ weight


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product of ``x`` is computed: autocast's where it is on, else x's own.

    ``x`` may have any shape.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        operands: Operands,
        like: tuple[Format, tuple[int, ...], torch.dtype, tuple[str, ...]],
        *parts: Tensor,
    ) -> Tensor:
        ctx.operands, ctx.like = operands, like
        ctx.save_for_backward(*parts)
        ctx.bias_dtype = None if bias is None else bias.dtype
        weight = decode(like, parts, x.dtype)
        return forward_product(x, weight, None if bias is None else bias.to(x.dtype), operands)

    @staticmethod
    @once_differentiable(
        "packed_linear with a rounded gradient", lambda ctx: ctx.operands.gradient is not None
    )
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx = dbias = None
        parts = ctx.saved_tensors  # once: gradient checkpointing makes them again for one reading
        needs_dx, needs_dbias, *_ = ctx.needs_input_grad
        if needs_dx:
            dx = backward_product(dy, decode(ctx.like, parts, dy.dtype), ctx.operands)
        if needs_dbias:
            dbias = rows_of(dy).sum(0).to(ctx.bias_dtype)
        return dx, dbias, None, None, *(None for _ in parts)


def signature(packed: Packed) -> tuple[Format, tuple[int, ...], torch.dtype, tuple[str, ...]]:
    """Everything of a packed tensor but its tensors: what `decode` needs beside them."""
    return packed.format, packed.shape, packed.dtype, tuple(packed.parts)


def decode(
    like: tuple[Format, tuple[int, ...], torch.dtype, tuple[str, ...]],
    parts: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> Tensor:
    """The weight in ``dtype`` from its parts and its `signature`.

    The weight is (N, K), or of any shape that its signature says.
    """
    format, shape, packed_dtype, names = like
    packed = Packed(format, shape, packed_dtype, dict(zip(names, parts, strict=True)))
    return dequantize(packed, dtype)


def packed_linear(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    activation: Format | None = None,
    gradient: Format | None = None,
    weight_operand: Format | None = None,
) -> Tensor:
    """``x @ dequantize(packed)^T + bias``, in autocast's dtype where autocast is on, else in x's.

    Args:
        x: (..., K) floating point.
        packed: the weight (N, K).
        bias: (N,) or None; may be trained.
        activation: format to which x is rounded for the product.
        gradient: format to which dy is rounded for the product that gives dx.
        weight_operand: format to which the decoded weight is rounded for both products.
    """
    operands = Operands(activation=activation, gradient=gradient, weight_operand=weight_operand)
    # Rows, so that what the function returns is no view: PEFT's aLoRA, for one, writes into it.
    rows = rows_of(x.to(product_dtype(x)))
    if operands == PLAIN and not torch.is_grad_enabled():
        few = cpu_product(rows, packed)
        if few is not None:
            few = few if bias is None else few.add_(bias)
            return few.view(*x.shape[:-1], few.shape[-1])
    y: Tensor = _PackedLinear.apply(rows, bias, operands, signature(packed), *packed.parts.values())
    return y.view(*x.shape[:-1], y.shape[-1])


def packed_linear_ref(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """The definition without formats for the operands; autograd derives its backward pass.

    x is (..., K), ``packed`` (N, K), ``bias`` (N,); y is (..., N).
    """
    return F.linear(x, packed.dequantize(x.dtype), bias)
