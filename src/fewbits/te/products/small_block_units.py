"""Products of MXFP8 and of NVFP4 operands by the units of compute capability 10.0, as torch offers them.

Not run on such a chip yet: what torch is given is checked by its own rules for shapes and types, and by a
definition that takes the scales apart again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.formats.base import Packed
from fewbits.kernels.launch.jit import capability_of

_MULTIPLE = 32  # of all three sides
_GENERATION = 10
_SCALINGS = {"mxfp8": ("BlockWise1x32",), "nvfp4": ("BlockWise1x16", "TensorWise")}


def on_small_block_units(a: Packed, b: Packed) -> bool:
    """Whether a (M, K) and b (N, K) are of one kind and of shapes that this GPU's units multiply."""
    kinds = _kind(a), _kind(b)
    if kinds[0] is None or kinds[0] != kinds[1] or a.codes.device.type != "cuda":
        return False
    if a.codes.dtype == b.codes.dtype == torch.float8_e5m2:
        return False
    sides = (*a.shape, b.shape[0])
    if not all(sides) or any(side % _MULTIPLE for side in sides):
        return False
    return capability_of(a.codes.device)[0] == _GENERATION


def product_on_small_block_units(a: Packed, b: Packed, dtype: torch.dtype, *, bias: Tensor | None) -> Tensor:
    """``a @ b.T + bias`` by the units.

    Args:
        a: (M, K).
        b: (N, K).
        dtype: of the result (M, N).
        bias: (N,) or None; added before the one rounding where the units do that.
    """
    kind = _kind(a)
    assert kind is not None
    fused = bias is not None and dtype != torch.float32
    scalings = [getattr(F.ScalingType, name) for name in _SCALINGS[kind]]
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE][: len(scalings)]
    (of_a, scales_a), (of_b, scales_b) = _for_units(a), _for_units(b)
    y = F.scaled_mm(
        of_a,
        of_b.t(),
        scales_a,
        scalings,
        scales_b,
        scalings,
        swizzle_a=swizzles,
        swizzle_b=swizzles,
        bias=bias.to(dtype) if fused and bias is not None else None,
        output_dtype=dtype,
    )
    return y if bias is None or fused else y.add_(bias.to(dtype))


def _kind(packed: Packed) -> str | None:
    kind: str | None = getattr(packed.format, "units_kind", None)
    return kind


def _for_units(packed: Packed) -> tuple[Tensor, list[Tensor]]:
    format: Any = packed.format
    codes: Tensor
    codes, scales = format.for_units(packed)
    return codes, scales
