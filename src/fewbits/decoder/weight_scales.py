"""The one float8 scale of weights side by side, in the shapes in which products take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fewbits.formats.base import Packed
from fewbits.kernels.product.matmul_float8 import scale_row, weight_scale, weight_scales


class WeightScale(NamedTuple):
    """The one scale of weights side by side, in the shapes that the products take; all float32."""

    inverse: Tensor  # (1, 1)
    outputs: Tensor  # (1, N), the scale over and over: for y
    inputs: Tensor  # (1, K): for dx


def scale_of(weights: Sequence[Packed | Tensor]) -> WeightScale:
    """The scale of the weights (N_i, K) of one product."""
    one = weight_scale(*weights)
    N, K = sum(int(w.shape[0]) for w in weights), int(weights[0].shape[1])
    return WeightScale(one.reciprocal(), scale_row(one, N), scale_row(one, K))


def scales_of(groups: Sequence[Sequence[Tensor]]) -> list[WeightScale]:
    """`scale_of` the dense weights (N_i, K) of each product: a model's on one device, in few launches."""
    scales = weight_scales(groups)
    sides = [(sum(int(w.shape[0]) for w in group), int(group[0].shape[1])) for group in groups]
    widest = -(-max(max(side) for side in sides) // 4) * 4  # rows begin at multiples of 16 bytes
    rows = scales[:, None].expand(-1, widest).contiguous()
    inverses = scales.reciprocal()[:, None].expand(-1, 4).contiguous()
    return [
        WeightScale(inverse[:1].view(1, 1), row[:N].view(1, N), row[:K].view(1, K))
        for inverse, row, (N, K) in zip(inverses, rows, sides, strict=True)
    ]
