"""Fake quantisation: the forward pass sees the rounded value, the gradient passes straight through.

The gradient is not clipped. The formats take their scales from the values themselves, afresh in each step, so
no value ever lies outside of the representable range, and a clipped straight-through estimator would clip
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.formats.base import Format
from fewbits.kernels.matmul_packed import product_dtype
from fewbits.nn.linear import take_parameters


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return format.dequantize(format.quantize(x), dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.to(ctx.dtype), None, None


def fake_quantize(x: Tensor, format: Format | None, dtype: torch.dtype | None = None) -> Tensor:
    """``dequantize(quantize(x))`` in ``dtype`` (default: x's); ``dx = dy``."""
    if format is None:
        return x if dtype is None else x.to(dtype)
    return _FakeQuantize.apply(x, format, x.dtype if dtype is None else dtype)  # type: ignore[no-any-return]


class FakeQuantizedLinear(nn.Linear):
    """A linear layer that computes what it will once its weight is packed; the weight trains meanwhile.

    Attributes:
        weight_format: the format in which the weight will be stored.
        activation_format: the format to which the input is rounded, or None.
    """

    weight_format: Format
    activation_format: Format | None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, weight_format: Format, activation_format: Format | None = None
    ) -> FakeQuantizedLinear:
        """The layer with ``linear``'s own parameters."""
        made: FakeQuantizedLinear = take_parameters(cls, linear)
        made.weight_format, made.activation_format = weight_format, activation_format
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        return self.product(x, self.weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The layer's product with ``weight`` (N, K) in place of its own, rounded as its own would be."""
        dtype = product_dtype(x)
        x = x.to(dtype)
        if self.activation_format is not None:
            x = fake_quantize(x.reshape(-1, x.shape[-1]), self.activation_format).view(x.shape)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x, fake_quantize(weight, self.weight_format, dtype), bias)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        activation = "" if self.activation_format is None else f", activation={self.activation_format.name}"
        return f"{super().extra_repr()}, weight={self.weight_format.name}{activation}"
