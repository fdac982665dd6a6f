"""What a GPU computes in plain torch, because no kernel knows its format: sentences for the receipt.

Every format works on every device, by its definition where no kernel does it: the numbers are the same, and
only the time differs. Whoever chose the format should read that before a long run, not find it in a profile.
What is said depends on formats and shapes alone, so a model that is still on the CPU says it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from fewbits.decoder.parts import FLOAT8
from fewbits.formats.base import Format
from fewbits.kernels.codec.dequantize import has_kernel
from fewbits.kernels.codec.quantize_triton import takes
from fewbits.kernels.product.matmul_packed import PLAIN
from fewbits.kernels.stochastic.codes import without_tables
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.words import counted


def gpu_fallbacks(model: nn.Module) -> Iterator[str]:
    """For each format without a GPU kernel that a layer of ours uses: what is computed in plain torch."""
    told = (_decoded, _rounded, _streamed)
    counts = Counter(what for layer in model.modules() for what in {w for of in told for w in of(layer)})
    for what, count in counts.items():
        yield (
            f"on a GPU {what} in plain torch, for want of a kernel: the same numbers in more time"
            f" ({counted(count, 'layer')})"
        )


def _decoded(layer: nn.Module) -> Iterator[str]:
    """What is said of a layer's packed weights that products decode."""
    stored: list[tuple[Format, tuple[int, ...]]] = []
    if isinstance(layer, QuantizedLinear) and layer.format.contract.product == "decoded":
        stored.append((layer.format, (layer.out_features, layer.in_features)))
    elif isinstance(layer, QuantizedExperts):
        stored.extend((format, layer.shapes[name]) for name, format in layer.formats.items())
    for format, shape in stored:
        if not has_kernel(format, shape):
            yield f"weights in {format.name} are decoded"


def _rounded(layer: nn.Module) -> Iterator[str]:
    """What is said of values that are rounded in each step."""
    if isinstance(layer, FakeQuantizedLinear):
        shape = (layer.out_features, layer.in_features)
        for format in (layer.weight_format, layer.activation_format):
            if format is None or format.contract.product != "decoded":
                continue
            if not takes(format, shape, torch.bfloat16):
                yield f"values are rounded to {format.name} in each step"
    elif isinstance(layer, QuantizedLinear | LowPrecisionLinear) and layer.operands not in (PLAIN, FLOAT8):
        operands = layer.operands
        for format in (operands.activation, operands.gradient, operands.weight_operand):
            if format is not None:
                yield f"operands of products are rounded to {format.name}"


def _streamed(layer: nn.Module) -> Iterator[str]:
    """What is said of a layer whose product is that of stochastic streams."""
    if isinstance(layer, StochasticLinear) and not layer.int8 and not layer.exact:
        reason = without_tables(layer.format)
        if reason:
            yield f"stochastic products ({reason}) are computed"
