"""Comparing two models with experts: the second sends its rows where the first sent them.

Where two experts' scores are nearly equal, a rounding decides which of them a row goes to. Logits then differ
by as much as two experts do, which says nothing of the weights. So both passes take the same experts, and
what the routers themselves would have chosen is compared apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.host.expert_weights import weights_of
from fewbits.models.merging.checks import distance

_LEAST_ALIKE = 0.75  # of the pairs of a row and an expert: near ties are few, and a wrong router's are chance


class Routing:
    """Where the first pass sent its rows, which later passes over the same rows are sent as well.

    Attributes:
        expected: what `of` gave in the first pass; None before.
    """

    def __init__(self) -> None:
        self.expected: list[Tensor] | None = None
        self._first: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """Within it, one forward pass of ``model``; the first of all says where rows go.

        Yields:
            For each layer of experts that was called, the weight of each expert for each row as this model's
            own router gives it, (T, E) float32 on the CPU; 0 where an expert was not chosen.
        """
        own: list[Tensor] = []
        calls: list[tuple[Tensor, Tensor]] = []
        hooks = [
            module.register_forward_pre_hook(self._hook(own, calls, _experts_in(module)), with_kwargs=True)
            for module in model.modules()
            if weights_of(module)
        ]
        try:
            yield own
        finally:
            for hook in hooks:
                hook.remove()
        if self.expected is None:
            self.expected, self._first = own, calls

    def _hook(self, own: list[Tensor], calls: list[tuple[Tensor, Tensor]], count: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rows, index, weights, *others = *args, *kwargs.values()
            own.append(_dense(index, weights, count))
            calls.append((index, weights))
            if self.expected is None:
                return None
            index, weights = self._first[len(own) - 1]
            arguments = [rows, index.to(rows.device), weights.to(rows.device, calls[-1][1].dtype), *others]
            return tuple(arguments[: len(args)]), dict(zip(kwargs, arguments[len(args) :], strict=True))

        return hook


def routing_distance(own: list[Tensor], others: list[Tensor]) -> float:
    """How far weights of routing that `Routing.of` gave are from others, where both chose the expert.

    Relative, the largest of all layers; 0.0 without experts, infinite where they hardly choose alike.
    """
    largest = 0.0
    for weights, expected in zip(own, others, strict=True):
        both = (weights != 0) & (expected != 0)
        if both.sum() < _LEAST_ALIKE * (expected != 0).sum():
            return float("inf")
        largest = max(largest, distance(weights[both], expected[both]))
    return largest


def _experts_in(module: nn.Module) -> int:
    names = weights_of(module)
    shapes: Any = getattr(module, "shapes", None) or {names[0]: getattr(module, names[0]).shape}
    return int(shapes[names[0]][0])


def _dense(index: Tensor, weights: Tensor, count: int) -> Tensor:
    """(T, k) experts and their weights as (T, E)."""
    dense = torch.zeros(index.shape[0], count, dtype=torch.float32)
    return dense.scatter_add_(1, index.long().cpu(), weights.float().cpu())


__all__ = ["Routing", "routing_distance"]
