"""Weights that hold a NaN or an infinity are refused before they are packed.

One such value would make its whole block NaN when it is decoded, and the layer's output with it, with
nothing that says which weight it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewbits.errors import NotFinite


class FiniteLater:
    """Whether many tensors are finite, without waiting for a GPU at each: it is asked once, in `wrong`."""

    def __init__(self) -> None:
        self._names: dict[torch.device, list[str]] = {}
        self._largest: dict[torch.device, list[Tensor]] = {}

    def add(self, weight: Tensor, name: str) -> None:
        """Look at one tensor of any shape, under a name of its own; one pass, as `check_finite`.

        Raises:
            NotFinite: one that is not on a GPU holds a NaN or an infinity, as `check_finite` says it.
        """
        if not waits(weight):
            check_finite(weight, name)
        elif weight.numel() and weight.is_floating_point():
            self._names.setdefault(weight.device, []).append(name)
            self._largest.setdefault(weight.device, []).append(largest_of(weight).float())

    def wrong(self) -> list[str]:
        """The names of those that hold a NaN or an infinity, in the order of `add` on each device."""
        names = []
        for device, largest in self._largest.items():
            good = torch.stack(largest).isfinite().tolist()
            names += [name for name, fine in zip(self._names[device], good, strict=True) if not fine]
        return names


def waits(weight: Tensor) -> bool:
    """Whether reading a number of this tensor, of any shape, means waiting for its device."""
    return weight.is_cuda


def largest_of(weight: Tensor) -> Tensor:
    """The largest magnitude () of a tensor of any shape, NaN if a value is; float8 by a copy in bfloat16.

    The norm is one launch on a GPU; on a CPU it takes ten times as long as the smallest and largest value.
    """
    weight = weight.detach()
    weight = weight.bfloat16() if weight.dtype.itemsize == 1 else weight
    if weight.is_cuda:
        norm: Tensor = torch.linalg.vector_norm(weight, torch.inf)
        return norm
    smallest, largest = torch.aminmax(weight)
    return torch.maximum(largest, -smallest)


def check_finite(weight: Tensor, name: str = "a weight") -> None:
    """Refuse a weight that cannot be packed.

    Args:
        weight: (N, K), or any other shape; on the meta device nothing is looked at. One pass, without a
            temporary of its size but for float8; a GPU is waited for.
        name: what the error calls it, such as the full name of its linear with ".weight".

    Raises:
        NotFinite: it holds a NaN or an infinity.
    """
    if weight.device.type == "meta" or not weight.numel() or not weight.is_floating_point():
        return
    weight = weight.detach().bfloat16() if weight.dtype.itemsize == 1 else weight.detach()
    if largest_of(weight).isfinite():
        return
    wrong = (~weight.isfinite()).nonzero()
    first = [int(place) for place in wrong[0]]
    raise NotFinite(
        f"{name} {tuple(weight.shape)} holds a NaN or an infinity in {len(wrong):,} of its values, first "
        f"{float(weight[tuple(first)])} at {first}; it cannot be packed, so take an undamaged checkpoint."
    )


def first_not_finite(model: Any) -> str:
    """What is wrong with the first weight of ``model`` that holds a NaN or an infinity; "" if none does."""
    for name, parameter in model.named_parameters():
        try:
            check_finite(parameter, name)
        except NotFinite as error:
            return str(error).partition(";")[0]
    return ""


def why_not_finite(model: Any) -> str:
    """Why what a model computes is not finite: the end of a sentence, with the first weight that is not."""
    if wrong := first_not_finite(model):
        return f": {wrong}; take an undamaged checkpoint."
    return (
        f", though every weight of this {type(model).__name__} is finite: it overflows in "
        f"{str(model.dtype).removeprefix('torch.')}; load it in another dtype, such as float32."
    )
