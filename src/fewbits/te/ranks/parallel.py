"""What a layer that is split over ranks sends: sums and gathers, with their gradients.

A column-parallel layer holds rows of the weight: every rank has the whole input, and the input's gradient is
summed. A row-parallel layer holds columns: the outputs are summed. With sequence parallelism the whole
tensors are cut by their first axis between the layers: gathered before a column-parallel one, summed and cut
after a row-parallel one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.te.ranks.distributed import group_size


def _sum(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous().clone()
    torch.distributed.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, group: Any) -> Tensor:
    pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group_size(group))]
    torch.distributed.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces)


def _cut_sum(x: Tensor, group: Any) -> Tensor:
    """This rank's piece, by the first axis, of the sum."""
    size, rank = group_size(group), torch.distributed.get_rank(group)
    if x.shape[0] % size:
        raise BadInput(
            f"sequence parallelism cuts the first axis: its length {x.shape[0]} must be a multiple "
            f"of the {size} ranks."
        )
    return _sum(x, group).chunk(size)[rank].contiguous()


_MOVES: dict[str, tuple[Callable[[Tensor, Any], Tensor], Callable[[Tensor, Any], Tensor]]] = {
    "sum": (_sum, lambda x, group: x),
    "sum_gradient": (lambda x, group: x, _sum),
    "gather": (_gather, _cut_sum),
    "cut": (_cut_sum, _gather),
}


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, group: Any) -> Tensor:
        ctx.kind, ctx.group = kind, group
        moved = _MOVES[kind][0](x, group)
        return moved.view_as(x) if kind == "sum_gradient" else moved

    @staticmethod
    @once_differentiable("a layer that is split over ranks")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _MOVES[ctx.kind][1](dy, ctx.group), None, None


def before_product(x: Tensor, mode: str | None, sequence: bool, group: Any, size: int) -> Tensor:
    """The input of a layer that is split over ``size`` ranks; x itself where it is not.

    Args:
        x: (..., K), cut by its first axis if ``sequence`` and the mode is "column".
        mode: "column", "row" or None.
        sequence: sequence parallelism.
        group: the ranks.
        size: how many there are; 1 sends nothing.
    """
    if size == 1 or mode != "column":
        return x
    moved: Tensor = _Move.apply(x, "gather" if sequence else "sum_gradient", group)
    return moved


def after_product(y: Tensor, mode: str | None, sequence: bool, group: Any, size: int) -> Tensor:
    """The output of such a layer; see `before_product`."""
    if size == 1 or mode != "row":
        return y
    moved: Tensor = _Move.apply(y, "cut" if sequence else "sum", group)
    return moved


def sum_over_ranks(x: Tensor, group: Any, size: int) -> Tensor:
    """The sum of ``x`` over a group's ranks; its gradient is each rank's own.

    ``x`` may have any shape, the same on every rank.
    """
    if size == 1:
        return x
    summed: Tensor = _Move.apply(x, "sum", group)
    return summed
