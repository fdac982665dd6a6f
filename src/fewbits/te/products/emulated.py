"""Products of operands that a GPU's units do not multiply, by its bfloat16 units; see `product.py`.

A value of MXFP8 is a float8 number times a power of two, one of NVFP4 without the tensor's scale the product
of numbers of two and of four significant bits: bfloat16 holds both exactly, and codes under one scale too.
So nothing is rounded but the result, and the sums are in float32; only their order is another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fewbits.formats.base import Packed


def in_bfloat16(packed: Packed) -> tuple[Tensor, Tensor | None] | None:
    """A matrix (M, K) as values that bfloat16 holds, and the scales (1 or M, 1) that they lack.

    The scales are None where nothing is lacking, and all is None for formats whose values bfloat16 rounds.
    """
    own: Callable[[Packed], tuple[Tensor, Tensor | None]] | None = getattr(packed.format, "in_bfloat16", None)
    if own is not None:
        return own(packed)
    coding = packed.format.contract.coding
    if coding is not None and coding.is_float8 and coding.block == (0, 0):
        return packed.codes.to(torch.bfloat16), packed.scales.reshape(1, 1)
    return None


def product_in_bfloat16(a: Packed, b: Packed, dtype: torch.dtype) -> Tensor | None:
    """``a @ b.T`` (M, N) in ``dtype``; None where an operand is of no such format.

    Args:
        a: (M, K).
        b: (N, K).
        dtype: of the result.
    """
    of_a, of_b = in_bfloat16(a), in_bfloat16(b)
    if of_a is None or of_b is None:
        return None
    (a_MK, scale_M1), (b_NK, scale_N1) = of_a, of_b
    if a_MK.device.type == "cuda":
        y = torch.mm(a_MK, b_NK.t(), out_dtype=torch.float32)
    else:
        y = a_MK.float() @ b_NK.float().t()
    if scale_M1 is None or scale_N1 is None:
        return y.to(dtype)
    scale = scale_M1 * scale_N1 if scale_N1.numel() == 1 else scale_M1 * scale_N1.t()
    return torch.mul(y, scale, out=torch.empty_like(y, dtype=dtype))
