"""Values of frozen weights that stay from step to step (`Keep.weights`): when, and that nothing changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from fewbits.decoder import products
from fewbits.decoder.fuse import forget_weights, fuse, fused_layers, fusion_of, unfuse
from fewbits.decoder.keep import KEEP_EVERYTHING, KEEP_NONE, Keep
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.nn.tensor_state import state_of
from fewbits.recipes.recipe import LoRA, Recipe
from tests.models.test_fused import FLOAT8, LORA, NF4_ONLY, adapted, loss_and_gradients, tokens

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
        monkeypatch.setattr(products, name, spied(getattr(products, name)))
    return seen


def held(model: Any) -> int:
    """Bytes of values that are kept."""
    return sum(values.nbytes for layer in fused_layers(model) for _, values in layer.parts._decoded.values())


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
    """They train, or FSDP2 gathers them."""
    ids = tokens(2, 20)
    model = adapted("llama", None, lora=None)
    fuse(model, keep=KEEP_EVERYTHING)
    loss_and_gradients(model, ids)
    assert held(model) == 0
    model = adapted("llama")
    fuse(model, keep=KEEP_EVERYTHING)
    for layer in fused_layers(model):
        layer.layer._is_fsdp_managed_module = True
    loss_and_gradients(model, ids)
    assert held(model) == 0


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_a_first_pass_of_inference_mode(recipe: Recipe, decoded: list[tuple[int, ...]]) -> None:
    """Its tensors no graph may hold; what it leaves is none of them."""
    model, ids = adapted("llama", recipe, lora=None), tokens(2, 20)
    fuse(model, keep=KEEP_EVERYTHING)
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    assert held(model) > 0 and decoded
    model = get_peft_model(model, LORA).train()
    plain = copy.deepcopy(model)
    assert held(plain) == 0
    loss, gradients = loss_and_gradients(model, ids)
    need = loss_and_gradients(plain, ids)
    assert torch.equal(loss, need[0])
    assert gradients and all(torch.equal(gradients[name], need[1][name]) for name in need[1])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_a_first_pass_without_adapters(recipe: Recipe) -> None:
    """DPO's reference pass: its weights have no room for A below them."""
    model, ids = adapted("llama", recipe), tokens(2, 20)
    fuse(model)
    plain = loss_and_gradients(model, ids)
    for layer in fused_layers(model):
        layer.keep = KEEP_EVERYTHING
    for _ in range(2):
        with torch.no_grad(), model.disable_adapter():
            model(input_ids=ids, use_cache=False)
        loss, gradients = loss_and_gradients(model, ids)
        assert torch.equal(loss, plain[0])
        assert all(torch.equal(gradients[name], plain[1][name]) for name in plain[1])
    assert not fusion_of(model).fallbacks


def test_another_adapter_of_another_rank() -> None:
    model, ids = adapted("llama"), tokens(2, 20)  # rank 8
    get_peft_model(model, LoRA(r=24), adapter_name="wide")
    get_peft_model(model, LoRA(r=3), adapter_name="odd")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    fuse(model)
    plain = {}
    for keep in (Keep(), KEEP_EVERYTHING):
        for layer in fused_layers(model):
            layer.keep = keep
        for name in ("default", "odd", "wide", "odd", "default"):
            model.set_adapter(name)
            found = loss_and_gradients(model, ids)
            loss, gradients = plain.setdefault(name, found)
            assert torch.equal(found[0], loss)
            assert all(torch.equal(found[1][n], gradients[n]) for n in gradients)


FROZEN = Recipe(name="float8", linear=replace(FLOAT8, weight=None))


def _merge(model: Any) -> None:
    model.merge_adapter()


def _merge_and_back(model: Any) -> None:
    model.merge_adapter()
    loss_of(model)
    model.unmerge_adapter()


def _merge_another(model: Any) -> None:
    """The address that one merge frees may be the next one's."""
    for _ in range(2):
        model.merge_adapter()
        loss_of(model)
        model.unmerge_adapter()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(2)
    model.merge_adapter()


