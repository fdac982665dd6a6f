"""``a b^T`` by stochastic computing with a straight-through gradient: that of the exact product.

The forward pass is exactly what the hardware counts. Its error has no useful derivative (a count moves in
steps, from one code to the next), so backward takes ``da = dy b`` and ``db = dy^T a``, with the operands as
they came. Smoothing divides one operand by what it multiplies the other by and changes no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.stochastic import Stochastic
from fewbits.kernels.stochastic.codes import stochastic_codes
from fewbits.kernels.stochastic.integer_product import integer_product
from fewbits.kernels.stochastic.matmul import sc_matmul_ref
from fewbits.kernels.stochastic.quantize import quantize_stochastic
from fewbits.nn.row_plan import STREAMS, RowPlan


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        options: Stochastic,
        smooth_scales: Tensor | None,
        plan: RowPlan,
        groups: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        return _counted(a, b, options, smooth_scales, plan, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        needs_da, needs_db, *_ = ctx.needs_input_grad
        da = (dy @ b.to(dy.dtype)).to(a.dtype) if needs_da else None
        db = (dy.mT @ a.to(dy.dtype)).to(b.dtype) if needs_db else None
        return da, db, None, None, None, None


def stochastic_product(
    a: Tensor,
    b: Tensor,
    options: Stochastic | None,
    smooth_scales: Tensor | None = None,
    *,
    plan: RowPlan | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """``a @ b^T`` of (N, D) and (M, D), or batches of them: float32 if stochastic, in a's dtype if exact.

    Args:
        a: left operand.
        b: right operand.
        options: of the stochastic product; None: exact.
        smooth_scales: (D,); inside the stochastic product a is divided and b multiplied by it.
        plan: stream lengths by group of rows, or whole numbers; None: streams of the options' length.
        groups: (N,) or (B, N) int64, the group of each of a's rows where the plan has several.
    """
    if options is None:
        return a @ b.mT
    plan = plan or STREAMS
    return _StraightThrough.apply(a, b, options, smooth_scales, plan, groups)  # type: ignore[no-any-return, no-untyped-call]


def _counted(
    a: Tensor,
    b: Tensor,
    options: Stochastic,
    smooth_scales: Tensor | None,
    plan: RowPlan,
    groups: Tensor | None,
) -> Tensor:
    batched = a.dim() == 3
    if not options.prepares and plan != STREAMS:
        raise Unsupported(
            "stream lengths by rows and whole numbers are for options whose operands can be prepared: "
            "bipolar, a scale per row and at most 8 bits."
        )
    if not options.prepares:
        if batched and options.chunk_d:  # the definition has chunks for two dimensions
            pairs = zip(a, b, strict=True)
            return torch.stack([sc_matmul_ref(x, y, options, smooth_scales) for x, y in pairs])
        return sc_matmul_ref(a, b, options, smooth_scales)
    a, b = (a, b) if batched else (a[None], b[None])
    operands = (
        *quantize_stochastic(a, options, smooth_scales),
        *quantize_stochastic(b, options, smooth_scales, is_b=True),
    )
    if plan.integer:
        y = integer_product(*operands, options)
    else:
        index = None if groups is None else groups.to(torch.uint8).view(len(a), -1, 1)
        y = stochastic_codes(*operands, options, plan.lengths or (options.streams.length,), index)
    return y if batched else y[0]
