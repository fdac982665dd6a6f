"""Weights that hold a NaN or an infinity are refused before they are packed.

One such value would make its whole block NaN when it is decoded, and the layer's output with it, with
nothing that says which weight it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.errors import NotFinite


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
    if torch.stack(torch.aminmax(weight)).isfinite().all():
        return
    wrong = (~weight.isfinite()).nonzero()
    first = [int(place) for place in wrong[0]]
    raise NotFinite(
        f"{name} {tuple(weight.shape)} holds a NaN or an infinity in {len(wrong):,} of its values, first "
        f"{float(weight[tuple(first)])} at {first}; it cannot be packed, so take an undamaged checkpoint."
    )