def _load(model: Any) -> None:
    state = {n: v.clone() for n, v in model.state_dict().items()}
    for name, value in state.items():
        if "base_layer.weight" in name and value.is_floating_point():
            value.mul_(1.5)
    model.load_state_dict(state)


def _load_assigned(model: Any) -> None:
    state = {n: v * 1.5 if v.is_floating_point() else v.clone() for n, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _pack_again(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "pack") and hasattr(module, "dequantize"):
            module.pack(module.dequantize() * 1.5)


def _train_and_freeze(model: Any) -> None:
    """torch's fused optimizer counts no version."""
    bases = [m.base_layer for m in model.modules() if hasattr(m, "lora_A")]
    weights = [base.weight for base in bases if hasattr(base, "weight")]
    for weight in weights:
        weight.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
    loss_of(model).backward()
    optimizer.step()
    model.zero_grad()
    for weight in weights:
        weight.requires_grad_(False)


def _behind_the_back(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "base_layer.weight" in name and parameter.is_floating_point():
            parameter.data.mul_(1.5)
    forget_weights(model)


def _bases(model: Any) -> list[Any]:
    """The floating-point tensors of the frozen linears: weights, or the scales of packed ones."""
    found = [p for n, p in model.named_parameters() if ".base_layer." in n and p.is_floating_point()]
    assert found and not any(p.requires_grad for p in found)
    return found


def _in_place_on_detached(model: Any) -> None:
    for parameter in _bases(model):
        parameter.detach().mul_(1.5)


def _average(model: Any) -> None:
    """As torch's own averages of weights are written."""
    with torch.no_grad():
        torch._foreach_lerp_(_bases(model), [2 * p for p in _bases(model)], 0.5)


def _initialise(model: Any) -> None:
    for parameter in _bases(model):
        torch.nn.init.constant_(parameter, 0.01)


def _other_memory(model: Any) -> None:
    for parameter in _bases(model):
        parameter.data = parameter.data * 1.5


def _gathered(model: Any) -> None:
    """As DeepSpeed does: the memory is let go of and another one comes, with other values."""
    for parameter in _bases(model):
        values = parameter.data * 1.5
        parameter.data = torch.empty(0)
        parameter.data = values


def loss_of(model: Any) -> Any:
    ids = tokens(2, 20)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("recipe", [*RECIPES, FROZEN], ids=lambda r: r.name)
@pytest.mark.parametrize(
    "change",
    [
        _merge,
        _merge_and_back,
        _merge_another,
        _load,
        _load_assigned,
        _pack_again,
        _train_and_freeze,
        _behind_the_back,
        _in_place_on_detached,
        _average,
        _initialise,
        _other_memory,
        _gathered,
    ],
)
@pytest.mark.filterwarnings("ignore:merging into weights")
def test_a_weight_that_changed_has_its_own_values(recipe: Recipe, change: Any) -> None:
    """Kept ones, and scales, beside what the same model gives when nothing was kept before."""
    model, ids = adapted("llama", recipe, lora=LORA), tokens(2, 20)
    fuse(model, keep=KEEP_EVERYTHING)
    loss_and_gradients(model, ids)
    change(model)
    loss = loss_of(model).detach()
    unfuse(model)
    fuse(model)
    torch.testing.assert_close(loss, loss_of(model).detach(), rtol=1e-6, atol=0)


def test_the_receipt_says_which_writes_are_not_seen() -> None:
    model = adapted("llama", NF4_ONLY, lora=LORA)
    said = "after writing a weight through tensor.data, call fewbits.decoder.fuse.forget_weights(model)"
    assert said in str(fuse(model))


def test_a_state_is_that_of_one_memory() -> None:
    """Its address may be the next tensor's, and a write may leave it."""
    x = torch.zeros(4)
    state = state_of([x])
    assert state_of([x]) == state and state_of([x[:2]]) != state
    with torch.no_grad():
        x.add_(1)
    assert state_of([x]) != state
    states = []
    for _ in range(20):  # freed and made again: mostly at the same address
        states.append(state_of([torch.zeros(1000)]))
    assert all(a != b for i, a in enumerate(states) for b in states[:i])
    with torch.inference_mode():
        assert state_of([torch.zeros(4)])
