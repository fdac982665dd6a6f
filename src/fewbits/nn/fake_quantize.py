"""Fake quantisation: the forward pass sees the rounded value, the gradient passes straight through.

The gradient is not clipped. The formats take their scales from the values themselves, afresh in each step, so
no value ever lies outside of the representable range, and a clipped straight-through estimator would clip
nothing. How it is computed is in `fewbits.kernels.product.fake_quantize`.
"""

from __future__ import annotations

from torch import Tensor, nn

from fewbits.formats.base import Format
from fewbits.kernels.product.fake_quantize import fake_quantize, fake_quantized_linear
from fewbits.nn.linear import take_parameters

__all__ = ["FakeQuantizedLinear", "fake_quantize"]


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
        layer: FakeQuantizedLinear = take_parameters(cls, linear)
        layer.weight_format, layer.activation_format = weight_format, activation_format
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        return self.product(x, self.weight)

    def product(
        self, x: Tensor, weight: Tensor, adapter: tuple[Tensor, Tensor, float] | None = None
    ) -> Tensor:
        """The layer's product with ``weight`` (N, K) in place of its own, rounded as its own would be.

        Args:
            x: (..., K).
            weight: (N, K).
            adapter: A (r, K), B (N, r) and the factor of ``B @ A``, which is added before the rounding.
        """
        return fake_quantized_linear(
            x,
            weight,
            self.bias,
            weight_format=self.weight_format,
            activation=self.activation_format,
            adapter=adapter,
        )

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        activation = "" if self.activation_format is None else f", activation={self.activation_format.name}"
        return f"{super().extra_repr()}, weight={self.weight_format.name}{activation}"
