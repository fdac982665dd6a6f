"""Straight-through rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewbits.formats import INT4_G32, INT8, NF4, Format
from fewbits.nn.fake_quantize import FakeQuantizedLinear, fake_quantize
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes.recipe import Rule
from tests.every_format import every_format


@every_format
def test_value_is_rounded_and_gradient_passes_through(format: Format) -> None:
    x = torch.randn(8, 128, requires_grad=True)
    y = fake_quantize(x, format)
    assert torch.equal(y, format.fake_quantize(x.detach()))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.equal(x.grad, dy)


def test_dtype_and_no_format() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    assert fake_quantize(x, None) is x
    y = fake_quantize(x, NF4, torch.bfloat16)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_computes_what_the_packed_one_will(format: Format, dtype: torch.dtype) -> None:
    linear = nn.Linear(128, 24, dtype=dtype)
    fake = FakeQuantizedLinear.from_linear(linear, format, INT8)
    packed = QuantizedLinear.from_linear(fake, Rule(weight=format, activation=INT8))
    x = torch.randn(2, 5, 128, dtype=dtype)
    assert torch.equal(fake(x), packed(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fake(x), packed(x))
    fake(x).sum().backward()
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None


def test_gradients_are_those_of_the_product_of_rounded_operands() -> None:
    linear = nn.Linear(64, 16, bias=False)
    fake = FakeQuantizedLinear.from_linear(linear, INT4_G32)
    x = torch.randn(8, 64, requires_grad=True)
    dy = torch.randn(8, 16)
    fake(x).backward(dy)
    rounded = INT4_G32.fake_quantize(linear.weight.detach())
    torch.testing.assert_close(x.grad, dy @ rounded, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(linear.weight.grad, dy.T @ x.detach(), rtol=1e-6, atol=1e-5)
    assert "weight=int4_g32" in repr(fake)


def test_compiles_to_one_graph() -> None:
    fake = FakeQuantizedLinear.from_linear(nn.Linear(64, 16), NF4, INT8)
    x = torch.randn(8, 64)
    compiled = torch.compile(fake, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), fake(x), rtol=1e-6, atol=1e-5)
    compiled(x).sum().backward()
    assert fake.weight.grad is not None
