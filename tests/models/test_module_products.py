"""Packed linears of a model's own modules by decoding's kernels; on a CPU by these kernels' definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fewbits
from fewbits.formats import INT8, NF4
from fewbits.kernels.generation import few_rows
from fewbits.models.generation.model_step import ModelStep
from fewbits.models.generation.module_products import ModuleProducts
from fewbits.models.generation.prompt import read_prompt
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes.recipe import Rule
from tests.models.tiny import tiny, tokens

BF16, CPU = torch.bfloat16, torch.device("cpu")


def packed(inputs: int, outputs: int, format: Any = NF4) -> QuantizedLinear:
    torch.manual_seed(inputs + outputs)
    linear = nn.Linear(inputs, outputs, bias=outputs % 32 == 0, dtype=BF16)
    return QuantizedLinear.from_linear(linear, Rule(weight=format))


@pytest.mark.parametrize("format", [NF4, INT8], ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 65])
def test_products_are_the_linears_own_up_to_rounding(format: Any, rows: int) -> None:
    """Again and again, with other rows in between; 2**-8 for each of the two roundings to 16 bits."""
    model = nn.ModuleList([packed(128, 96, format), packed(64, 80, format)])
    products = ModuleProducts(model, CPU)
    assert len(products.linears) == 2
    for seed in range(3):
        for linear in model:
            x = torch.randn(rows, 1, linear.in_features, dtype=BF16)
            need = linear(x)
            with products.in_place():
                y = linear(x)
                assert linear(x[:1]).shape == (1, 1, linear.out_features)
            assert y.shape == need.shape and y.dtype == BF16
            assert float((y.float() - need.float()).norm() / need.float().norm()) < 2**-7
            assert "forward" not in vars(linear), seed


def test_a_linear_that_is_called_twice_keeps_its_first_answer() -> None:
    linear = packed(128, 96)
    products = ModuleProducts(linear, CPU)
    a, b = torch.randn(2, 1, 128, dtype=BF16)
    with products.in_place():
        first = linear(a)
        kept = first.clone()
        second = linear(b)
    assert torch.equal(first, kept) and not torch.equal(first, second)


@torch.no_grad()
def test_what_inference_mode_prepares_is_used_outside_of_it() -> None:
    linear = packed(128, 96)
    products, x = ModuleProducts(linear, CPU), torch.randn(1, 128, dtype=BF16)
    with torch.inference_mode(), products.in_place():
        first = linear(x).clone()
    with products.in_place():
        assert torch.equal(linear(x), first)


def test_what_the_kernels_do_not_take_goes_its_own_way() -> None:
    linear = packed(128, 96)
    products = ModuleProducts(linear, CPU)
    x = torch.randn(2, 128)
    with products.in_place():
        assert torch.equal(linear(x), QuantizedLinear.forward(linear, x))
    with pytest.raises(KeyError), products.in_place():
        raise KeyError
    assert "forward" not in vars(linear)
    vars(linear)["forward"] = lambda x: x  # somebody else's
    assert not ModuleProducts(linear, CPU).linears


@pytest.mark.parametrize("adapters", [False, True])
def test_a_step_goes_through_them(adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and three, with branches around the linears; the logits are the model's own up to rounding."""
    model: Any = tiny("gemma2", dtype=BF16)
    fewbits.convert(model, "qlora_nf4")
    if adapters:
        model = fewbits.get_peft_model(model, r=4, target_modules="all-linear").eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    count = [0]
    real = few_rows.FewRows.launch

    def counted(self: Any) -> Any:
        count[0] += 1
        return real(self)

    monkeypatch.setattr(few_rows.FewRows, "launch", counted)
    for rows in (1, 3):
        ids = tokens(rows, 20)
        padding = torch.zeros(rows, dtype=torch.long)
        with torch.no_grad():
            read = read_prompt(model, ids, None, padding)
            step = ModelStep(model, batch=rows, room=40, like=read.cache)
            for layer, of_prompt in zip(step._layers, read.cache.layers, strict=True):
                layer.keys[:, :, :20], layer.values[:, :, :20] = of_prompt.keys, of_prompt.values
            step.position.fill_(20)
            step.tokens.copy_(read.logits.argmax(-1))
            assert step.difference(model, read.cache, None) < 0.04 * 2**0.5
    assert count[0] == 2 * 7 * model.config.num_hidden_layers
