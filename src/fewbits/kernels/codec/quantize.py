"""A dense tensor to a packed one, bit for bit as the format's own `quantize` on the same device.

    code[i] = nearest(x[i] * (1 / scale)),   scale = largest |x| of the block, over the format's largest code

and as each format says it exactly: `fewbits.formats.codebook` (NF4 and FP4; with double quantisation the
scales once more, less their mean, in an 8-bit map) and `fewbits.formats.integer` (INT8 and INT4 by blocks,
rows or the tensor, with or without a zero point). Formats and shapes that the kernels do not know (block
sizes that are no power of two, tiles, 8-bit floating point) are computed by their definition. There is no
gradient: rounding for training is fake_quantize.py.

Floor: the dense tensor is read once and the packed one written once. 14336 x 4096 in bfloat16 are 117.4 MB,
in NF4 with double quantisation 30.3 MB: 34.5 us at the 4.28 TB/s that a copy reaches on an H200. A scale for
the whole tensor needs a second reading; with double quantisation the mean of the scales (3.7 MB) stands
between two kernels. Measured there: NF4 59 us, with double quantisation 93, INT4 in groups of 32 50, INT8 by
rows 59, FP4 105 (its thresholds lie too close for the table that NF4 uses).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fewbits.formats.base import Format, Packed
from fewbits.formats.blocks import check_floating
from fewbits.formats.codebook import scale_codes
from fewbits.kernels.codec.dequantize import format_of_text, text_of_format
from fewbits.kernels.codec.quantize_triton import DEFAULT_TILE, RoundTile, launch_round, launch_scales, takes

# 1. The definition.


def quantize_ref(x: Tensor, format: Format) -> Packed:
    """The format's own, rounding to nearest.

    x is floating point of any shape.
    """
    return format.quantize(x)


# 2. The kernels are in quantize_triton.py. 3. The launch.


def launch(x: Tensor, format: Format, tile: RoundTile = DEFAULT_TILE) -> list[Tensor]:
    """The parts of `quantize_ref` by the Triton kernels; else by the definition.

    x is floating point of any shape, on the GPU.
    """
    shape = tuple(x.shape)
    if x.numel() == 0 or not takes(format, shape, x.dtype):
        return list(format.quantize(x).parts.values())
    coding = format.contract.coding
    assert coding is not None
    x = x.detach().contiguous()
    layout = format.layout(shape)
    parts = {n: torch.empty(s.shape, dtype=s.dtype, device=x.device) for n, s in layout.items()}
    if coding.scale_block:
        absmax = torch.empty(prod(layout["scales"].shape), dtype=torch.float32, device=x.device)
        launch_round(x, format, parts["codes"], absmax, tile=tile)
        offset = torch.where(absmax.isfinite(), absmax, 0.0).mean()
        parts["scale_offset"].copy_(offset)
        launch_scales(
            absmax, offset, scale_codes(x.device), coding.scale_block, parts["scales"], parts["scale_scales"]
        )
    else:
        launch_round(x, format, parts["codes"], parts["scales"], parts.get("zero_points"), tile)
    return list(parts.values())


# 4. The op: on a CPU it runs the definition, on CUDA the kernels.


@torch.library.custom_op("fewbits::quantize", mutates_args=())
def _quantize(x: Tensor, format: str) -> list[Tensor]:
    return [part.contiguous() for part in quantize_ref(x, format_of_text(format)).parts.values()]


@_quantize.register_kernel("cuda")
def _(x: Tensor, format: str) -> list[Tensor]:
    return launch(x, format_of_text(format))


@_quantize.register_fake
def _(x: Tensor, format: str) -> list[Tensor]:
    layout = format_of_text(format).layout(tuple(x.shape))
    return [x.new_empty(spec.shape, dtype=spec.dtype) for spec in layout.values()]


# 5. The one public function.


def quantize(x: Tensor, format: Format) -> Packed:
    """Write ``x`` in ``format``, rounding to nearest: ``format.quantize(x)``, on a GPU by its kernels.

    Args:
        x: any shape, floating point; it may be non-contiguous and empty.
        format: any; for stochastic rounding take ``format.quantize(x, seed=...)`` itself.
    """
    check_floating(x)
    parts: Sequence[Tensor] = _quantize(x.detach(), text_of_format(format))
    return Packed(
        format, tuple(x.shape), x.dtype, dict(zip(format.layout(tuple(x.shape)), parts, strict=True))
    )
