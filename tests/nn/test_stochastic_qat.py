"""A linear that trains under stochastic products: its forward, its gradients, adapters and merging."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import nn

from fewbits import sc_matmul
from fewbits.errors import BadInput, Unsupported
from fewbits.formats import INT8
from fewbits.formats.stochastic import Stochastic
from fewbits.nn.lora import LoRALinear
from fewbits.nn.packed_layers import packed_layer
from fewbits.nn.stochastic.qat import StochasticQATLinear
from fewbits.recipes.recipe import Rule

OPTIONS = Stochastic(halve_bipolar_stoc_len=True, chunk_d=16, stoc_len=32)
WORDS = {"halve_bipolar_stoc_len": True, "chunk_d": 16, "stoc_len": 32}


def _layer(bias=False):
    torch.manual_seed(0)
    linear = nn.Linear(40, 24, bias=bias)
    return linear, StochasticQATLinear.from_linear(linear, OPTIONS)


@pytest.mark.parametrize("bias", [False, True])
def test_forward_is_the_stochastic_product_and_gradients_are_exact(bias):
    linear, layer = _layer(bias)
    scales = torch.rand(40) + 0.5
    layer.smooth(scales)
    x = torch.randn(2, 5, 40, requires_grad=True)
    y = layer(x)
    expected = sc_matmul(x.detach().view(10, 40), linear.weight.detach(), smooth_scales=scales, **WORDS)
    expected = expected.view(2, 5, 24) + (linear.bias.detach() if bias else 0)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy @ linear.weight)
    torch.testing.assert_close(linear.weight.grad, torch.einsum("btn,btk->nk", dy, x))
    assert layer.weight is linear.weight


def test_adapters_pass_through_the_streams_and_merging_changes_nothing():
    _, layer = _layer()
    layer.requires_grad_(False)
    lora = LoRALinear(layer, "default", r=4, lora_alpha=8, config=LoraConfig(r=4, lora_alpha=8))
    nn.init.normal_(lora.lora_B["default"].weight, std=0.1)
    x = torch.randn(3, 40)
    y = lora(x)
    effective = layer.weight + lora.get_delta_weight("default")
    torch.testing.assert_close(y, sc_matmul(x, effective.detach(), **WORDS), rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert lora.lora_A["default"].weight.grad.any() and lora.lora_B["default"].weight.grad.any()
    lora.merge()
    assert torch.equal(lora(x), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_prepared_layer_gives_the_same_bits(dtype):
    _, layer = _layer(bias=True)
    layer = layer.to(dtype)
    layer.smooth(torch.rand(40) + 0.5)
    x = torch.randn(3, 40, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(packed_layer(layer, Rule(weight=OPTIONS))(x), layer(x))


def test_half_precision_under_autocast():
    _, layer = _layer()
    x = torch.randn(4, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, sc_matmul(x.bfloat16(), layer.weight, **WORDS).bfloat16())


def test_refusals():
    linear, layer = _layer()
    with pytest.raises(Unsupported, match="'int8' has no stochastic product; give"):
        StochasticQATLinear.from_linear(linear, INT8)
    with pytest.raises(Unsupported, match="quantises its input itself"):
        StochasticQATLinear.from_linear(linear, OPTIONS, INT8)
    with pytest.raises(BadInput, match="40 positive numbers"):
        layer.smooth(torch.ones(39))
