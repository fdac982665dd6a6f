"""LoRALinear as a layer; whole models are in tests/models/test_adapters.py."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig
from torch import nn

from fewbits.errors import Unsupported
from fewbits.formats import INT4_G32, INT8, NF4
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear
from fewbits.nn.lora import LoRALinear
from fewbits.recipes.recipe import Rule


def adapted(base: nn.Module, **settings: object) -> LoRALinear:
    config = LoraConfig(r=4, lora_alpha=8, **settings)
    layer = LoRALinear(base.requires_grad_(False), "default", r=4, lora_alpha=8, config=config)
    with torch.no_grad():
        for parameter in layer.lora_B.parameters():
            parameter.normal_()
    return layer


def bases() -> list[nn.Module]:
    linear = nn.Linear(64, 32)
    return [
        linear,
        QuantizedLinear.from_linear(linear, Rule(weight=NF4)),
        QuantizedLinear.from_linear(linear, Rule(weight=NF4, activation=INT8)),
        LowPrecisionLinear.from_linear(linear, Rule(activation=INT8)),
    ]


@pytest.mark.parametrize("index", range(4))
def test_output_is_base_plus_branch(index: int) -> None:
    base = bases()[index]
    layer = adapted(base)
    x = torch.randn(3, 5, 64)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), base(x) + 2.0 * x @ a.T @ b.T, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("narrow", ["lora_A", "lora_B"])
@pytest.mark.parametrize("index", range(4))
def test_halves_of_two_dtypes_merge_in_the_wider(index: int, narrow: str) -> None:
    """A step computes them so too; an adapter read from elsewhere may be half in float32."""
    layer = adapted(bases()[index])
    getattr(layer, narrow).to(torch.bfloat16)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    delta = layer.get_delta_weight("default")
    assert delta.dtype == torch.float32 and torch.equal(delta, 2.0 * (b.float() @ a.float()))
    x = torch.randn(3, 64)
    plain, with_adapter = layer.base_layer(x), layer(x)
    with pytest.warns(UserWarning, match="rounds them again") if index in (1, 2) else nullcontext():
        layer.merge()
    if index not in (1, 2):
        torch.testing.assert_close(layer(x), with_adapter, rtol=0.05, atol=0.05 if index else 1e-4)
    layer.unmerge()
    torch.testing.assert_close(layer.base_layer(x), plain, rtol=0, atol=1e-5)


def test_a_hook_on_the_base_is_honoured() -> None:
    base = bases()[1]
    layer, x, seen = adapted(base), torch.randn(2, 64), []
    expected = layer(x)
    base.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-5)
    assert seen == [1]


@pytest.mark.parametrize("index", [0, 1])
def test_lora_bias(index: int) -> None:
    base = bases()[index]
    base.bias = nn.Parameter(base.bias.detach().clone(), requires_grad=False)
    layer = adapted(base, lora_bias=True)
    plain, x = adapted(base), torch.randn(2, 64)
    plain.load_state_dict(layer.state_dict(), strict=False)
    expected = plain(x) + 2.0 * layer.lora_B["default"].bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-5)
    bias = base.bias.clone()
    if index == 0:
        layer.merge()
        torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-4)
        layer.unmerge()
        torch.testing.assert_close(base.bias, bias)


def test_effective_weight_over_a_fake_quantised_base_is_what_merging_writes() -> None:
    fake = FakeQuantizedLinear.from_linear(nn.Linear(64, 32), INT4_G32)
    layer, x = adapted(fake), torch.randn(4, 64)
    expected, effective = layer(x), layer.effective_weight(["default"]).detach()
    layer(x).sum().backward()
    assert layer.lora_A["default"].weight.grad is not None
    layer.merge()
    assert torch.equal(fake.weight, effective)
    assert torch.equal(layer(x), expected)
    with pytest.raises(Unsupported, match="set the dropout to 0"):
        adapted(fake, lora_dropout=0.5)


@pytest.mark.parametrize("index", [0, 1])
def test_merged_and_taken_out_in_inference_mode_it_trains_on(index: int) -> None:
    """A tensor of that mode cannot be saved for a backward pass: neither merged weights nor old ones."""
    layer, x = adapted(bases()[index]), torch.randn(2, 64, requires_grad=True)
    expected = layer(x).detach()
    with torch.inference_mode():
        layer.merge()
    (from_merged,) = torch.autograd.grad(layer(x).sum(), x)
    assert from_merged.isfinite().all()
    with torch.inference_mode():
        layer.enable_adapters(False)
        layer(x.detach())
    layer.enable_adapters(True)
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-5)
    y.sum().backward()
    assert layer.lora_A["default"].weight.grad is not None


def test_what_changes_the_base_weight_is_refused() -> None:
    with pytest.raises(Unsupported, match="init_lora_weights='olora' takes a part of the base weight away"):
        adapted(bases()[1], init_lora_weights="olora")


def test_safe_merge_refuses_before_it_changes_anything() -> None:
    base = bases()[1]
    layer = adapted(base)
    layer.lora_A["default"].weight.data[0, 0] = float("nan")
    before = base.dequantize()
    with pytest.raises(ValueError, match="not finite; nothing was merged"):
        layer.merge(safe_merge=True)
    assert torch.equal(base.dequantize(), before)
    assert not layer.merged


@pytest.mark.parametrize("index", [0, 1])
def test_safe_merge_refuses_a_bias_that_is_not_finite(index: int) -> None:
    base = bases()[index]
    layer = adapted(base, lora_bias=True)
    layer.lora_B["default"].bias.data[0] = float("inf")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    with pytest.raises(ValueError, match=r"^NaNs detected in the merged weights.*not finite"):
        layer.merge(safe_merge=True)
    assert not layer.merged
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


@pytest.mark.parametrize("index", [0, 1])
def test_compiles_to_one_graph(index: int) -> None:
    layer, x = adapted(bases()[index]), torch.randn(4, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-6, atol=1e-5)
    compiled(x).sum().backward()
    assert layer.lora_B["default"].weight.grad is not None
