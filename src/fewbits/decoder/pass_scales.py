"""Scales of float8 weights that train: found for all layers at once where a pass begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fewbits.decoder.weight_scales import scales_of

if TYPE_CHECKING:
    from fewbits.decoder.parts import LayerParts


class PassScales:
    """The float8 scales of all weights that train, found at once when a pass over the layers begins.

    A layer takes its own once, and only if the layers before it have just run. Called in any other order (one
    by itself, or in a backward pass that computes it again) it finds them at that moment: scales of an
    earlier pass would be those of other weights.
    """

    def __init__(self) -> None:
        self._next = 0

    def before(self, number: int, layers: Sequence[LayerParts], device: torch.device) -> None:
        """The layer of this number is about to run."""
        if number == 0:
            self._begin(layers, device)
        elif number != self._next:
            _forget(layers)
        self._next = number + 1

    @torch.no_grad()
    def _begin(self, layers: Sequence[LayerParts], device: torch.device) -> None:
        _forget(layers)
        if not layers[0].trained(device) and not layers[-1].trained(device):
            return  # nothing trains but adapters
        products = [(parts, *product) for parts in layers for product in parts.trained(device)]
        for (parts, paths, weights), scale in zip(
            products, scales_of([w for *_, w in products]), strict=True
        ):
            parts.found[paths] = weights, scale


def _forget(layers: Sequence[LayerParts]) -> None:
    for parts in layers:
        parts.found.clear()
