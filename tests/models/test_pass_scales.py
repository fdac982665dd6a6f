"""Float8 scales of weights that train: found at once for all layers, and never those of an earlier pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbits.decoder import parts as fused_parts
from fewbits.decoder import pass_scales
from fewbits.decoder.fuse import fuse, fused_layers
from fewbits.decoder.keep import KEEP_ACTIVATIONS
from fewbits.decoder.products import Float8Projection
from fewbits.formats import E4M3, E4M3_ROW
from fewbits.recipes.recipe import Recipe, Rule
from tests.models.test_fused import adapted, loss_and_gradients
from tests.models.tiny import tokens

FULL = Recipe(name="float8", linear=Rule(weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What the two ways of finding scales were asked for."""
    calls: dict[str, list[Any]] = {"at once": [], "alone": []}
    at_once, alone = pass_scales.scales_of, fused_parts.scale_of
    monkeypatch.setattr(pass_scales, "scales_of", lambda g: calls["at once"].append(len(g)) or at_once(g))
    monkeypatch.setattr(fused_parts, "scale_of", lambda w: calls["alone"].append(len(w)) or alone(w))
    return calls


def scales(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The scales that layers compute with, in their order, beside those of the weights as they are."""
    used: list[Any] = []
    true = fused_parts.LayerParts._scale

    def noted(self: Any, paths: Any, parts: Any, stored: Any) -> Any:
        made = true(self, paths, parts, stored)
        used.append((made.outputs.clone(), fused_parts.scale_of([p.weight for p in parts]).outputs))
        return made

    monkeypatch.setattr(fused_parts.LayerParts, "_scale", noted)
    return used


def change(model: Any) -> None:
    """As torch's fused optimizers do: no version is counted."""
    for p in model.parameters():
        p.data.mul_(1 + torch.rand(()))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_one_pass_finds_all(family: str, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = adapted(family, FULL, lora=None), tokens(2, 12)
    fuse(model)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        change(model)
    assert found == {"at once": [8, 8], "alone": []}
    used = scales(monkeypatch)
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        model(input_ids=ids)
    assert len(used) >= 8 and all(torch.equal(a, b) for a, b in used)


def test_layers_in_another_order_take_the_scales_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = adapted("llama", FULL, lora=None), tokens(2, 12)
    fuse(model)
    used = scales(monkeypatch)
    first, second = (layer.parts.layer for layer in fused_layers(model))
    x = torch.randn(2, 12, model.config.hidden_size)
    rotary = model.model.rotary_emb(x, torch.arange(12)[None])
    with torch.no_grad():
        first(x, position_embeddings=rotary)  # a pass that breaks off
        change(model)
        first(x, position_embeddings=rotary)
        second(x, position_embeddings=rotary)
        change(model)
        second(x, position_embeddings=rotary)
        first(x, position_embeddings=rotary)
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(used) == 4 * 7 and all(torch.equal(a, b) for a, b in used)


def test_a_weight_that_was_exchanged_has_its_own_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP2 does between the layers."""
    model, ids = adapted("llama", FULL, lora=None), tokens(2, 12)
    fuse(model)
    used = scales(monkeypatch)
    second = fused_layers(model)[1].parts.layer

    def exchange(*_: Any) -> None:
        second.mlp.down_proj.weight = torch.nn.Parameter(second.mlp.down_proj.weight.detach() * 3)

    handle = model.model.layers[0].register_forward_hook(exchange)
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    assert len(used) == 8 and all(torch.equal(a, b) for a, b in used)


def test_frozen_weights_ask_for_nothing(found: Any) -> None:
    model, ids = adapted("llama", FULL), tokens(2, 12)
    fuse(model)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    assert not found["at once"] and len(found["alone"]) == 8, "once each, and kept"


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_keeping_all_keeps_the_transposed_weights_and_changes_nothing(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = adapted(family, FULL, lora=None), tokens(2, 12)
    fuse(model)
    made: list[Any] = []
    true = Float8Projection._weight

    def noted(self: Any, transposed: bool) -> Any:
        made.append(transposed)
        return true(self, transposed)

    monkeypatch.setattr(Float8Projection, "_weight", noted)
    products = loss_and_gradients(model, ids)
    assert len(made) == 2 * 8
    made.clear()
    for layer in fused_layers(model):
        layer.keep = KEEP_ACTIVATIONS
    everything = loss_and_gradients(model, ids)
    assert not made, "both ways in one pass"
    torch.testing.assert_close(everything[0], products[0], rtol=0, atol=0)
    for name, gradient in products[1].items():
        torch.testing.assert_close(everything[1][name], gradient, rtol=0, atol=0)
    with torch.no_grad():
        model(input_ids=ids)
    assert made == [False] * 8, "nothing is kept where no backward pass follows"
