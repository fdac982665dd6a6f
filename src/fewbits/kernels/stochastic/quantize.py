"""Rows to the signs and magnitudes of stochastic computing, with a scale for each row and chunk.

For x (..., D) and C chunks of at most ``chunk_d`` of the D dimensions, with Q the largest code:

* where there are smooth scales f (D,): a is first divided, b multiplied by them, in x's dtype
* ``s = max(max |x|, 1e-5) / Q`` of each row's chunk
* one chunk: ``code = round(x / s)``; several: ``code = round(x * (1 / s))``; ties to even, cut to -Q ... Q

Each step is one IEEE float32 operation in this order, so every device gives the same bits. A row's chunk with
a value that is not finite has the scale NaN and codes 0. There is no gradient.

Floor: x is read once, a byte is written for each code and 4 for each scale: 2048 x 4096 in bfloat16 are
25.4 MB, 5.9 us at the 4.28 TB/s that a copy reaches on an H200; for few rows a launch is all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.stochastic import Stochastic, stochastic_options
from fewbits.kernels.codec.dequantize import format_of_text, text_of_format
from fewbits.kernels.launch.ops import passes_dispatcher
from fewbits.kernels.stochastic.quantize_triton import launch, takes

# 1. The definition.


def quantize_stochastic_ref(
    x: Tensor, options: Stochastic, smooth_scales: Tensor | None = None, *, is_b: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes int8 (..., D) and scales float32 (..., C); see `quantize_stochastic`."""
    packed = options.quantize(smoothed(x, smooth_scales, is_b=is_b))
    return packed.codes, packed.scales


def smoothed(x: Tensor, smooth_scales: Tensor | None, *, is_b: bool = False) -> Tensor:
    """x with its smooth scales applied, in its own dtype.

    x is (..., D), ``smooth_scales`` (D,); the result has x's shape.
    """
    if smooth_scales is None:
        return x
    scales = smooth_scales.to(x.dtype)
    return x * scales if is_b else x / scales


# 2. The kernel is in quantize_triton.py. 4. The op: on a CPU the definition, on CUDA the kernel.


@torch.library.custom_op("fewbits::quantize_stochastic", mutates_args=())
def _quantize(x: Tensor, smooth_scales: Tensor | None, options: str, is_b: bool) -> tuple[Tensor, Tensor]:
    return quantize_stochastic_ref(x, _options(options), smooth_scales, is_b=is_b)


@_quantize.register_kernel("cuda")
def _cuda_quantize(
    x: Tensor, smooth_scales: Tensor | None, options: str, is_b: bool
) -> tuple[Tensor, Tensor]:
    if x.numel() == 0 or not takes(x):
        return quantize_stochastic_ref(x, _options(options), smooth_scales, is_b=is_b)
    return launch(x, smooth_scales, _options(options), is_b=is_b)


@_quantize.register_fake
def _(x: Tensor, smooth_scales: Tensor | None, options: str, is_b: bool) -> tuple[Tensor, Tensor]:
    parts = _options(options).layout(tuple(x.shape))
    codes, scales = (x.new_empty(part.shape, dtype=part.dtype) for part in parts.values())
    return codes, scales


def _options(text: str) -> Stochastic:
    options = stochastic_options(format_of_text(text))
    assert options is not None
    return options


# 5. The one public function.


def quantize_stochastic(
    x: Tensor, options: Stochastic, smooth_scales: Tensor | None = None, *, is_b: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes int8 (..., D) and scales float32 (..., C) of x's rows.

    Args:
        x: (..., D), floating point.
        options: which codes and chunks; their prepared operands must be possible (`Stochastic.prepares`).
        smooth_scales: (D,); see the module's text.
        is_b: whether x is b.

    Raises:
        BadInput: x is not floating point.
        Unsupported: options with operands of other kinds.
    """
    if not x.is_floating_point():
        raise BadInput(f"x is {x.dtype}, and its quantiser needs a floating-point tensor; convert it first.")
    on_cuda = passes_dispatcher(x)  # whose call costs the host as much as such a kernel takes
    return (_cuda_quantize if on_cuda else _quantize)(
        x.detach(), smooth_scales, text_of_format(options), is_b
    )
