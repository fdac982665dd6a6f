"""`StochasticQATLinear`: a linear layer that computes what stochastic hardware will, while its weight trains.

The forward pass is exactly the stochastic product of the input with the present weight; the gradient passes
straight through (`fewbits.nn.stochastic.product`). With LoRA the effective weight ``W + s B A`` goes through
the streams as a whole, so merging and then preparing it changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.base import Format
from fewbits.formats.stochastic import Stochastic, stochastic_options
from fewbits.kernels.product.fake_quantize import lora_weight
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.stochastic.product import stochastic_product


class StochasticQATLinear(FakeQuantizedLinear):
    """A linear layer whose product is stochastic and whose weight, or adapter, trains.

    Attributes:
        weight_format: the options of the product; the prepared weight will be stored in them.
        smooth_scales: (K,), see `stochastic_product`; None: ones.
    """

    weight_format: Stochastic
    smooth_scales: Tensor | None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, weight_format: Format, activation_format: Format | None = None
    ) -> StochasticQATLinear:
        """The layer with ``linear``'s own parameters.

        Raises:
            Unsupported: a format that is not stochastic, or one for the input beside it.
        """
        if stochastic_options(weight_format) is None:
            raise Unsupported(
                f"the format {weight_format.name!r} has no stochastic product; give a Stochastic(...) format."
            )
        if activation_format is not None:
            raise Unsupported(
                f"a stochastic product quantises its input itself, so activation={activation_format.name!r} "
                "has no place; leave it out."
            )
        layer: Any = super().from_linear(linear, weight_format)
        layer.register_buffer("smooth_scales", None)
        return layer  # type: ignore[no-any-return]

    def smooth(self, scales: Tensor | None) -> None:
        """Take ``scales`` (K,) as smooth_scales."""
        if scales is not None and (scales.shape != (self.in_features,) or not bool((scales > 0).all())):
            raise BadInput(
                f"smooth_scales has shape {tuple(scales.shape)} or a value that is not positive; give"
                f" {self.in_features} positive numbers, one for each input."
            )
        self.smooth_scales = scales

    def product(
        self, x: Tensor, weight: Tensor, adapter: tuple[Tensor, Tensor, float] | None = None
    ) -> Tensor:
        """The stochastic product with ``weight`` (N, K) in place of its own; see `FakeQuantizedLinear`."""
        if adapter is not None:
            weight = lora_weight(weight, *adapter)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = stochastic_product(x.flatten(0, -2), weight, self.weight_format, self.smooth_scales)
        y = y if self.bias is None else y + self.bias.float()  # and one rounding, as the prepared layer does
        return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])
