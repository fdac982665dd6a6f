"""The output head and its loss, without holding the logits.

    z = h @ W^T + b      s = c * tanh(z / c) with a soft cap c, else z      h (M, K)   W (V, K)   z (M, V)

    lse    = log sum_j exp(s_j)
    loss_i = lse - (1 - e) * s_y - e * mean_j(s_j) + a * lse^2          y the label, e smoothing, a z-loss

    ds_j = (1 + 2 a lse) * softmax(s)_j - (1 - e) * [j = y] - e / V
    dz_j = ds_j * (1 - (s_j / c)^2)      dh = dz @ W      dW = dz^T @ h      db = sum of dz over rows

Sources: label smoothing, Szegedy et al. 2016 (arXiv 1512.00567, section 7), in PyTorch's form, where the
label too takes its share e / V; z-loss, Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, section 5); soft cap,
Gemma 2 (arXiv 2408.00118, section 2).

Rows go in chunks. For each: the product z, one pass that computes the loss and overwrites z with dz, the
products dh and (only for a head that trains) dW. So one chunk of logits lives at a time, and the gradients
are there when the forward pass ends; the backward pass multiplies them by the gradient of the loss. Nothing
waits for the device.

Rounding: z and dz in h's dtype, everything between them in float32 (float64 for float64). dW and db are
summed over chunks and kept until the backward pass in float32, or in W's dtype if wider; in 16 bits each
chunk's own product is rounded once before it is added. Where all rows are one chunk, and W has h's dtype, dW
is that product. dh is kept in h's dtype, unscaled, so that float16 does not lose it to division by the number
of labels.

Floor: 2 M V K operations a product, two products for a frozen head and three for one that trains. The pass
over z reads it (twice, the second time from the L2 cache) and writes it, 2 * M * V * itemsize bytes.
M = 8192, V = 128256, K = 4096 in bfloat16: 8.6 TFLOP a product, and 4.2 GB, 0.98 ms at the 4.28 TB/s that a
copy reaches on an H200.

Only first derivatives: a further one is refused, by whatever way to hidden, weight or bias it is asked for.

The kernel is in cross_entropy_triton.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.codec.quantize_float8 import codes_under, scale_of_amax
from fewbits.kernels.launch.ops import one_by_one
from fewbits.kernels.loss.cross_entropy_gradient import register_gradient
from fewbits.kernels.loss.cross_entropy_triton import KERNEL_DTYPES, Gradient8, launch
from fewbits.kernels.loss.rows_and_labels import LossTensors, Mean, check_labels, over_labels

_SLAB = 2**16  # values that the definition of the pass over a chunk widens at a time
_WEIGHT_ROWS = 16384  # rows of dW whose 16-bit product lives beside the sum

_LEAST = 2.0**-20  # what a gradient in 8 bits is scaled for at least: below it nothing is lost to speak of

Pass = Callable[..., None]  # `rows_ref`, or the kernel


# 1. The definition.


def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> Tensor:
    """The loss of every row (...), with all logits in memory; autograd derives its gradients.

    ``hidden`` is (..., K), ``weight`` (V, K), ``labels`` (...) int64, ``bias`` (V,).
    """
    z = F.linear(hidden, weight, bias)
    s = z.to(torch.promote_types(z.dtype, torch.float32))
    if soft_cap:
        s = soft_cap * torch.tanh(s / soft_cap)
    lse = s.logsumexp(-1)
    counts = labels != ignore_index
    picked = s.gather(-1, labels.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * picked + z_loss * lse.square()
    if label_smoothing:
        loss = loss - label_smoothing * s.mean(-1)
    return loss.where(counts, 0.0)


def rows_ref(
    z: Tensor,
    labels: Tensor,
    dloss: Tensor | None,
    loss: Tensor,
    ignore_index: int,
    options: tuple[float, float, float],
    dense: bool,
    gradient8: Gradient8 | None = None,
) -> None:
    """The pass over a chunk: ``loss`` takes (M,) values, z (M, V) if ``dense`` its gradient.

    The gradient is times ``dloss`` (M,), and goes to ``gradient8`` too where there is one: see
    linear_cross_entropy_float8.py. ``options`` are label smoothing, z-loss and soft cap (0: none). A label
    that is neither ignored nor below V gives NaN.
    """
    V = z.shape[1]
    label_smoothing, z_loss, soft_cap = options
    for start in range(0, len(z), max(_SLAB // V, 1)):
        rows = slice(start, start + max(_SLAB // V, 1))
        s, y = z[rows].to(loss.dtype), labels[rows]
        factor = torch.ones_like(loss[rows]) if dloss is None else dloss[rows]
        if soft_cap:
            s = soft_cap * torch.tanh(s / soft_cap)
        lse = s.logsumexp(1)
        counts, is_token = y != ignore_index, (y >= 0) & (y < V)
        at = y.where(is_token, 0).unsqueeze(1)
        picked = s.gather(1, at).squeeze(1)
        value = lse - (1 - label_smoothing) * picked + z_loss * lse.square()
        if label_smoothing:
            value = value - label_smoothing * s.mean(1)
        loss[rows] = value.where(is_token, float("nan")).where(counts, 0.0)
        if not dense and gradient8 is None:
            continue
        slope = 1 + 2 * z_loss * lse
        ds = (s - lse.unsqueeze(1)).exp_().mul_(slope.unsqueeze(1))
        ds.scatter_add_(1, at, torch.full_like(at, -1, dtype=ds.dtype) * (1 - label_smoothing))
        if label_smoothing:
            ds.sub_(label_smoothing / V)
        if soft_cap:
            ds.mul_(1 - (s / soft_cap).square())
        ds, factor = ds.where(counts.unsqueeze(1), 0.0), factor.where(counts, 0.0)
        if gradient8 is not None:
            p = torch.minimum((s.amax(1) - lse).exp(), 1 - (picked - lse).exp())
            bound = slope.abs() * p + label_smoothing / V
            _to_float8(ds, at, bound, factor, Gradient8(*(part[rows] for part in gradient8)))
        if dense:  # the last: s may be z itself
            z[rows] = (ds * factor.unsqueeze(1)).to(z.dtype)


def _to_float8(ds: Tensor, at: Tensor, bound: Tensor, factor: Tensor, out: Gradient8) -> None:
    """The gradient ds (M, V) in 8 bits under ``bound`` (M,), that of the labels ``at`` (M, 1) apart."""
    scale = scale_of_amax(bound.clamp(min=_LEAST), out.q.dtype)
    out.own.copy_(ds.gather(1, at).squeeze(1) * factor)
    out.scale.copy_((scale * factor).unsqueeze(1))
    out.q.copy_(codes_under(ds.scatter(1, at, 0.0), scale.reciprocal().unsqueeze(1), out.q.dtype))


# 2. The chunks.


def chunked(
    over_rows: Pass,
    tensors: LossTensors,
    ignore_index: int,
    options: tuple[float, float, float],
    chunk_rows: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses (M,), dh (M, K), dW (V, K) and db (V,), the last three empty unless needed.

    ``over_rows`` is `rows_ref` or the kernel. One chunk of logits lives at a time.
    """
    hidden, weight, labels, bias, dloss = tensors
    losses, dh, dw, db = outputs(hidden, weight, bias, needs, chunk_rows)
    needs_dh, needs_dw, needs_db = needs
    hidden, weight, labels = hidden.contiguous(), weight.to(hidden.dtype), labels.contiguous()
    dloss = None if dloss is None else dloss.to(losses.dtype).contiguous()

    def chunk(rows: slice) -> None:  # a function, so that its logits are gone before the next one's
        h = hidden[rows]
        z = h @ weight.t()
        if bias is not None:
            z.add_(bias)
        part = None if dloss is None else dloss[rows]
        over_rows(z, labels[rows], part, losses[rows], ignore_index, options, any(needs))
        if needs_dh:
            torch.mm(z, weight, out=dh[rows])
        if needs_dw:
            add_product_(dw, z, h, is_all=len(hidden) <= chunk_rows)
        if needs_db:
            db.add_(z.sum(0, dtype=db.dtype))

    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), chunk_rows):
            chunk(slice(start, min(start + chunk_rows, len(hidden))))
    return losses, dh, dw, db


def outputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool], chunk_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where losses (M,), dh (M, K), dW (V, K) and db (V,) go: the sums zero, what is not needed empty.

    In one chunk dW is one product, in the dtype of its operands if that is W's.
    """
    needs_dh, needs_dw, needs_db = needs
    acc, dw_dtype = (torch.promote_types(t.dtype, torch.float32) for t in (hidden, weight))
    db_dtype = dw_dtype if bias is None else torch.promote_types(bias.dtype, torch.float32)
    return (
        hidden.new_empty(hidden.shape[0], dtype=acc),
        hidden.new_empty(hidden.shape if needs_dh else (0,)),
        hidden.new_empty(weight.shape)
        if needs_dw and 0 < hidden.shape[0] <= chunk_rows and weight.dtype == hidden.dtype
        else hidden.new_zeros(weight.shape if needs_dw else (0,), dtype=dw_dtype),
        hidden.new_zeros(weight.shape[0] if needs_db else 0, dtype=db_dtype),
    )


def add_product_(dw: Tensor, dz: Tensor, h: Tensor, *, is_all: bool) -> None:
    """``dw += dz^T @ h``, a block of rows at a time where the product has another dtype than the sum.

    ``is_all``: there is one chunk, and a dw of the product's dtype holds nothing yet (see `outputs`).
    """
    if dw.dtype == h.dtype and is_all:
        torch.mm(dz.t(), h, out=dw)
        return
    if dw.dtype == h.dtype:
        dw.addmm_(dz.t(), h)
        return
    for dw_rows, dz_rows in zip(dw.split(_WEIGHT_ROWS), dz.split(_WEIGHT_ROWS, 1), strict=True):
        dw_rows.add_(dz_rows.t() @ h)


# 3. The op: on a CPU it runs the definition of the pass over a chunk, on CUDA the kernel.


class LossArguments(NamedTuple):
    """The arguments of the op; that of `linear_cross_entropy_float8` takes further ones after them."""

    hidden: Tensor  # (M, K)
    weight: Tensor  # (V, K)
    labels: Tensor  # (M,)
    bias: Tensor | None  # (V,)
    dloss: Tensor | None  # (M,)
    ignore_index: int
    options: list[float]  # label smoothing, z-loss, soft cap
    chunk_rows: int
    needs: list[bool]  # dh, dW, db
    reduce: bool  # one sum, and not a loss for each row

    def tensors(self) -> LossTensors:
        """What a pass over chunks reads."""
        return LossTensors(self.hidden, self.weight, self.labels, self.bias, self.dloss)

    def rules(self) -> tuple[int, tuple[float, float, float], int, tuple[bool, bool, bool]]:
        """What a pass over chunks is told: ignore_index, options, chunk_rows, needs."""
        smoothing, z_loss, soft_cap = self.options
        needs_dh, needs_dw, needs_db = self.needs
        return (
            self.ignore_index,
            (smoothing, z_loss, soft_cap),
            self.chunk_rows,
            (needs_dh, needs_dw, needs_db),
        )

    def reduced(self, losses: Tensor) -> Tensor:
        """The losses of all rows (M,), or their sum."""
        return losses.sum() if self.reduce else losses


@torch.library.custom_op("fewbits::linear_cross_entropy", mutates_args=())
@one_by_one
def _linear_cross_entropy(o: LossArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_labels(o.labels, o.weight.shape[0], o.ignore_index)
    return _op(rows_ref, o)


@_linear_cross_entropy.register_kernel("cuda")
@one_by_one
def _(o: LossArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _op(launch if o.hidden.dtype in KERNEL_DTYPES else rows_ref, o)


def _op(over_rows: Pass, o: LossArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses, dh, dw, db = chunked(over_rows, o.tensors(), *o.rules())
    return o.reduced(losses), dh, dw, db


def fake_op(o: LossArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the op returns, without values: loss (M,) or scalar, dx (M, K), dW (N, K), db (N,)."""
    losses, dh, dw, db = outputs(o.hidden, o.weight, o.bias, o.needs, o.chunk_rows)
    return losses.new_empty(()) if o.reduce else losses, dh, dw, db


