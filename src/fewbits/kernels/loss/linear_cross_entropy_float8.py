"""The output head and its loss with products of 8-bit floating point; see linear_cross_entropy.py.

    z  = q(h) @ w8^T + b        the loss and dz as there        q, w8: E4M3, a scale a row of h, one for W

    dh = q(dz') @ w8 + d[y] * W[y]        dz' is dz with 0 for the label y of each row, d[y] what stood there

    dW = dz^T @ h      db = sum of dz over rows       in h's dtype: for dW both operands would be transposed

Why the label stands apart. Its entry is softmax - 1, about -1, beside tens of thousands of probabilities of
1e-6 that together may be a tenth of all. Under one scale for both, E4M3 rounds what is below 1.1e-6 of the
largest to nothing, always downwards, and with it goes the tail's share of dh, the same direction in all rows.
Measured on a CPU, 128 rows of a head of 128256 x 512, labels by Zipf's law, loss 0.2 to 9.4: rounding dz
alone put dh off by 0.016 to 0.027 of its norm, and the mean of its rows by 0.05 to 0.25; with E5M2 by 0.004
to 0.013 and 0.007 to 0.015; with the label apart and E4M3 by 0.002 to 0.004 and 0.003 to 0.008. Nor is the
label's row of W rounded to 8 bits, which would add W's own 0.0265 (see matmul_float8.py) to the largest term.
What FP8 does to dh is then mostly what it does to z: 0.005 to 0.042 in all, 0.004 to 0.041 through z alone.

Why both products add up in float32. Hopper's own accumulator of 8-bit products keeps about 14 bits, cut off
at every 32 terms. dh has V terms: what is below 2^-13 of the running sum is lost, and that is the tail once
more. Measured on an H200, 1024 rows, K = 4096, labels as above, loss 3.5: dh's products alone were off by
0.16 and the mean of the rows by 1.6; added up in float32 at every 128 terms (``fast=False``) by 0.007 and
0.045, and no slower, 6.2 ms a step beside 6.4. z has K terms; there the cut makes large logits smaller, and
the loss was 0.05 too large (a simulation says 0.01 to 0.02, and 0.003 in float32).

The scale of a row of dz' is known before dz' is: no entry exceeds |1 + 2 a lse| * min(softmax of the largest
logit, 1 - softmax of the label's) + e / V. So one pass over z writes 8 bits, and it writes dz over z only
where dW, db or a dh in h's dtype needs it. The factor of a row goes into its scale.

Gradients of h and W are those of the formula without rounding (straight through); W is rounded anew in each
pass by whoever trains it (`head_operands`), once for a frozen head.

Floor: 2 M V K operations a product as there, two of them at the 8-bit rate. M = 8192, V = 128256, K = 4096:
8.6 TFLOP a product, 6.4 ms at 1350e12 a second on an H200 beside 12.3 ms at bfloat16's 700e12; the pass over
z reads 2 and writes 1 byte a value, 3.2 GB, 0.74 ms at 4.28 TB/s. Measured there in chunks of 1024 rows: z
5.5 ms (fast, which it is no longer; 11.3 in bfloat16), dh 6.2 (11.7), the pass 1.6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.codec.quantize_float8 import quantize_rows, quantize_rows_ref
from fewbits.kernels.launch.ops import one_by_one
from fewbits.kernels.loss.cross_entropy_gradient import register_gradient
from fewbits.kernels.loss.cross_entropy_triton import KERNEL_DTYPES, Gradient8, launch
from fewbits.kernels.loss.linear_cross_entropy import (
    LossArguments,
    Pass,
    add_product_,
    fake_op,
    outputs,
    rows_ref,
)
from fewbits.kernels.loss.rows_and_labels import LossTensors, Mean, check_labels, over_labels
from fewbits.kernels.product.matmul_float8 import (
    E4M3,
    float8_linear,
    float8_linear_ref,
    float8_weight,
    scale_row,
    weight_scale,
)

# 1024 rows of Llama 3's vocabulary: 14.0 ms a step on one H200, 14.9 with twice as many.
CHUNK_BYTES = 2**28


class HeadOperands(NamedTuple):
    """A head's weight W (V, K) in 8 bits: what its products take.

    Attributes:
        w8: (V, K) float8_e4m3fn.
        transposed: (K, V), the same codes, for dh; None: dh's product takes dz and W in h's dtype.
        scale: (1, 1) float32.
    """

    w8: Tensor
    transposed: Tensor | None
    scale: Tensor


@torch.no_grad()
def head_operands(weight: Tensor, *, gradient: bool = True) -> HeadOperands:
    """The operands of a head's weight (V, K); with ``gradient`` also those of dh's product.

    Raises:
        Unsupported: the GPU has no 8-bit floating point.
    """
    scale = weight_scale(weight)
    inverse = scale.reciprocal()
    w8 = float8_weight(weight, inverse_scale=inverse)
    return HeadOperands(
        w8, float8_weight(weight, transposed=True, inverse_scale=inverse) if gradient else None, scale
    )


# 1. The definition.


def linear_cross_entropy_float8_ref(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    operands: HeadOperands,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    options: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> tuple[Tensor, Tensor]:
    """The loss of every row (M,), and the gradient of their sum for hidden (M, K), all logits in memory.

    ``options`` are label smoothing, z-loss and soft cap (0: none).
    """
    w8, transposed, scale = operands
    z = float8_linear_ref(*quantize_rows_ref(hidden), w8, scale, bias, hidden.dtype)
    loss = torch.empty(len(z), dtype=torch.promote_types(z.dtype, torch.float32))
    if transposed is None:
        rows_ref(z, labels, None, loss, ignore_index, options, True)
        return loss, z @ weight.to(z.dtype)
    out = _gradient8(z, loss.new_empty(len(z), dtype=torch.float32))
    rows_ref(z, labels, None, loss, ignore_index, options, False, out)
    dh = float8_linear_ref(out.q, out.scale, transposed, scale, None, hidden.dtype)
    return loss, _add_labels_(dh, out.own, weight, labels)


def _gradient8(z: Tensor, own: Tensor) -> Gradient8:
    q = torch.empty(z.shape, dtype=E4M3, device=z.device)
    return Gradient8(q, torch.empty((z.shape[0], 1), dtype=torch.float32, device=z.device), own)


def _add_labels_(dh: Tensor, own: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``dh += own * W[label]`` (M, K); own is 0 where there is no such row."""
    is_token = (labels >= 0) & (labels < weight.shape[0])
    rows = weight.index_select(0, labels.where(is_token, 0)).to(dh.dtype)
    return dh.addcmul_(rows, own.to(dh.dtype).unsqueeze(1))


