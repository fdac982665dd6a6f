"""Quantisation-aware training under the fused decoder: as the layers' own forward, and as it is packed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewbits.decoder.fuse import fuse, fused_layers, fusion_of, unfuse
from fewbits.decoder.keep import KEEP_NONE, KEEPS
from fewbits.formats import INT4_G32, INT8, INT8_G32, NF4, Format
from fewbits.recipes.recipe import QAT, LoRA, Recipe
from fewbits.training.calibration.qat import convert_qat, prepare_qat
from tests.models.test_fused import assert_same, loss_and_gradients
from tests.models.tiny import tiny, tokens


def prepared(family: str, weight: Format, lora: LoRA | None, activation: Format | None = None) -> nn.Module:
    model = tiny(family)
    model.set_attn_implementation("sdpa")
    if lora is not None:
        model.requires_grad_(False)
    model = prepare_qat(model, Recipe(name="q", qat=QAT(weight=weight, activation=activation), lora=lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


@pytest.mark.parametrize("lora", [LoRA(r=8), LoRA(r=4, alpha=8), None], ids=["r8", "r4", "full"])
@pytest.mark.parametrize("weight", [INT4_G32, NF4, INT8], ids=lambda f: f.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_fused_equals_the_layers_own(family: str, weight: Format, lora: LoRA | None) -> None:
    model, ids = prepared(family, weight, lora), tokens()
    plain = loss_and_gradients(model, ids)
    fuse(model)
    for keep in KEEPS if lora is not None and family == "llama" else (KEEP_NONE,):
        for layer in fused_layers(model):
            layer.keep = keep
        assert_same(loss_and_gradients(model, ids), plain)
    assert not fusion_of(model).fallbacks


def test_what_trained_fused_packs_to_the_same_bits() -> None:
    model = prepared("llama", INT4_G32, LoRA(r=4))
    fuse(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not fusion_of(model).fallbacks
    fused = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.detach()
    unfuse(model)
    with torch.no_grad():
        before = model.eval()(tokens()).logits
        packed, _ = convert_qat(model)
        after = packed(input_ids=tokens(), labels=tokens())
    assert torch.equal(after.logits, before)
    torch.testing.assert_close(after.loss, fused, rtol=1e-5, atol=1e-6)


def test_rounded_inputs_take_the_layers_own_forward() -> None:
    model, ids = prepared("llama", INT8_G32, LoRA(r=4), activation=INT8), tokens()
    plain = loss_and_gradients(model, ids)
    fuse(model)
    assert_same(loss_and_gradients(model, ids), plain)
    assert any("rounds its inputs" in reason for reason in fusion_of(model).fallbacks)
