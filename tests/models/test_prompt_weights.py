"""Float8 values of weights that stay from prompt to prompt: never those of another weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import fewbits
from fewbits import FastLanguageModel
from fewbits.decoder import products, prompt_weights
from fewbits.decoder.fuse import free_prompt_weights, fuse, fused_layers, fusion_of, unfuse
from fewbits.decoder.keep import KEEP_EVERYTHING
from fewbits.models.generation import loop
from fewbits.recipes.recipe import Recipe
from tests.models.test_fused import FLOAT8, NF4_ONLY, adapted, loss_and_gradients, tokens

FLOAT8_RECIPE = Recipe(name="nf4_float8", linear=FLOAT8)
STAY, ANEW = "stay from the first prompt on", "are made for each prompt anew"


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of weights, each time that one is rounded to float8."""
    seen: list[tuple[int, ...]] = []
    real = products.float8_weight

    def call(weight: Any, **keywords: Any) -> Any:
        seen.append(tuple(weight.shape))
        return real(weight, **keywords)

    monkeypatch.setattr(products, "float8_weight", call)
    return seen


def for_inference(recipe: Recipe = FLOAT8_RECIPE, family: str = "llama") -> Any:
    model = adapted(family, recipe)
    fuse(model)
    return FastLanguageModel.for_inference(model)


def held(model: Any) -> int:
    return sum(values.nbytes for layer in fused_layers(model) for _, values in layer.parts._decoded.values())


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, past_key_values=DynamicCache(config=model.config), use_cache=True).logits


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
def test_a_second_prompt_rounds_nothing(family: str, rounded: list[tuple[int, ...]]) -> None:
    model = adapted(family, FLOAT8_RECIPE).eval()
    fuse(model)
    need = [read(model, tokens(2, length)) for length in (20, 7)]
    each = len(rounded) // 2
    assert each and held(model) == 0
    FastLanguageModel.for_inference(model)
    for round in range(3):
        del rounded[:]
        logits = [read(model, tokens(2, length)) for length in (20, 7)]
        assert all(torch.equal(a, b) for a, b in zip(logits, need, strict=True))
        assert len(rounded) == (each if round == 0 else 0)
    weights = sum(count for layer in fused_layers(model) for _, count in layer.parts.float8_weights())
    assert held(model) == weights > 0
    assert STAY in str(fewbits.explain(model))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_other_modes_of_autograd(mode: Any, rounded: list[tuple[int, ...]]) -> None:
    """What inference mode begins, a pass with gradients may find; such a pass itself keeps nothing."""
    model, ids = for_inference(), tokens(2, 20)
    with mode():
        logits = [model(input_ids=ids, use_cache=False).logits for _ in range(2)]
    assert torch.equal(logits[0], logits[1])
    assert (held(model) > 0) == (mode is torch.inference_mode)
    del rounded[:]
    FastLanguageModel.for_training(model)
    loss_and_gradients(model, ids)  # refuses tensors of inference mode
    assert rounded and held(model) == 0


def test_training_lets_go_of_them() -> None:
    """By `for_training`, or by a step of one's own; gradients are those of a model without any."""
    ids = tokens(2, 20)
    for by_hand in (False, True):
        plain = adapted("llama", FLOAT8_RECIPE)
        fuse(plain)
        torch.manual_seed(0)
        model = for_inference()
        model.load_state_dict(plain.state_dict())
        read(model, ids)
        assert held(model) > 0
        if by_hand:
            model.train()
        else:
            FastLanguageModel.for_training(model, use_gradient_checkpointing=False)
            assert held(model) == 0 and STAY not in str(fewbits.explain(model))
        (loss, gradients), need = loss_and_gradients(model, ids), loss_and_gradients(plain, ids)
        assert held(model) == 0 and STAY not in str(fewbits.explain(model))
        assert torch.equal(loss, need[0])
        assert all(torch.equal(gradients[name], need[1][name]) for name in need[1])
        FastLanguageModel.for_inference(model)
        read(model, ids)
        assert held(model) > 0 and STAY in str(fewbits.explain(model))


def _merge(model: Any) -> Any:
    model.merge_adapter()
    return model


