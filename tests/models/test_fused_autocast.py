"""The fused decoder over float32 weights under autocast: as exact as the layers' own forward there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbits.decoder.fuse import fuse, fused_layers, fusion_of
from fewbits.decoder.keep import KEEP_ACTIVATIONS, KEEPS
from fewbits.formats import E4M3, E4M3_ROW, INT4_G32, NF4
from fewbits.recipes.recipe import QAT, LoRA, Recipe, Rule
from fewbits.training.calibration.qat import prepare_qat
from tests.models.test_fused import NF4_ONLY, adapted, loss_and_gradients
from tests.models.tiny import FAMILIES, tiny, tokens

BF16 = torch.bfloat16
FLOAT8 = Rule(weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)


def under_autocast(model: Any, ids: Tensor, dtype: torch.dtype = BF16, **batch: Any) -> dict[str, Tensor]:
    """Gradients, and the loss under the name "loss"."""
    with torch.autocast("cpu", dtype=dtype):
        loss, gradients = loss_and_gradients(model, ids, **batch)
    return {**gradients, "loss": loss}


def assert_as_exact(fused: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """No gradient is further from float32's than half as much again as those of the layers' own forward."""
    assert fused.keys() == plain.keys() == exact.keys()
    for name, need in exact.items():
        assert fused[name].dtype == need.dtype == torch.float32
        allowed = 1.5 * (plain[name] - need).norm() + 0.002 * need.norm()
        error = (fused[name] - need).norm()
        assert error < allowed, (name, float(error / need.norm()), float(allowed / need.norm()))


@pytest.mark.parametrize("recipe", [NF4_ONLY, None], ids=["nf4", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_every_family(family: str, recipe: Recipe | None) -> None:
    model, ids = adapted(family, recipe), tokens(3, 20)
    loss, exact = loss_and_gradients(model, ids)
    plain = under_autocast(model, ids)
    fuse(model)
    fused = under_autocast(model, ids)
    assert not fusion_of(model).fallbacks
    assert_as_exact(fused, plain, {**exact, "loss": loss})
    assert any(not torch.equal(fused[name], exact[name]) for name in exact), "nothing was in 16 bits"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3"])
def test_full_fine_tuning(family: str) -> None:
    model, ids = adapted(family, None, lora=None), tokens(3, 20)
    loss, exact = loss_and_gradients(model, ids)
    plain = under_autocast(model, ids)
    fuse(model)
    fused = under_autocast(model, ids)
    assert not fusion_of(model).fallbacks
    assert_as_exact(fused, plain, {**exact, "loss": loss})


def test_the_sum_of_the_layers_stays_float32() -> None:
    model, ids = adapted("llama"), tokens(2, 12)
    fuse(model, keep=KEEP_ACTIVATIONS)
    seen = []
    for forward in fused_layers(model):
        forward.layer.register_forward_hook(lambda _m, _a, out: seen.append(out))
    loss = under_autocast(model, ids)["loss"]
    assert [out.dtype for out in seen] == [torch.float32] * 2 and loss.dtype == torch.float32
    assert all(not torch.equal(out, out.to(BF16).float()) for out in seen), "it was rounded to 16 bits"


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_what_is_kept_changes_nothing(keep: Any) -> None:
    """And the backward pass may run outside autocast, as torch asks for, or inside."""
    model, ids = adapted("gemma3_text"), tokens(2, 20)
    fuse(model)
    everything = under_autocast(model, ids)
    for layer in fused_layers(model):
        layer.keep = keep
    model.zero_grad()
    with torch.autocast("cpu", dtype=BF16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, everything[name]), name


def test_float16_with_a_scaled_loss() -> None:
    """What a GradScaler does: gradients of a loss times 1024, as adapters in float32 receive them."""
    model, ids = adapted("llama"), tokens(2, 20)
    loss, exact = loss_and_gradients(model, ids)
    found = []
    for step in range(2):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            scaled = model(input_ids=ids, labels=ids, use_cache=False).loss * 1024
        scaled.backward()
        gradients = {n: p.grad / 1024 for n, p in model.named_parameters() if p.grad is not None}
        found.append({**gradients, "loss": scaled.detach() / 1024})
        if step == 0:
            fuse(model)
    assert not fusion_of(model).fallbacks
    assert_as_exact(found[1], found[0], {**exact, "loss": loss})


def test_a_padded_batch() -> None:
    model, ids = adapted("llama"), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, 13:] = 0
    batch = {"attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
    loss, exact = loss_and_gradients(model, ids, **batch)
    plain = under_autocast(model, ids, **batch)
    fuse(model)
    fused = under_autocast(model, ids, **batch)
    assert not fusion_of(model).fallbacks
    assert_as_exact(fused, plain, {**exact, "loss": loss})


@pytest.mark.parametrize("weight", [NF4, None], ids=["nf4", "float32"])
def test_float8_products(weight: Any) -> None:
    """Over packed weights with adapters, and over float32 weights that train."""
    rule = FLOAT8 if weight is None else replace(FLOAT8, weight=weight)
    lora, ids = (LoRA(r=8) if weight else None), tokens(3, 20)
    _, exact = loss_and_gradients(adapted("llama", NF4_ONLY if weight else None, lora=lora), ids)
    model = adapted("llama", Recipe(name="float8", linear=rule), lora=lora)
    plain = under_autocast(model, ids)
    fuse(model, delayed_scaling=True)
    for _ in range(2):  # by row, then under the scales of the step before
        fused = under_autocast(model, ids)
        assert not fusion_of(model).fallbacks
        for name, need in exact.items():
            allowed = 2 * (plain[name] - need).norm() + 0.02 * need.norm()
            assert (fused[name] - need).norm() < allowed, name


def test_quantisation_aware_training() -> None:
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    model.requires_grad_(False)
    model = prepare_qat(model, Recipe(name="q", qat=QAT(weight=INT4_G32), lora=LoRA(r=8))).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    ids = tokens(3, 20)
    loss, exact = loss_and_gradients(model, ids)
    plain = under_autocast(model, ids)
    fuse(model)
    fused = under_autocast(model, ids)
    assert not fusion_of(model).fallbacks
    assert_as_exact(fused, plain, {**exact, "loss": loss})


def test_other_mixtures_take_the_layers_own_forward() -> None:
    """bfloat16 states under float16: the first layer's own forward promotes them to float32."""
    model, ids = adapted("llama", None, lora=None).to(BF16), tokens(2, 12)
    fuse(model)
    with pytest.warns(UserWarning, match=r"the hidden states are torch\.bfloat16"):
        under_autocast(model, ids, torch.float16)
    assert sum(fusion_of(model).fallbacks.values()) == 1


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """The kernels between float32 and 16 bits, against float32 and the layers' own forward."""
    for lora in (LoRA(r=8), None):
        model, ids = adapted("llama", None, lora=lora).cuda(), tokens(3, 20).cuda()
        loss, exact = loss_and_gradients(model, ids)
        found = []
        for step in range(2):
            with torch.autocast("cuda", dtype=BF16):
                low, gradients = loss_and_gradients(model, ids)
            found.append({**gradients, "loss": low})
            if step == 0:
                fuse(model)
        assert not fusion_of(model).fallbacks
        assert_as_exact(found[1], found[0], {**exact, "loss": loss})