# 2. The chunks.


def chunked_float8(
    over_rows: Pass,
    tensors: LossTensors,
    operands: HeadOperands,
    ignore_index: int,
    options: tuple[float, float, float],
    chunk_rows: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses (M,), dh (M, K), dW (V, K) and db (V,), the last three empty unless needed.

    ``over_rows`` is `rows_ref` or the kernel; ``tensors`` as for `linear_cross_entropy.chunked`. One
    chunk of logits lives at a time.
    """
    hidden, weight, labels, bias, dloss = tensors
    losses, dh, dw, db = outputs(hidden, weight, bias, needs, chunk_rows)
    needs_dh, needs_dw, needs_db = needs
    hidden, labels = hidden.contiguous(), labels.contiguous()
    dloss = None if dloss is None else dloss.to(losses.dtype).contiguous()
    w8, transposed, scale = operands
    has_dense = needs_dw or needs_db or (needs_dh and transposed is None)
    of_z, of_dh = scale_row(scale, w8.shape[0]), scale_row(scale, w8.shape[1])
    same = weight.to(hidden.dtype) if needs_dh and transposed is None else weight
    h8, h_scale = quantize_rows(hidden)
    own = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)

    def chunk(rows: slice) -> None:  # a function, so that its logits are gone before the next one's
        z = float8_linear(h8[rows], h_scale[rows], w8, of_z, bias=bias, out_dtype=hidden.dtype, fast=False)
        part = None if dloss is None else dloss[rows]
        dz8 = _gradient8(z, own[rows]) if needs_dh and transposed is not None else None
        over_rows(z, labels[rows], part, losses[rows], ignore_index, options, has_dense, dz8)
        if needs_dw:
            add_product_(dw, z, hidden[rows], is_all=len(hidden) <= chunk_rows)
        if needs_db:
            db.add_(z.sum(0, dtype=db.dtype))
        if dz8 is not None and transposed is not None:
            del z
            float8_linear(
                dz8.q, dz8.scale, transposed, of_dh, out_dtype=hidden.dtype, fast=False, out=dh[rows]
            )
        elif needs_dh:
            torch.mm(z, same, out=dh[rows])

    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), chunk_rows):
            chunk(slice(start, min(start + chunk_rows, len(hidden))))
        if needs_dh and transposed is not None:
            _add_labels_(dh, own, weight, labels)
    return losses, dh, dw, db


def logits_float8(hidden: Tensor, operands: HeadOperands) -> Tensor:
    """The logits (M, V) of hidden (M, K), in its dtype, by the product of the loss."""
    w8, _, scale = operands
    of_z = scale_row(scale, w8.shape[0])
    return float8_linear(*quantize_rows(hidden), w8, of_z, out_dtype=hidden.dtype, fast=False)


# 3. The op: on a CPU it runs the definition of the pass over a chunk, on CUDA the kernel.


class LossFloat8(NamedTuple):
    """The arguments of the op: after the loss's the parts of `HeadOperands`."""

    loss: LossArguments
    w8: Tensor
    transposed: Tensor | None
    scale: Tensor


@torch.library.custom_op("fewbits::linear_cross_entropy_float8", mutates_args=())
@one_by_one
def _linear_cross_entropy_float8(o: LossFloat8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, over_rows = o.loss, rows_ref
    if loss.hidden.is_cuda:
        over_rows = launch if loss.hidden.dtype in KERNEL_DTYPES else rows_ref
    else:
        check_labels(loss.labels, loss.weight.shape[0], loss.ignore_index)
    operands = HeadOperands(o.w8, o.transposed, o.scale)
    losses, dh, dw, db = chunked_float8(over_rows, loss.tensors(), operands, *loss.rules())
    return loss.reduced(losses), dh, dw, db


@_linear_cross_entropy_float8.register_fake
@one_by_one
def _(o: LossFloat8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_op(o.loss)


# 4. The gradient, and the one public function.


register_gradient(_linear_cross_entropy_float8)


def linear_cross_entropy_float8(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    operands: HeadOperands,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk_rows: int | None = None,
    valid_rows: int | None = None,
) -> Tensor:
    """`linear_cross_entropy` whose products take 8-bit operands.

    Args:
        hidden: (..., K). Logits, and the products of a head that trains, are in its dtype, or autocast's.
        weight: (V, K), the one that trains, and whose rows of the labels dh takes as they are.
        labels: (...) integers.
        operands: what `head_operands` made of ``weight``.
        bias: as in `linear_cross_entropy`, like all that follow.
        ignore_index: there.
        reduction: there.
        num_items: there.
        label_smoothing: there.
        z_loss: there.
        soft_cap: there.
        chunk_rows: rows whose logits are held at a time, with their gradient in 8 bits; None takes as many as
            fit in 256 MiB and half of that, or in the bytes of dW.
        valid_rows: there.

    Returns:
        A scalar, or with "none" (...), in float32.

    Raises:
        Unsupported: V or K is no multiple of 16, or the GPU has no 8-bit floating point.
    """
    options = [float(label_smoothing), float(z_loss), float(soft_cap or 0.0)]

    def loss_of(rows: Tensor, flat: Tensor, size: int, trained: list[bool]) -> Tensor:
        losses: Tensor = _linear_cross_entropy_float8(
            rows,
            weight,
            flat,
            bias,
            None,
            ignore_index,
            options,
            size,
            trained,
            reduction != "none",
            *operands,
        )[0]
        return losses

    return over_labels(
        loss_of,
        LossTensors(hidden, weight, labels, bias),
        Mean(ignore_index, reduction, num_items),
        chunk_rows=chunk_rows,
        valid_rows=valid_rows,
        chunk_bytes=CHUNK_BYTES,
    )
