"""Keys and values of a decode step: those of all layers of one shape in one tensor.

Texts come into a batch and leave it. What a text takes with it are the keys and values of every layer; where
these lie in one tensor, one copy moves them and not one for each layer and side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[int, int, int, int]  # batch, heads of keys, room, head size


class StepCache:
    """Zeros for the keys and values of a number of layers.

    Attributes:
        keys, values: of each layer (batch, kv_heads, room, head size).
    """

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> None:
        """Make room; ``shapes``: of each layer's keys, and of its values."""
        layers_of: dict[Shape, list[int]] = {}
        for layer, shape in enumerate(shapes):
            layers_of.setdefault(shape, []).append(layer)
        # Of each shape: its layers, and (layers, 2, batch, kv_heads, room, head size), keys before values.
        self._groups = [
            (layers, torch.zeros(len(layers), 2, *shape, dtype=dtype, device=device))
            for shape, layers in layers_of.items()
        ]
        places = {layer: whole[i] for layers, whole in self._groups for i, layer in enumerate(layers)}
        self.keys = [places[layer][0] for layer in range(len(shapes))]
        self.values = [places[layer][1] for layer in range(len(shapes))]

    def put(self, slot: int, keys: Sequence[Tensor] | Tensor, values: Sequence[Tensor] | Tensor) -> None:
        """Write a text's keys and values to the beginning of a row.

        Args:
            slot: the row.
            keys: of each layer (kv_heads, tokens, head size), or of all layers one tensor with a dimension
                in front. Layers without room in this cache are left out.
            values: likewise.
        """
        for layers, whole in self._groups:
            if not whole.shape[4]:
                continue
            for side, states in enumerate((keys, values)):
                all_layers = isinstance(states, Tensor) and len(layers) == len(states)
                chosen = states if all_layers else torch.stack([states[layer] for layer in layers])
                assert isinstance(chosen, Tensor)
                whole[:, side, slot, :, : chosen.shape[2]] = chosen

    def move(self, source: int, target: int, end: int) -> None:
        """Write the first ``end`` tokens of one row to another row."""
        for _, whole in self._groups:
            whole[:, :, target, :, :end] = whole[:, :, source, :, :end]