def _merge_and_unload(model: Any) -> Any:
    return model.merge_and_unload()


def _load(model: Any) -> Any:
    state = {n: v * 1.5 if v.is_floating_point() else v.clone() for n, v in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def _in_place(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if name.endswith("weight_codes"):
            with torch.inference_mode():
                parameter.bitwise_xor_(0x11)
    return model


def _pack_again(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "pack") and hasattr(module, "dequantize"):
            module.pack(module.dequantize() * 1.5)
    return model


def _another_adapter(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(2)
    return model


def _copy(model: Any) -> Any:
    return _in_place(copy.deepcopy(model))


def _restore(model: Any) -> Any:
    fewbits.restore(model.get_base_model())
    return model


@pytest.mark.parametrize(
    "change", [_merge, _merge_and_unload, _load, _in_place, _pack_again, _another_adapter, _copy, _restore]
)
@pytest.mark.filterwarnings("ignore:merging into weights")
def test_no_weight_is_read_that_is_not_there_any_more(change: Any) -> None:
    """Beside a twin that goes the same way and never keeps anything."""
    ids = tokens(2, 20)
    model = for_inference()
    twin = copy.deepcopy(model)
    before = read(model, ids)
    assert held(model) > 0
    model = change(model)
    after = read(model, ids)
    twin = change(twin)
    if fusion_of(twin) is not None:
        fusion_of(twin).is_for_inference(False)
        need = read(twin, ids)
        assert held(twin) == 0
    else:
        need = read(twin, ids)
    assert torch.equal(after, need)
    assert not torch.equal(after, before)


def test_only_where_half_of_the_free_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(2, 20)
    model = for_inference()
    need = sum(count for layer in fused_layers(model) for _, count in layer.parts.float8_weights())
    for free, stays in ((2 * need, True), (2 * need - 1, False)):
        model = for_inference()
        monkeypatch.setattr(prompt_weights, "free_bytes", lambda device, free=free: free)
        read(model, ids)
        said = str(fewbits.explain(model))
        assert (held(model) == need) == stays and (held(model) == 0) == (not stays)
        assert (STAY in said) == stays and (ANEW in said) == (not stays)


def test_products_in_16_bits_keep_nothing() -> None:
    model = for_inference(NF4_ONLY)
    read(model, tokens(2, 20))
    assert held(model) == 0
    assert "float8 values" not in str(fewbits.explain(model))


def test_keys_and_values_come_first() -> None:
    """A step for which there is no memory beside them has them freed, and is tried again."""
    model, ids = for_inference(), tokens(2, 20)
    read(model, ids)
    tried: list[int] = []

    def scarce(*_: Any, **__: Any) -> str:
        tried.append(held(model))
        if held(model):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "a step"

    assert loop._new_step(model, [512, 256], scarce) == "a step"
    assert tried[0] > 0 and tried[-1] == 0 and len(tried) == 3
    assert f"{ANEW}, for keys and values take the memory" in str(fewbits.explain(model))
    read(model, ids)
    assert held(model) == 0  # they do not come back to take the memory again
    assert not free_prompt_weights(model, "nothing is left")
    FastLanguageModel.for_training(model)
    FastLanguageModel.for_inference(model)
    read(model, ids)
    assert held(model) > 0


def test_what_a_plan_keeps_is_kept_anyway(rounded: list[tuple[int, ...]]) -> None:
    ids = tokens(2, 20)
    model = for_inference()
    for layer in fused_layers(model):
        layer.keep = KEEP_EVERYTHING
    read(model, ids)
    before = held(model)
    model.train()
    loss_and_gradients(model, ids)  # with the transposed values
    assert before < held(model) <= 2 * before  # the first layer's input has no gradient
    del rounded[:]
    loss_and_gradients(model, ids)
    assert not rounded


def test_unfused_nothing_is_left() -> None:
    model, ids = for_inference(), tokens(2, 20)
    read(model, ids)
    layers = fused_layers(model)
    unfuse(model)
    assert not any(layer.parts._decoded for layer in layers)
    assert free_prompt_weights(model, "x") is False
