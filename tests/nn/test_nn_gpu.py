"""The same layers on a CUDA device; run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewbits.formats import FORMATS, INT8, NF4, Format
from fewbits.kernels.product.lora_linear import lora_linear, lora_linear_ref
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.packing.convert import convert
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes.recipe import Recipe, Rule
from tests.models.tiny import tiny, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_a_layer_moves_to_the_device_and_keeps_its_bits(format: Format) -> None:
    layer = QuantizedLinear.from_linear(nn.Linear(128, 64), Rule(weight=format))
    before = layer.dequantize()
    layer.to("cuda")
    assert layer.device.type == "cuda"
    assert torch.equal(layer.dequantize().cpu(), before)
    eye = torch.eye(128, device="cuda")
    assert torch.equal((layer(eye) - layer.bias).T.cpu().isfinite(), before.isfinite())
    there = QuantizedLinear.from_linear(nn.Linear(128, 64).cuda(), Rule(weight=format))
    assert there.packed.codes.device.type == "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_step_equals_its_definition(dtype: torch.dtype) -> None:
    weight = NF4.quantize(torch.randn(256, 512, device="cuda", dtype=dtype))
    decoded = weight.dequantize().double()
    x, a, b = (torch.randn(s, device="cuda") for s in ((4, 33, 512), (8, 512), (256, 8)))
    x, dy = x.to(dtype), torch.randn(4, 33, 256, device="cuda").to(dtype)
    leaves = [t.clone().requires_grad_() for t in (x, a, b)]
    exact = [t.double().requires_grad_() for t in (x, a, b)]
    y = lora_linear(leaves[0], weight, None, leaves[1], leaves[2], scaling=0.5)
    y_exact = lora_linear_ref(exact[0], decoded, None, exact[1], exact[2], scaling=0.5)
    y.backward(dy)
    y_exact.backward(dy.double())
    # two roundings to x's dtype (product, sum), or sums of at most 512 float32 terms
    bound = 2**-7 if dtype == torch.bfloat16 else 512**0.5 * 2**-22
    for have, want in [(y, y_exact), *((t.grad, e.grad) for t, e in zip(leaves, exact, strict=True))]:
        assert (have.double() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_a_model_trains_there_as_it_does_here(family: str) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        model = tiny(family)
        convert(model, Recipe(name="pack", linear=Rule(weight=NF4, activation=INT8)))
        model = get_peft_model(model.to(device), r=4)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
        x = tokens().to(device)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for parameter in (p for n, p in model.named_parameters() if "lora_A" in n):
                parameter.data.copy_(0.1 * torch.randn(parameter.shape))
        row = []
        for _ in range(3):
            loss = model(x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            row.append(loss.item())
        losses.append(row)
    # an INT8 activation may fall to the other side of a rounding threshold: a step of 1/127 in few values
    torch.testing.assert_close(losses[1], losses[0], rtol=5e-3, atol=0)
