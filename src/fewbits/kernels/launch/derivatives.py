"""Gradients that have no gradient of their own say so, instead of giving a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported


class _Refused(torch.autograd.Function):
    """``count`` values whose own derivative is refused; what follows them is what they depend on."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(value.view_as(value) for value in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise Unsupported(
            f"{ctx.name} can be differentiated once and not twice, as its backward pass rounds or keeps "
            "intermediate values; leave create_graph out, or take the plain layers of torch for that loss."
        )


def refuse_second(name: str, gradients: tuple[Any, ...], sources: Iterable[Any]) -> tuple[Any, ...]:
    """The same gradients, from which no gradient can be taken; those that are None stay.

    Args:
        name: of what they are the gradients of.
        gradients: of a backward pass.
        sources: what they were made from: torch asks only nodes on the way to what it differentiates by.
    """
    places = [i for i, gradient in enumerate(gradients) if isinstance(gradient, Tensor)]
    if not places:
        return gradients
    padded = list(gradients)
    values = [gradients[i].detach().requires_grad_() for i in places]
    linked = [x for x in sources if isinstance(x, Tensor) and x.requires_grad]
    refused = _Refused.apply(name, len(values), *values, *linked)
    for i, value in zip(places, refused, strict=True):
        padded[i] = value
    return tuple(padded)


class _Way(torch.autograd.Function):
    """No value at all, but a way in the graph to the tensors given; holds none of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> Tensor:
        ctx.count = len(tensors)
        some: Tensor = next(x for x in tensors if x is not None)
        return some.new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:  # only behind `_Refused`, which raises before
        return (None,) * ctx.count


def keep_ways(ctx: Any, *tensors: Tensor | None) -> None:
    """Let a node that does not save its inputs remember the way to them, for `once_differentiable`.

    Without it the refusal lies on no path to an input that the node saved nothing of, and
    `torch.autograd.grad(..., inputs)` leaves its term out without a word where another path leads there.
    To be called in ``forward`` or ``setup_context``; keeps no memory of the tensors.
    """
    ctx.way = None
    if torch.compiler.is_compiling() or not any(x is not None and x.requires_grad for x in tensors):
        return
    with torch.enable_grad():
        ctx.way = _Way.apply(*tensors)


class _Reading:
    """A node's context that remembers the tensors that were read: checkpointing gives them only once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.tensors: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ctx, name)
        if name == "saved_tensors":
            self.tensors = value
        return value


def once_differentiable(
    name: str, when: Callable[[Any], bool] = lambda ctx: True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For the backward pass of an autograd node: its result has no gradient, and says so when asked for one.

    Args:
        name: of what the user called, for the message.
        when: for which of the node's contexts; for the others the backward pass is differentiated as it is.

    `torch.autograd.function.once_differentiable` does the same, but names neither the function nor a way out.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def once(ctx: Any, *grads: Any) -> Any:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not when(ctx):
                return backward(ctx, *grads)
            reading = _Reading(ctx)
            with torch.no_grad():  # the backward pass of a pass with create_graph
                gradients = backward(reading, *grads)
            return refuse_second(name, gradients, (*grads, *reading.tensors, getattr(ctx, "way", None)))

        return once

    return decorate
