"""The arithmetic of scales: from an amax to the number that values are multiplied by, and back.

Transformer Engine's ``scale`` is the multiplier *towards* the codes; what one multiplies by to come back is
its ``scale_inv``. This room keeps those two words where it computes them, and hands `fewbits.formats.Packed`
the ``scale_inv``, which is what the rest of the library calls a scale. All in float32, each step rounded
once. What is of float8 alone stands with its kernels, in `fewbits.kernels.codec.float8_operands`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.kernels.codec.float8_operands import LARGEST as LARGEST
from fewbits.kernels.codec.float8_operands import multiplier_of_amax as multiplier_of_amax
from fewbits.kernels.codec.float8_operands import to_float8 as to_float8

KIND = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_FLOAT32_MAX = torch.finfo(torch.float32).max
_LOWEST_EXPONENT = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}


def updated_scale(amax: Tensor, scale: Tensor, largest: float, margin: int) -> Tensor:
    """Delayed scaling's next multiplier.

    Args:
        amax: (n,) float32, from the history.
        scale: (n,) float32, kept where amax is 0 or not finite.
        largest: of the codes.
        margin: powers of two to stay below.
    """
    new = (amax.new_full((), largest) / amax) / amax.new_full((), 2.0**margin)
    new = torch.where((amax > 0) & amax.isfinite(), new, scale)
    return torch.where(new.isinf(), torch.full_like(new, _FLOAT32_MAX), new)
