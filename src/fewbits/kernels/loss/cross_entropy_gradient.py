"""The backward pass of linear_cross_entropy.py, which has the formulas, and of its form in 8 bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fewbits.kernels.launch.derivatives import keep_ways, once_differentiable
from fewbits.kernels.loss.scaled import scaled


def register_gradient(op: Any) -> None:
    """Give ``op``, this one or one that takes further operands after the same arguments, its gradient."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, labels, bias, _, *rest = inputs
        ctx.arguments, operands = rest[:5], rest[5:]
        ctx.count = len(inputs)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros for the gradient of dW would be as large as W
        ctx.again = not any(ctx.arguments[-2])
        keep_ways(ctx, hidden, weight, bias)
        ctx.save_for_backward(*((hidden, weight, labels, bias, *operands) if ctx.again else output[1:]))

    @once_differentiable("linear_cross_entropy")
    def backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return (None,) * ctx.count
        needs_dh, needs_dw, _labels, needs_db, *_ = ctx.needs_input_grad
        needs = [needs_dh, needs_dw, needs_db]
        saved = ctx.saved_tensors
        if ctx.again:  # dW of rows with factors of their own: nothing made before them can be scaled
            ignore_index, options, chunk_rows, _, _ = ctx.arguments
            hidden, weight, labels, bias, *operands = saved
            factors = dloss.expand(labels.shape)
            _, dh, dw, db = op(
                hidden, weight, labels, bias, factors, ignore_index, options, chunk_rows, needs, False,
                *operands,
            )  # fmt: skip
        else:
            dh, dw, db = saved
            factor = dloss if dloss.dim() == 0 else dloss.unsqueeze(1)
            dh = (dh.to(dloss.dtype) * factor).to(dh.dtype) if needs[0] else dh
            dw = scaled(dw, dloss, ctx.dtypes[0]) if needs[1] else dw
            db = db * dloss if needs[2] else db
        return (
            dh if needs[0] else None,
            dw.to(ctx.dtypes[0]) if needs[1] else None,
            None,
            db.to(ctx.dtypes[1]) if needs[2] else None,
            *(None for _ in range(ctx.count - 4)),
        )

    op.register_autograd(backward, setup_context=setup_context)