_linear_cross_entropy.register_fake(one_by_one(fake_op))


# 4. The gradient, and the one public function.


register_gradient(_linear_cross_entropy)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
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
    """Cross entropy of ``hidden @ weight^T + bias`` with ``labels``, a chunk of logits at a time.

    Labels that are ignored give loss 0 and no gradient, but their rows take part in the products: how many
    there are is known only on the device, and a shape that depends on it would wait for the device. Where
    the caller knows a bound (a data loader does), ``valid_rows`` leaves the others out.

    On a GPU a label outside the vocabulary makes the loss NaN, as does a bound that is too small; on a CPU
    both are refused.

    Args:
        hidden: (..., K). The products are in its dtype, or in autocast's where that is on.
        weight: (V, K), in any floating dtype; a frozen one costs no gradient.
        labels: (...) integers.
        bias: (V,) or None.
        ignore_index: the label of rows that do not count.
        reduction: "mean" over the labels that count (0 if there are none, where PyTorch gives NaN), "sum", or
            "none", a loss for each row. "none" with a head that trains computes the logits twice.
        num_items: what "mean" divides by instead, as for gradient accumulation; a tensor stays on the device.
        label_smoothing: share of the target spread evenly over the vocabulary.
        z_loss: weight of the squared log-sum-exp.
        soft_cap: largest magnitude of a logit, by tanh; None or 0 for none.
        chunk_rows: rows whose logits are held at a time; None takes as many as fit in 512 MiB,
            or in the bytes of dW.
        valid_rows: a bound on the number of labels that count: only so many rows are computed.

    Returns:
        A scalar, or with "none" (...), in float32 (float64 for float64).
    """
    options = [float(label_smoothing), float(z_loss), float(soft_cap or 0.0)]

    def loss_of(rows: Tensor, flat: Tensor, size: int, trained: list[bool]) -> Tensor:
        losses: Tensor = _linear_cross_entropy(
            rows, weight, flat, bias, None, ignore_index, options, size, trained, reduction != "none"
        )[0]
        return losses

    return over_labels(
        loss_of,
        LossTensors(hidden, weight, labels, bias),
        Mean(ignore_index, reduction, num_items),
        chunk_rows=chunk_rows,
        valid_rows=valid_rows,
    )
