"""What a frozen output head says of each label, without holding the logits: log-probability, entropy, top 1.

    z = h @ W^T      s = c * tanh(z / c) with a soft cap c, else z      p = softmax(s)

h (M, K), W (V, K), z (M, V);

    log_prob_i = log p_y            entropy_i = -sum_j p_j log p_j
    top_i = 1 where s_y is the first of the largest of the row, else 0

    dh = g * (([j = y] - p_j) * ds/dz) @ W - q * (p_j * (log p_j + entropy) * ds/dz) @ W

with g and q (M,) the gradients of log_prob and entropy, ds/dz = 1 - (s / c)^2. Rows whose label is ignored
give zeros.

The chunks, the pass that gives losses and gradients and their rounding are linear_cross_entropy.py's; before
it overwrites a chunk of logits, it has read it for entropy and top 1. So dh is there when the
forward pass ends, and the backward pass multiplies its rows by g: two products in all, where recomputing the
logits in the backward pass takes three. Only a gradient of the entropy (a bonus for it) computes them again.

With the operands of a head in 8 bits both products are those of linear_cross_entropy_float8.py.

Bytes: those of linear_cross_entropy.py; entropy and top 1 come out of the reading that finds the log-sum-exp.

Only first derivatives. The kernel is in cross_entropy_triton.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.loss.cross_entropy_triton import KERNEL_DTYPES, Statistics, launch_with_statistics
from fewbits.kernels.loss.linear_cross_entropy import chunked, rows_ref
from fewbits.kernels.loss.linear_cross_entropy_float8 import CHUNK_BYTES as FLOAT8_CHUNK_BYTES
from fewbits.kernels.loss.linear_cross_entropy_float8 import HeadOperands, chunked_float8, logits_float8
from fewbits.kernels.loss.rows_and_labels import CHUNK_BYTES, LossTensors, check_labels, default_chunk_rows
from fewbits.kernels.product.matmul_packed import product_dtype

_SLAB = 2**20  # values that the definition widens at a time


class LogProbs(NamedTuple):
    """Of each row (...), zeros where the label is ignored.

    Attributes:
        log_probs: float32, of the label.
        entropy: float32, in nats.
        is_top: bool: no logit is larger, and none before it as large.
    """

    log_probs: Tensor
    entropy: Tensor
    is_top: Tensor


# 1. The definition.


def linear_log_probs_ref(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, soft_cap: float = 0.0
) -> LogProbs:
    """With all logits in memory; autograd derives its gradients.

    ``hidden`` is (M, K), ``weight`` (V, K), ``labels`` (M,) int64; each result is (M,).
    """
    s = _capped((hidden @ weight.t()).float(), soft_cap)
    counts = labels != ignore_index
    log_p = s.log_softmax(-1)
    picked = log_p.gather(-1, labels.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    top = s.argmax(-1) == labels
    return LogProbs(picked.where(counts, 0.0), entropy.where(counts, 0.0), top & counts)


def statistics_ref(
    z: Tensor, labels: Tensor, entropy: Tensor, top: Tensor, ignore_index: int, soft_cap: float
) -> None:
    """Entropy and top 1 (M,) of logits z (M, V), a slab at a time."""
    step = max(_SLAB // z.shape[1], 1)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        s, y = _capped(z[rows].to(entropy.dtype), soft_cap), labels[rows]
        counts = y != ignore_index
        entropy[rows] = torch.special.entr(s.softmax(1)).sum(1).where(counts, 0.0)
        top[rows] = ((s.argmax(1) == y) & counts).to(top.dtype)


def _capped(s: Tensor, soft_cap: float) -> Tensor:
    return soft_cap * torch.tanh(s / soft_cap) if soft_cap else s


# 2. The chunks.


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        soft_cap: float,
        rows: int,
        operands: HeadOperands | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        use_kernel = hidden.is_cuda and hidden.dtype in KERNEL_DTYPES
        if not hidden.is_cuda:
            check_labels(labels, weight.shape[0], ignore_index)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        entropy, top = hidden.new_empty((2, len(hidden)), dtype=dtype)
        done = 0

        def both(z: Tensor, part: Tensor, *rest: Any) -> None:
            nonlocal done
            at = slice(done, done + len(z))
            if use_kernel:
                launch_with_statistics(Statistics(entropy[at], top[at]), z, part, *rest)
            else:
                statistics_ref(z, part, entropy[at], top[at], ignore_index, soft_cap)
                rows_ref(z, part, *rest)
            done += len(z)

        needs_dh, *_ = ctx.needs_input_grad
        needs = (needs_dh, False, False)
        options = (0.0, 0.0, soft_cap)
        tensors = LossTensors(hidden, weight, labels)
        if operands is None:
            losses, dh, _, _ = chunked(both, tensors, ignore_index, options, rows, needs)
        else:
            losses, dh, _, _ = chunked_float8(both, tensors, operands, ignore_index, options, rows, needs)
        is_top = top.bool()
        ctx.save_for_backward(dh, hidden, weight, labels, entropy)
        ctx.options, ctx.operands = (ignore_index, soft_cap, rows), operands
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(is_top)
        return -losses, entropy, is_top

    @staticmethod
    @once_differentiable("linear_log_probs")
    def backward(ctx: Any, g: Tensor | None, q: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        dh, hidden, weight, labels, entropy = ctx.saved_tensors
        ignore_index, soft_cap, rows = ctx.options
        dh_total = None
        if g is not None:
            dh_total = (dh.to(g.dtype) * -g.unsqueeze(1)).to(dh.dtype)
        if q is not None:
            q = q.where(labels != ignore_index, 0.0)
            tensors = hidden, weight, entropy, q
            more = _entropy_gradient(tensors, ctx.operands, soft_cap, rows)
            dh_total = more if dh_total is None else dh_total.add_(more)
        return (dh_total, *(None,) * 6)


def _entropy_gradient(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    operands: HeadOperands | None,
    soft_cap: float,
    chunk_rows: int,
) -> Tensor:
    """dh (M, K) of the entropy, times q (M,), from logits that are computed again.

    ``tensors`` are hidden (M, K), weight (V, K), entropy (M,) and q.
    """
    hidden, weight, entropy, q = tensors
    weight, dh = weight.to(hidden.dtype), torch.empty_like(hidden)
    step = max(_SLAB // weight.shape[0], 1)
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        z = hidden[rows] @ weight.t() if operands is None else logits_float8(hidden[rows], operands)
        h, factor = entropy[rows, None], q[rows, None]
        for first in range(0, len(z), step):
            at = slice(first, first + step)
            s = _capped(z[at].to(entropy.dtype), soft_cap)
            log_p = s.log_softmax(1)
            ds = -factor[at] * log_p.exp() * (log_p + h[at])
            z[at] = (ds * (1 - (s / soft_cap).square()) if soft_cap else ds).to(z.dtype)
        torch.mm(z, weight, out=dh[rows])
    return dh


# 3. The one public function.


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    soft_cap: float = 0.0,
    chunk_rows: int | None = None,
    operands: HeadOperands | None = None,
) -> LogProbs:
    """Log-probabilities of labels under ``softmax(hidden @ weight^T)``, with entropies, by chunks of rows.

    Args:
        hidden: (..., K); products in its dtype, or in autocast's where that is on.
        weight: (V, K), frozen.
        labels: (...) integers.
        ignore_index: the label of rows that do not count.
        soft_cap: of the logits; 0: none.
        chunk_rows: rows whose logits live at a time; None: what 512 MiB hold (256 with 8-bit products).
        operands: what `head_operands` made of ``weight``, for products of 8 bits; None: in hidden's dtype.

    Raises:
        BadInput: the weight trains, or on a CPU a label lies outside the vocabulary.
    """
    if weight.requires_grad and torch.is_grad_enabled():
        raise BadInput(
            "linear_log_probs gives a head that trains no gradient; use linear_cross_entropy, or freeze it."
        )
    if not weight.shape[0]:
        raise BadInput(
            f"the head's weight is {tuple(weight.shape)}: without a vocabulary no label has a probability;"
            " give a weight (V, K) with at least one row."
        )
    h = rows_of(hidden)
    h = h.to(product_dtype(h))
    chunk_bytes = CHUNK_BYTES if operands is None else FLOAT8_CHUNK_BYTES
    rows = chunk_rows or default_chunk_rows(
        len(h), weight.shape[0], h.element_size(), chunk_bytes=chunk_bytes
    )
    statistics = _LogProbs.apply(h, weight, labels.reshape(-1), ignore_index, float(soft_cap), rows, operands)
    return LogProbs(*(part.reshape(labels.shape) for part in statistics))
