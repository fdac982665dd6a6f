"""Which class of layer a format takes, packed and while it trains."""

from __future__ import annotations

from torch import nn

from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import LinearFormats, QuantizedLinear


def packed_layer(linear: nn.Linear, rule: LinearFormats) -> QuantizedLinear:
    """The layer that holds ``linear``'s weight in ``rule.weight``; see `QuantizedLinear.from_linear`."""
    if rule.weight is not None and rule.weight.contract.product == "stochastic":
        from fewbits.nn.stochastic.linear import StochasticLinear

        return StochasticLinear.from_linear(
            linear, rule, smooth_scales=getattr(linear, "smooth_scales", None)
        )
    return QuantizedLinear.from_linear(linear, rule)


def fake_layer(linear: nn.Linear, rule: LinearFormats) -> FakeQuantizedLinear:
    """The trainable layer that computes what `packed_layer` will; see `FakeQuantizedLinear.from_linear`."""
    assert rule.weight is not None
    if rule.weight.contract.product == "stochastic":
        from fewbits.nn.stochastic.qat import StochasticQATLinear

        return StochasticQATLinear.from_linear(linear, rule.weight, rule.activation)
    return FakeQuantizedLinear.from_linear(linear, rule.weight, rule.activation)
