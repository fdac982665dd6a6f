"""Ranks that share the weights of a layer (tensor parallelism), and the two sums that this takes.

The first linears of a block are cut by outputs, the last one by inputs, so that each rank computes its own
heads, or its own part of the MLP, and

    y = x + sum over ranks of block_rank(x)        dx = dy + sum over ranks of dblock_rank

Parameters that all ranks hold whole but meet only a part of the gradient (A of a linear cut by outputs, B of
one cut by inputs, the norms of heads) have that summed as well: `own_weight` reads them, and a `WholeLinear`
does so whoever calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fewbits.errors import Unsupported
from fewbits.kernels.launch.derivatives import once_differentiable


@dataclass(frozen=True)
class TensorGroup:
    """The ranks of one layer.

    Attributes:
        process_group: theirs.
        rank: this one's place among them.
        size: how many.
    """

    process_group: Any
    rank: int
    size: int

    def sum_(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place.

        x may have any shape, the same on every rank.
        """
        distributed.all_reduce(x, group=self.process_group)
        return x

    def once(self, x: Tensor | None) -> Tensor | None:
        """What is to be part of a sum one time.

        x may have any shape; the first rank gets it, the others None.
        """
        return x if self.rank == 0 else None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable("a sum over ranks")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_(dy.clone(memory_format=torch.contiguous_format)), None


class _SumValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.sum_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def sum_gradient(x: Tensor, group: TensorGroup) -> Tensor:
    """x itself, whose gradient is summed over the ranks.

    x may have any shape, the same on every rank.
    """
    result: Tensor = _SumGradient.apply(x, group)
    return result


def sum_value(x: Tensor, group: TensorGroup) -> Tensor:
    """The sum of x over the ranks; each rank's x receives the whole gradient.

    x may have any shape, the same on every rank.
    """
    result: Tensor = _SumValue.apply(x, group)
    return result


def own_weight(module: Any) -> Tensor:
    """``module.weight``, of any shape; its gradient is summed if the module's ``tensor_group`` says so."""
    weight: Tensor = module.weight
    group = vars(module).get("tensor_group")
    return weight if group is None or not weight.requires_grad else sum_gradient(weight, group)


class WholeLinear(nn.Linear):
    """A linear without bias that each rank of a layer holds whole and uses for its own part.

    Its weight's gradient is summed over the ranks, whoever calls it.
    """

    tensor_group: TensorGroup

    @staticmethod
    def take(linear: nn.Linear, group: TensorGroup) -> None:
        """Make ``linear`` such a one, with its parameters and hooks."""
        if type(linear) is not nn.Linear or linear.bias is not None:
            raise Unsupported(
                f"an adapter has a {type(linear).__name__} where ranks share plain linears without bias only;"
                " make the adapter with PEFT's plain LoRA."
            )
        linear.__class__ = WholeLinear
        vars(linear)["tensor_group"] = group

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        return nn.functional.linear(x, own_weight(self))
