"""Where a weight's gradient goes other than to autograd: into ``main_grad``, or later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput


def _pieces(module: nn.Module, names: Sequence[str], whole: Tensor) -> list[tuple[Any, Tensor]]:
    """Each parameter with its rows of a gradient."""
    parameters = [getattr(module, name) for name in names]
    return list(zip(parameters, whole.split([len(p) for p in parameters]), strict=True))


def gradient_keeper(
    module: nn.Module, names: Sequence[str], enabled: bool
) -> Callable[[Tensor], None] | None:
    """A function that adds a gradient (N, K) to the parameters' ``main_grad``; None unless ``enabled``.

    A parameter whose attribute ``overwrite_main_grad`` is True has its ``main_grad`` replaced instead, and
    ``grad_added_to_main_grad`` is set to True where it exists, as Megatron's optimizers expect.
    """
    if not enabled:
        return None

    def keep(gradient: Tensor) -> None:
        for parameter, piece in _pieces(module, names, gradient):
            target = getattr(parameter, "main_grad", None)
            if target is None:
                raise BadInput(
                    "fuse_wgrad_accumulation adds to weight.main_grad, which this weight lacks: "
                    "set it to a tensor of the weight's shape before the backward pass."
                )
            if getattr(parameter, "overwrite_main_grad", False):
                target.copy_(piece)
            else:
                target.add_(piece)
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True

    return keep


class Later:
    """Gradients that wait, first in, first out."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def note(
        self, module: nn.Module, weights: Sequence[str], biases: Sequence[str]
    ) -> Callable[[Callable[[], tuple[Tensor, Tensor | None]]], None]:
        """What a product calls with the function that computes its gradients."""

        def take(compute: Callable[[], tuple[Tensor, Tensor | None]]) -> None:
            def finish() -> None:
                dw, db = compute()
                keep = gradient_keeper(
                    module, weights, bool(getattr(module, "fuse_wgrad_accumulation", False))
                )
                if keep is not None:
                    keep(dw)
                else:
                    _add(_pieces(module, weights, dw))
                if db is not None and biases:
                    _add(_pieces(module, biases, db))

            self._waiting.append(finish)

        return take

    def compute(self) -> None:
        """Compute the gradients that have waited longest."""
        if not self._waiting:
            raise BadInput(
                "backward_dw has nothing to compute: run a backward pass through the module first."
            )
        with torch.no_grad():
            self._waiting.popleft()()


def _add(pieces: list[tuple[Any, Tensor]]) -> None:
    for parameter, piece in pieces:
        piece = piece.to(parameter.dtype)
        parameter.grad = piece.clone() if parameter.grad is None else parameter.grad + piece
