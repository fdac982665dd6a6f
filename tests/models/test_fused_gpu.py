"""Fused training steps on a GPU: nothing in them waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbits.decoder.fuse import fuse, fused_layers, fusion_of
from fewbits.decoder.keep import KEEP_EVERYTHING, KEEP_NONE, KEEP_ON_HOST, Keep
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.packing.convert import convert
from fewbits.recipes import LoRA, get_recipe
from tests.models.tiny import tiny, tokens

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def trained(recipe: str, device: str, **changes: Any) -> Any:
    """A model with adapters, fused, and its optimizer."""
    model = tiny("llama", **SHAPE, **changes).to(torch.bfloat16).to(device)
    model.set_attn_implementation("sdpa")
    convert(model, get_recipe(recipe))
    model.requires_grad_(False)
    model = get_peft_model(model, LoRA(r=16)).train()
    if fusion_of(model) is None:
        fuse(model, delayed_scaling="fp8" in recipe)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def step(model: Any, optimizer: Any, ids: torch.Tensor) -> torch.Tensor:
    """As a trainer does it, its clipping included."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [Keep(), KEEP_EVERYTHING, KEEP_NONE, KEEP_ON_HOST], ids=str)
@pytest.mark.parametrize("recipe", ["qlora_nf4", "qlora_nf4_fp8", "qlora_nf4_fp8_head"])
def test_a_step_waits_for_nothing(recipe: str, keep: Keep) -> None:
    model, optimizer = trained(recipe, "cuda")
    for layer in fused_layers(model):
        layer.keep = keep
    ids = tokens(2, 64).cuda()
    losses = [step(model, optimizer, ids) for _ in range(3)]  # compiles; makes what is kept
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses += [step(model, optimizer, ids) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not fusion_of(model).fallbacks
    assert float(losses[-1]) < float(losses[0])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["qlora_nf4", "qlora_nf4_fp8_head"])
def test_weights_that_are_kept_are_those_that_are_made_anew(recipe: str) -> None:
    """Forward passes to the same bits; gradients too, but for the order in which attention adds up."""
    model, _ = trained(recipe, "cuda")
    ids, found = tokens(2, 64).cuda(), []
    for keep in (Keep(), KEEP_EVERYTHING, KEEP_EVERYTHING):
        for layer in fused_layers(model):
            layer.keep = keep
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (loss, gradients), *others = found
    for other, others_gradients in others:
        if "fp8" not in recipe:  # whose delayed scales are those of the pass before
            assert torch.equal(other, loss)
        for name, gradient in gradients.items():
            error = (others_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-9)
            assert error < (0.6 if "fp8" in recipe else 0.02), (name, float(error))
