"""Factors of scales: gradients of the definition, and a packed weight that decodes to what was trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fewbits.formats import FORMATS
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.trained_scales import TrainedScales, has_free_scales
from fewbits.recipes import Rule

NAMES = ("int4_g32", "int3_g32_zp", "int8", "nf4", "fp4", "ternary_row", "float8_e4m3_row")


def layer(name: str, bias: bool = True) -> QuantizedLinear:
    torch.manual_seed(0)
    linear = nn.Linear(64, 24, bias=bias, dtype=torch.float32)
    return QuantizedLinear.from_linear(linear, Rule(weight=FORMATS[name]))


@pytest.mark.parametrize("name", NAMES)
def test_scales_train_and_are_folded(name: str) -> None:
    packed = layer(name)
    assert has_free_scales(packed.packed)
    trained = TrainedScales(packed)
    x = torch.randn(2, 5, 64, dtype=torch.float32, requires_grad=True)
    torch.testing.assert_close(trained(x), packed(x))
    with torch.no_grad():
        trained.factor.mul_(1 + 0.1 * torch.randn_like(trained.factor))
    decoded = packed.dequantize(torch.float32)

    def product(x: Tensor, factor: Tensor) -> Tensor:
        weight = decoded * factor.repeat_interleave(64 // factor.shape[1], 1)
        return nn.functional.linear(x, weight, packed.bias)

    dy = torch.randn(2, 5, 24, dtype=torch.float32)
    ours = torch.autograd.grad(trained(x), [x, trained.factor], dy)
    torch.testing.assert_close(ours, torch.autograd.grad(product(x, trained.factor), [x, trained.factor], dy))
    before = trained(x).detach()
    codes = packed.packed.codes.clone()
    folded = trained.fold()
    assert folded is packed and torch.equal(folded.packed.codes, codes)
    torch.testing.assert_close(folded(x).detach(), before, rtol=1e-5, atol=1e-6)


def test_formats_without_free_scales() -> None:
    """Powers of two, E4M3 under another scale, packed scales, one for several rows or for a part of one."""
    for name in ("mxfp4", "nvfp4", "nf4_dq", "gguf_q4_0", "float8_e4m3_128x128", "int8_tensor"):
        weight = torch.randn(64, 64, dtype=torch.float32)
        assert not has_free_scales(FORMATS[name].quantize(weight)), name
    assert not has_free_scales(FORMATS["nf4"].quantize(torch.randn(64, 96, dtype=torch.float32)))
