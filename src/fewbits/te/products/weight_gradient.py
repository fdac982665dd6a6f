"""Where a weight's gradient goes other than to autograd: into ``main_grad``, or later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput

Place = str | tuple[str, int]
"""A parameter's name, or that of a parameter of several matrices and which of them."""


def _pieces(module: nn.Module, places: Sequence[Place], whole: Tensor) -> list[tuple[Any, Any, Tensor]]:
    """Each parameter, which entry of it is meant (``...`` for all of it), and its rows of a gradient."""
    pairs = [(place, ...) if isinstance(place, str) else place for place in places]
    parameters = [(getattr(module, name), entry) for name, entry in pairs]
    rows = whole.split([len(parameter[entry]) for parameter, entry in parameters])  # type: ignore[no-untyped-call]
    return [(*pair, piece) for pair, piece in zip(parameters, rows, strict=True)]


def gradient_keeper(
    module: nn.Module, places: Sequence[Place], enabled: bool
) -> Callable[[Tensor], None] | None:
    """A function that adds a gradient (N, K) to the parameters' ``main_grad``; None unless ``enabled``.

    A parameter whose attribute ``overwrite_main_grad`` is True has its ``main_grad`` replaced instead, and
    ``grad_added_to_main_grad`` is set to True where it exists, as Megatron's optimizers expect.
    """
    if not enabled:
        return None

    def keep(gradient: Tensor) -> None:
        for parameter, entry, piece in _pieces(module, places, gradient):
            target = getattr(parameter, "main_grad", None)
            if target is None:
                raise BadInput(
                    "fuse_wgrad_accumulation adds to weight.main_grad, which this weight lacks: "
                    "set it to a tensor of the weight's shape before the backward pass."
                )
            if getattr(parameter, "overwrite_main_grad", False):
                target[entry].copy_(piece)
            else:
                target[entry].add_(piece)
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True

    return keep


class Later:
    """Gradients that wait, first in, first out."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def note(
        self, module: nn.Module, weights: Sequence[Place], biases: Sequence[Place]
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


def _add(pieces: list[tuple[Any, Any, Tensor]]) -> None:
    for parameter, entry, piece in pieces:
        piece = piece.to(parameter.dtype)
        if entry is ...:
            parameter.grad = piece.clone() if parameter.grad is None else parameter.grad + piece
        else:
            whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            whole[entry] += piece
            parameter.grad = whole
