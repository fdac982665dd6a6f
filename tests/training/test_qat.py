"""What trains under fake quantisation is, bit for bit, what is packed afterwards."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from fewbits.errors import Unsupported
from fewbits.formats import E4M3, E4M3_ROW, FORMATS, INT4_G32, INT8, NF4
from fewbits.models.packing.convert import explain
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes.recipe import QAT, LoRA, Recipe
from fewbits.training.calibration.qat import convert_qat, prepare_qat
from tests.models.tiny import tiny, tokens

WEIGHTS = [FORMATS[name] for name in ("int4_g32", "int4_g64_zp", "nf4", "nf4_dq", "int8", "float8_e4m3_row")]


def trained(
    recipe: Recipe, family: str = "llama", dtype: torch.dtype = torch.float32, autocast: bool = False
) -> nn.Module:
    model = prepare_qat(tiny(family, dtype=dtype), recipe).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return model.eval()


@pytest.mark.parametrize("lora", [None, LoRA(r=4, alpha=8)], ids=["full", "lora"])
@pytest.mark.parametrize("activation", [None, INT8, E4M3], ids=lambda f: f.name if f else "plain")
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda f: f.name)
def test_packed_forward_equals_trained_forward(weight, activation, lora) -> None:
    model = trained(Recipe(name="q", qat=QAT(weight=weight, activation=activation), lora=lora))
    with torch.no_grad():
        before = model(tokens()).logits
        packed, receipt = convert_qat(model)
        assert torch.equal(packed(tokens()).logits, before)
    assert not isinstance(packed, peft.PeftModel)
    assert not any(isinstance(m, FakeQuantizedLinear) for m in packed.modules())
    assert sum(isinstance(m, QuantizedLinear) for m in packed.modules()) == 14 == len(receipt.changes)
    assert "FakeQuantizedLinear" in str(receipt)
    assert receipt.bytes_after < receipt.bytes_before / 3


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma3_text"])
def test_other_families_in_bfloat16_with_lora(family: str) -> None:
    recipe = Recipe(name="q", qat=QAT(weight=INT4_G32, activation=E4M3_ROW), lora=LoRA(r=4))
    model = trained(recipe, family, torch.bfloat16)
    with torch.no_grad():
        before = model(tokens()).logits
        assert before.dtype == torch.bfloat16
        assert torch.equal(convert_qat(model)[0](tokens()).logits, before)


@pytest.mark.parametrize("lora", [None, LoRA(r=4)], ids=["full", "lora"])
def test_autocast_trains_and_packs_the_same_bits(lora: LoRA | None) -> None:
    model = trained(Recipe(name="q", qat=QAT(weight=NF4, activation=INT8), lora=lora), autocast=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(tokens()).logits
    packed, _ = convert_qat(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(packed(tokens()).logits, before)


def test_what_trains() -> None:
    full = prepare_qat(tiny("llama"), Recipe(name="q", qat=QAT(weight=INT4_G32)))
    full(tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for p in full.parameters())
    assert "FakeQuantizedLinear int4_g32" in str(explain(full))
    lora = prepare_qat(tiny("llama"), Recipe(name="q", qat=QAT(weight=INT4_G32), lora=LoRA(r=4)))
    assert isinstance(lora, peft.PeftModel)
    lora(tokens(), labels=tokens()).loss.backward()
    assert {n for n, p in lora.named_parameters() if p.grad is not None} == {
        n for n, _ in lora.named_parameters() if "lora_" in n
    }


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="has no qat"):
        prepare_qat(tiny("llama"), Recipe(name="plain"))
    with pytest.raises(Unsupported, match="nothing in this model is fake-quantised"):
        convert_qat(tiny("llama"))
    with pytest.raises(Unsupported, match="dropout has no meaning"):
        prepare_qat(tiny("llama"), Recipe(name="q", qat=QAT(weight=NF4), lora=LoRA(dropout=0.1)))
