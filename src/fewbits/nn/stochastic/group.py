"""Stochastic layers with one input, multiplied as one: for a token or a few, where launches cost most.

    y_1 | y_2 | ... = SC(x, W_1 | W_2 | ...)        rows of a weight are independent: the same bits as apart

q, k and v of an attention block, or gate and up of an MLP: x is quantised once and one product serves all.
Their codes then lie in one tensor, of which each layer's parameters are a part, so nothing is stored twice.
The first of the layers that is called with an x computes for all, and the others take their part if they are
called with the very same tensor; it is held until they have, so that no other can be taken for it. What the
layers compute does not change in any case. A host that wrote into x between two of the calls would break
this; no model of a known family does.

It applies without gradients, up to `MOST_ROWS` rows, and as long as every layer still holds its part:
loading, moving or packing a weight anew ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.formats.base import Packed
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.product.matmul_packed import product_dtype
from fewbits.kernels.stochastic.rows import stochastic_rows

MOST_ROWS = 16
Member = Any  # a StochasticLinear, whose module imports this one


class _Pending(NamedTuple):
    """What was computed for an input, by place; a part that was taken is None."""

    x: Tensor
    parts: list[Tensor | None]


class StochasticGroup:
    """Layers of one input; see the module's text.

    Attributes:
        layers: them, in the order of their outputs.
        packed: their weights as one.
    """

    def __init__(self, layers: Sequence[Member]) -> None:
        """Lay the layers' weights side by side and make each layer's its part.

        Raises:
            Unsupported: the layers cannot be multiplied as one; nothing is changed then.
        """
        why = obstacle(layers)
        if why:
            raise Unsupported(f"these layers cannot share an input: {why}.")
        self.layers = list(layers)
        first = self.layers[0].packed
        self.sizes = [layer.out_features for layer in self.layers]
        parts = {
            name: torch.cat([layer.packed.parts[name].detach() for layer in self.layers])
            for name in first.parts
        }
        self.packed = Packed(first.format, (sum(self.sizes), first.shape[1]), first.dtype, parts)
        split = {name: part.split(self.sizes) for name, part in parts.items()}
        for i, layer in enumerate(self.layers):
            for name, own in split.items():
                layer.register_parameter(f"weight_{name}", nn.Parameter(own[i], requires_grad=False))
            layer.group = self
        self._pending: _Pending | None = None

    def dissolve(self) -> None:
        """Let every layer have its weight for itself again."""
        for layer in self.layers:
            layer.group = None
            layer.load_packed(
                Packed(layer.format, layer.packed.shape, layer.dtype, _copies(layer.packed.parts))
            )
        self._pending = None

    def product(self, layer: Member, x: Tensor) -> Tensor | None:
        """The layer's product with x (..., K), without its bias, (rows, N); None if it is alone.

        In float32, or rounded already if no layer of the group has a bias to add.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        place, pending = self.layers.index(layer), self._pending
        if pending is None or pending.x is not x or pending.parts[place] is None:
            if not self._applies(x):
                return None
            pending = self._pending = _Pending(x, list(self._computed(x).split(self.sizes, dim=1)))
        y, pending.parts[place] = pending.parts[place], None
        if all(part is None for part in pending.parts):
            self._pending = None
        return y

    def _computed(self, x: Tensor) -> Tensor:
        first, dtype = self.layers[0], product_dtype(x)
        rows = rows_of(x.to(dtype))
        biased = any(layer.bias is not None for layer in self.layers)
        b, smooth, levels = self.packed, first.smooth_scales, first.levels
        return stochastic_rows(
            rows, b.codes, b.scales, first.format, smooth, levels, torch.float32 if biased else dtype
        )

    def _applies(self, x: Tensor) -> bool:
        codes = self.packed.codes
        if x.numel() > MOST_ROWS * x.shape[-1] or x.device != codes.device:
            return False
        at, step = codes.data_ptr(), codes.stride(0)
        for layer, size in zip(self.layers, self.sizes, strict=True):
            if layer.weight_codes.data_ptr() != at or obstacle_of(layer) is not None:
                return False
            at += size * step
        return True


def obstacle(layers: Sequence[Member]) -> str:
    """Why these layers cannot be a group; "" if they can."""
    if len(layers) < 2:
        return "there are fewer than two"
    first = layers[0]
    for layer in layers:
        why = obstacle_of(layer)
        if why is not None:
            return why
        alike = (layer.in_features, layer.format, layer.levels, layer.device, layer.dtype)
        if alike != (first.in_features, first.format, first.levels, first.device, first.dtype):
            return "their inputs, options, stream lengths, devices or dtypes differ"
        ours, theirs = layer.smooth_scales, first.smooth_scales
        if (ours is None) != (theirs is None) or (
            ours is not None and theirs is not None and not torch.equal(ours, theirs)
        ):
            return "their smooth_scales differ"
    return ""


def obstacle_of(layer: Member) -> str | None:
    """Why a layer cannot be in any group; None if it can."""
    if layer.int8 or layer.exact or layer.protected is not None or layer.level_index is not None:
        return "one runs INT8 or exact, has protected channels or several stream lengths"
    return None


def _copies(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.detach().clone() for name, part in parts.items()}
