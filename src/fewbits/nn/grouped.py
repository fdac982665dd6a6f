"""Products of rows sorted by expert with each expert's own matrix, and the table that sorts them.

A mixture of experts gives each of T rows to k of E experts: P = T k pairs of a row and an expert. `Table`
sorts the pairs by expert on the device that the rows are on; where one expert's stretch of the sorted pairs
ends is a tensor there as well, and nothing waits for the device:

    grouped(x, w, ends)[p]         = w[e(p)] x[p]                              x (P, K), w (E, N, K) to (P, N)

On CUDA it is torch's ``grouped_mm``; elsewhere (the definition) one product an expert. Sums over the k rows
of a token are `fewbits.kernels.product.pair_sums`, those over an expert's pairs `pair_outer` beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.product.expert_order import expert_order

_ALIGNED_BYTES = 16  # what torch's grouped_mm asks of the distance between rows


@dataclass(frozen=True)
class Table:
    """Pairs of a row and an expert, sorted by expert.

    Attributes:
        rows: (P,) int64, the row of each pair.
        experts: (P,) int64, its expert, ascending.
        order: (P,) int64, where the pair stood among all, row by row.
        inverse: (T, k) int64, where each row's pairs stand in the table.
        ends: (E,) int32, where each expert's stretch ends.
    """

    rows: Tensor
    experts: Tensor
    order: Tensor
    inverse: Tensor
    ends: Tensor

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> Table:
        """The table of the experts chosen for each row, (T, k) of whole numbers below ``num_experts``."""
        return cls(*expert_order(chosen, num_experts))

    @classmethod
    def one_by_one(cls, chosen: Tensor) -> Table:
        """The pairs as they stand, each with a matrix of its own: P matrices in place of E.

        ``chosen`` is (T, k) of whole numbers, P = T * k.
        """
        flat = chosen.reshape(-1).long()
        order = _count(flat)
        rows = order // max(1, chosen.shape[-1])
        return cls(rows, order, order, order.view(chosen.shape), (order + 1).int())


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Each row by the matrix of its expert.

    Args:
        x: (P, K), sorted by expert.
        w: (E, N, K) in x's dtype, any strides with rows or columns in one piece.
        ends: (E,) int32, where each expert's rows end.

    Returns:
        (P, N).
    """
    if not x.is_cuda:
        pieces = [rows @ w[i].t() for i, rows in enumerate(_stretches(x, ends)) if len(rows)]
        return torch.cat(pieces) if pieces else x.new_zeros(len(x), w.shape[1])
    if x.shape[0] == 0:
        return x.new_zeros(0, w.shape[1])
    transposed = _aligned(w).transpose(1, 2) if w.stride(2) == 1 else _aligned(w.transpose(1, 2))
    return F.grouped_mm(_aligned(x), transposed, offs=ends)


def _count(like: Tensor) -> Tensor:
    return torch.arange(len(like), device=like.device)


def _stretches(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Each expert's rows of x, on a device that nothing waits for."""
    sizes: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return tuple(torch.split(x, sizes))  # type: ignore[no-untyped-call]


def _aligned(x: Tensor) -> Tensor:
    """The same values with rows at distances that grouped_mm takes, x's last axis in one piece."""
    values = _ALIGNED_BYTES // x.element_size()
    x = x if x.stride(-1) == 1 else x.contiguous()
    if all(stride % values == 0 for stride in x.stride()[:-1]):
        return x
    width = x.shape[-1]
    return F.pad(x, (0, -width % values))[..., :width]


__all__ = ["Table", "grouped"]
