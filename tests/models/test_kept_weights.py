"""Values of frozen weights that stay from step to step (`Keep.weights`): when, and that nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbits.models.fused import fuse, fused_layers, fusion_of
from fewbits.nn import projection
from fewbits.nn.keep import KEEP_EVERYTHING, KEEP_NONE, Keep
from fewbits.recipes.recipe import LoRA, Recipe
from tests.models.test_fused import FLOAT8, NF4_ONLY, adapted, loss_and_gradients, tokens

RECIPES = (NF4_ONLY, Recipe(name="nf4_float8", linear=FLOAT8))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of packed weights, each time that one is decoded."""
    seen: list[tuple[int, ...]] = []

    def spied(function: Any) -> Any:
        def call(weight: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(tuple(weight.shape))
            return function(weight, *args, **kwargs)

        return call

    for name in ("dequantize", "float8_weight"):
        monkeypatch.setattr(projection, name, spied(getattr(projection, name)))
    return seen


def held(model: Any) -> int:
    """Bytes of values that are kept."""
    kept = [
        v for f in fused_layers(model) for _, values in f.parts._decoded.values() for v in values.values()
    ]
    return sum(v.nbytes for v in kept)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("rank", [8, 3])  # A lies below W, or beside it
def test_the_same_to_the_bit_and_decoded_once(
    family: str, recipe: Recipe, rank: int, decoded: list[tuple[int, ...]]
) -> None:
    model, ids = adapted(family, recipe, lora=LoRA(r=rank)), tokens(2, 20)
    fuse(model)
    plain = loss_and_gradients(model, ids)
    each_step = len(decoded)
    assert each_step and held(model) == 0
    for layer in fused_layers(model):
        layer.keep = KEEP_EVERYTHING
    for step in range(3):
        del decoded[:]
        loss, gradients = loss_and_gradients(model, ids)
        assert torch.equal(loss, plain[0])
        assert all(torch.equal(gradients[name], plain[1][name]) for name in plain[1])
        assert bool(decoded) == (step == 0), decoded
    assert held(model) > 0 and not fusion_of(model).fallbacks


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_a_smaller_plan_lets_go_of_them_at_once(recipe: Recipe) -> None:
    """Not when the layers run again: memory is needed before that."""
    model, ids = adapted("llama", recipe), tokens(2, 20)
    fuse(model, keep=KEEP_EVERYTHING)
    loss_and_gradients(model, ids)
    first, second = fused_layers(model)
    before = held(model)
    first.keep = Keep()
    assert 0 < held(model) < before
    second.keep = KEEP_NONE
    assert held(model) == 0


def test_another_weight_has_other_values() -> None:
    model, ids = adapted("llama"), tokens(2, 20)
    fuse(model, keep=KEEP_EVERYTHING)
    loss_and_gradients(model, ids)
    codes = next(p for n, p in model.named_parameters() if "down_proj" in n and n.endswith("weight_codes"))
    with torch.no_grad():
        codes.bitwise_xor_(0x11)
    changed = loss_and_gradients(model, ids)
    for layer in fused_layers(model):
        layer.keep = Keep()
    again = loss_and_gradients(model, ids)
    assert torch.equal(changed[0], again[0])


def test_weights_that_change_are_not_kept() -> None:
    """They train, or FSDP2 gathers them, or the call is of inference, whose tensors no graph may hold."""
    ids = tokens(2, 20)
    model = adapted("llama", None, lora=None)
    fuse(model, keep=KEEP_EVERYTHING)
    loss_and_gradients(model, ids)
    assert held(model) == 0
    model = adapted("llama")
    fuse(model, keep=KEEP_EVERYTHING)
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    assert held(model) == 0
    for layer in fused_layers(model):
        layer.layer._is_fsdp_managed_module = True
    loss_and_gradients(model, ids)
    assert held(model) == 0
