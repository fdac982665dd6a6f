"""``y = x @ W^T + b + s * (drop(x) @ A^T) @ B^T`` over a frozen W, packed or plain.

This is the LoRA linear of layers that are not fused. The fused decoder, which a step on a GPU normally
takes, computes its branches and their gradients in fewbits/decoder/projection.py, and those of the MLP in
fewbits/kernels/decoder/gated_lora_backward.py.

Shapes: x (..., K), W (N, K), A (r, K), B (N, r), b (N,), y (..., N).

Backward, with ``h = drop(x) @ A^T`` (kept) and ``dh = s * dy @ B``:
``dx = dy @ W + drop'(dh @ A)``, ``dA = dh^T @ drop(x)``, ``dB = s * dy^T @ h``, ``db = sum of dy over rows``.

Kept for the backward pass: x (and the dropped x, if there is dropout), h, A, B, and W as it is stored; W is
decoded twice. The low-rank branch is computed in the wider of x's and A's dtype, or in autocast's where it is
on: A and B in float32 beside a bfloat16 model keep their precision, as in PEFT.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.formats.base import Packed
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.product.matmul_packed import (
    PLAIN,
    Operands,
    backward_product,
    decode,
    forward_product,
    product_dtype,
    signature,
)


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        branch: tuple[float, torch.dtype],
        operands: Operands,
        like: Any,
        *parts: Tensor,
    ) -> Tensor:
        scaling, branch_dtype = branch
        weight = decode(like, parts, x.dtype) if like is not None else parts[0].to(x.dtype)
        y = forward_product(x, weight, None if bias is None else bias.to(x.dtype), operands)
        del weight
        x_MK = x if dropped is None else dropped  # rows already, and an input: a way for a second derivative
        h = x_MK.to(branch_dtype) @ a.to(branch_dtype).t()
        y_MN = rows_of(y)
        if branch_dtype == y.dtype:
            y_MN.addmm_(h, b.to(branch_dtype).t(), alpha=scaling)
        else:
            y_MN.add_(h @ b.to(branch_dtype).t(), alpha=scaling)
        ctx.save_for_backward(x_MK, h, a, b, *parts)
        ctx.scaling, ctx.operands, ctx.like, ctx.has_dropout = scaling, operands, like, dropped is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable("lora_linear")
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x_MK, h, a, b, *parts = ctx.saved_tensors
        needs_dx, needs_ddropped, needs_da, needs_db, needs_dbias, *_ = ctx.needs_input_grad
        branch_dtype = h.dtype
        dx = ddropped = da = db = dbias = None
        dy_MN = rows_of(dy)
        dy_branch = dy_MN.to(branch_dtype)
        dh = (dy_branch @ b.to(branch_dtype)).mul_(ctx.scaling)
        if needs_da:
            da = (dh.t() @ x_MK.to(branch_dtype)).to(a.dtype)
        if needs_db:
            db = (dy_branch.t() @ h).mul_(ctx.scaling).to(b.dtype)
        if needs_dx:
            weight = (
                decode(ctx.like, tuple(parts), dy.dtype) if ctx.like is not None else parts[0].to(dy.dtype)
            )
            dx_MK = backward_product(dy_MN, weight, ctx.operands)
            del weight
            if not ctx.has_dropout:
                _add_product_(dx_MK, dh, a)
            dx = dx_MK.view(*dy.shape[:-1], dx_MK.shape[1])
        if needs_ddropped:
            ddropped = (dh @ a.to(branch_dtype)).to(dy.dtype).view(*dy.shape[:-1], a.shape[1])
        if needs_dbias:
            dbias = dy_MN.sum(0).to(ctx.bias_dtype)
        return dx, ddropped, da, db, dbias, *(None for _ in range(3 + len(parts)))


def _add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == out.dtype:
        out.addmm_(left, right.to(out.dtype))
    else:
        out.add_(left @ right.to(left.dtype))


def lora_linear(
    x: Tensor,
    weight: Packed | Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    *,
    scaling: float,
    dropped: Tensor | None = None,
    operands: Operands = PLAIN,
) -> Tensor:
    """A frozen linear layer with its low-rank branch, in one autograd step.

    Args:
        x: (..., K).
        weight: (N, K), packed, or plain and frozen.
        bias: (N,) or None.
        a: (r, K).
        b: (N, r).
        scaling: factor of the branch.
        dropped: x after dropout, the branch's input; None: x itself.
        operands: formats of the base product's operands; the branch takes its own as they are.
    """
    dtype = product_dtype(x)
    autocast = torch.is_autocast_enabled(x.device.type)
    branch_dtype = dtype if autocast else torch.promote_types(dtype, a.dtype)
    if isinstance(weight, Packed):
        like, parts = signature(weight), tuple(weight.parts.values())
    else:
        like, parts = None, (weight,)
    shape, rows = x.shape[:-1], rows_of(x.to(dtype))  # rows, so that what the function returns is no view:
    if dropped is not None:  # a host's layer (Falcon's, for one) may write into it
        dropped = rows_of(dropped.to(dtype))
    with torch.autocast(x.device.type, enabled=False):
        y = _LoRALinear.apply(rows, dropped, a, b, bias, (scaling, branch_dtype), operands, like, *parts)
    return y.view(*shape, y.shape[-1])  # type: ignore[no-any-return]


def lora_linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    *,
    scaling: float,
    dropped: Tensor | None = None,
) -> Tensor:
    """The definition with a decoded weight; autograd derives its backward pass.

    x and ``dropped`` are (..., K), ``weight`` (N, K), ``bias`` (N,), a (r, K), b (N, r); y is (..., N).
    """
    branch = F.linear(F.linear(x if dropped is None else dropped, a), b)
    return F.linear(x, weight, bias) + branch * scaling
