"""What every loss does before and after its op: flatten rows, check labels, divide by the number of labels.

For every op that takes hidden states, the head's weight and labels, a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.product.matmul_packed import product_dtype

REDUCTIONS = ("mean", "sum", "none")
CHUNK_BYTES = 2**29  # 2048 rows of Llama 3's vocabulary in 16 bits: large enough for products at full rate


class LossTensors(NamedTuple):
    """What a loss is computed of.

    Attributes:
        hidden: (M, K), or (..., K) before the rows are laid one below the other.
        weight: (V, K).
        labels: (M,) int64, or (...).
        bias: (V,) or None.
        dloss: (M,), what each row's gradient is multiplied by; None: one.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None = None
    dloss: Tensor | None = None


def default_chunk_rows(
    M: int,
    V: int,
    itemsize: int,
    sum_bytes: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    *,
    one_product: bool = False,
) -> int:
    """A power of two, at least 16, of which the logits take ``chunk_bytes`` at most, or all rows.

    Where the head trains, every chunk reads and writes the sum of dW: the logits may then take as many bytes.
    ``one_product``: in one chunk there is no such sum (see `outputs`), so that all rows may take its bytes
    too.
    """
    if one_product and M * V * itemsize <= max(chunk_bytes, sum_bytes) + sum_bytes:
        return max(M, 1)
    rows = max(max(chunk_bytes, sum_bytes) // (V * itemsize), 16)
    return max(min(1 << (rows.bit_length() - 1), M), 1)


def check_labels(labels: Tensor, V: int, ignore_index: int) -> None:
    """Refuse labels that are neither ignored nor below V; waits for the device.

    ``labels`` are int64 of any shape.

    Raises:
        BadInput: there is one.
    """
    wrong = ((labels < 0) | (labels >= V)) & (labels != ignore_index)
    if wrong.any():
        raise BadInput(
            f"labels must be {ignore_index} (ignored) or from 0 to {V - 1}; found {int(labels[wrong][0])}: "
            "check that tokenizer and head have the same vocabulary."
        )


class Mean(NamedTuple):
    """What becomes of the rows' losses: see `linear_cross_entropy`, whose arguments these are."""

    ignore_index: int
    reduction: str
    num_items: int | Tensor | None


def over_labels(
    loss_of: Callable[[Tensor, Tensor, int, list[bool]], Tensor],
    tensors: LossTensors,
    mean: Mean,
    *,
    chunk_rows: int | None,
    valid_rows: int | None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """`linear_cross_entropy` around its op, of hidden (..., K), weight (V, K), labels (...) and bias (V,).

    ``loss_of`` gets rows (M, K), labels (M,), the rows of a chunk and what of hidden, weight and bias trains,
    and gives the losses (M,), or for another reduction than "none" their sum. ``chunk_bytes``: see
    `default_chunk_rows`.
    """
    hidden, weight, labels, bias, _ = tensors
    ignore_index, reduction, num_items = mean
    _check(hidden, weight, labels, bias, reduction, num_items, chunk_rows)
    rows = rows_of(hidden).to(product_dtype(hidden))
    flat = labels.reshape(-1).long()
    count = (flat != ignore_index).sum()
    order, M = None, rows.shape[0]
    if valid_rows is not None and valid_rows < M:
        order = torch.argsort(flat == ignore_index, stable=True)[:valid_rows]
        rows, flat = rows.index_select(0, order), flat.index_select(0, order)
        if count.device.type == "cpu" and not torch.compiler.is_compiling() and int(count) > valid_rows:
            raise BadInput(
                f"valid_rows is {valid_rows}, but {int(count)} labels count: give a bound on them."
            )
    trained = [t is not None and t.requires_grad for t in (rows, weight, bias)]
    if not torch.is_grad_enabled() or (reduction == "none" and any(trained[1:])):
        trained = [False] * 3
    sum_bytes = weight.numel() * max(weight.dtype.itemsize, 4) if trained[1] else 0
    size = chunk_rows or default_chunk_rows(
        rows.shape[0],
        weight.shape[0],
        rows.dtype.itemsize,
        sum_bytes,
        chunk_bytes,
        one_product=trained[1] and weight.dtype == rows.dtype and rows.dtype.itemsize == 2,
    )
    loss = loss_of(rows, flat, size, trained)
    if order is not None:
        loss = loss.where(count <= order.shape[0], float("nan"))
        if reduction == "none":
            loss = loss.new_zeros(M).index_copy(0, order, loss)
    if reduction == "none":
        return loss.view(labels.shape)
    if reduction == "sum":
        return loss
    return loss / (count.clamp(min=1) if num_items is None else num_items)


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    reduction: str,
    num_items: int | Tensor | None,
    chunk_rows: int | None,
) -> None:
    if reduction not in REDUCTIONS:
        raise BadInput(f"no reduction {reduction!r}; known: {', '.join(REDUCTIONS)}.")
    if num_items is not None and reduction != "mean":
        raise BadInput(f'num_items is what "mean" divides by; with reduction {reduction!r} leave it out.')
    if chunk_rows is not None and chunk_rows < 1:
        raise BadInput(f"chunk_rows must be at least 1, not {chunk_rows}.")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        have = tuple(weight.shape)
        raise BadInput(
            f"the head's weight must be (V, {hidden.shape[-1]}), as hidden's rows are; it is {have}."
        )
    if not weight.shape[0]:
        raise BadInput(
            f"the head's weight is {tuple(weight.shape)}: without a vocabulary no label has a loss; give a"
            " weight (V, K) with at least one row."
        )
    if labels.shape != hidden.shape[:-1]:
        have, need = tuple(labels.shape), tuple(hidden.shape[:-1])
        raise BadInput(f"labels must have hidden's shape without its last axis, {need}; they have {have}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadInput(
            f"bias must be ({weight.shape[0]},), as the head's rows are; it is {tuple(bias.shape)}."
        )
