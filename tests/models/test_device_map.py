"""Models whose layers lie on several devices in one process, as ``device_map="auto"`` places them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor

from fewbits.decoder.fuse import fuse, fusion_of, unfuse
from fewbits.formats import E4M3, E4M3_ROW, NF4, NF4_DQ
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.packing.convert import convert
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from tests.models.tiny import tiny, tokens

RECIPES = {
    "plain": None,
    "nf4": Recipe(name="nf4", linear=Rule(weight=NF4)),
    "float8": Recipe(
        name="float8",
        linear=Rule(weight=NF4_DQ, weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW),
    ),
}


def paths(
    family: str, recipe: Recipe | None, devices: tuple[str, str] | None, *, fused: bool
) -> list[Tensor]:
    """Loss, gradients of adapters, and generated tokens; ``devices`` of the first and of the second half."""
    model = tiny(family)
    if recipe is not None:
        convert(model, recipe)
    if devices is not None:
        first, second = devices
        places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first}
        places |= {"model.layers.1": second, "model.norm": second, "lm_head": second}
        if model.config.tie_word_embeddings:
            places["lm_head"] = first
        model = dispatch_model(model, device_map=places, main_device=first, force_hooks=True)
    model.requires_grad_(False)
    torch.manual_seed(0)
    model = get_peft_model(model, LoRA(r=4)).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    if fused:
        receipt = fuse(model)
        assert not [note for note in receipt.notes if "stays unfused" in note], receipt.notes
    ids = tokens(2, 16).to("cpu" if devices is None else devices[0])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = [p.grad.cpu() for p in model.parameters() if p.requires_grad]
    model.eval()
    made = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False).cpu()
    if fused:
        assert not fusion_of(model).fallbacks
        unfuse(model)
        again = model(input_ids=ids, labels=ids).loss.detach().cpu()
        torch.testing.assert_close(again, loss.detach().cpu(), rtol=5e-2, atol=0)
    return [loss.detach().cpu(), *gradients, made]


def check(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-7
    assert torch.equal(found[-1], expected[-1])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize(("family", "recipe"), [("llama", "plain"), ("qwen3", "nf4"), ("gemma2", "float8")])
def test_hooks_of_a_device_map_change_nothing(family, recipe, fused) -> None:
    """Both halves on the CPU, under the hooks that would move their inputs."""
    expected = paths(family, RECIPES[recipe], None, fused=fused)
    check(paths(family, RECIPES[recipe], ("cpu", "cpu"), fused=fused), expected, 1e-6)


@pytest.mark.gpu
@pytest.mark.multi
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_two_gpus_are_one(family, recipe, fused) -> None:
    """Every kernel goes where its operands are; the current device is left alone."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    expected = paths(family, RECIPES[recipe], ("cuda:0", "cuda:0"), fused=fused)
    check(paths(family, RECIPES[recipe], ("cuda:0", "cuda:1"), fused=fused), expected, 1e-3)
    assert torch.cuda.current_device() == 0


def test_offloaded_layers_stay_unfused() -> None:
    model = tiny("llama")
    layer = model.model.layers[0]
    layer._hf_hook, layer.forward = type("Hook", (), {"offload": True})(), layer.forward
    receipt = fuse(model)
    assert "model.layers.0 stays unfused: its weights wait on another device" in "\n".join(receipt.notes)
