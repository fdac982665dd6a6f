"""Stochastic layers that share an input compute the bits that they compute alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fewbits.errors import Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.decode import Decoding
from fewbits.models.loading.in_memory import convert, restore
from fewbits.models.stochastic.sharing import share_inputs, unshare_inputs
from fewbits.nn.stochastic.group import MOST_ROWS, StochasticGroup
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.recipes import get_recipe
from tests.models.tiny import tiny, tokens


def layers(bias: bool = False, **settings: Any) -> list[StochasticLinear]:
    made = []
    for out_features in (48, 16, 16):
        linear = nn.Linear(200, out_features, bias=bias)
        made.append(StochasticLinear.from_linear(linear, STOCHASTIC, **settings))
    return made


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the outputs of each product that is computed for a group."""
    seen: list[int] = []
    original = StochasticGroup._computed

    def counted(self: StochasticGroup, x: torch.Tensor) -> torch.Tensor:
        y = original(self, x)
        seen.append(y.shape[1])
        return y

    monkeypatch.setattr(StochasticGroup, "_computed", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(200,), (1, 200), (2, 3, 200)])
@pytest.mark.parametrize("settings", [{}, {"bias": True}, {"smooth_scales": torch.linspace(0.5, 2, 200)}])
@torch.no_grad()
def test_the_same_bits(settings, shape, dtype, monkeypatch) -> None:
    members = layers(**settings)
    x = torch.randn(shape).to(dtype)
    expected = [layer(x) for layer in members]
    group, computed = StochasticGroup(members), calls(monkeypatch)
    for order in ((0, 1, 2), (2, 0, 1)):
        got = {i: members[i](x) for i in order}
        assert all(torch.equal(got[i], expected[i]) for i in order)
    assert computed == [80, 80]  # once for each round
    assert group._pending is None  # nothing is kept


@torch.no_grad()
def test_other_inputs_are_never_taken_for_it(monkeypatch) -> None:
    members = layers()
    x, other = torch.randn(1, 200), torch.randn(1, 200)
    alone = [[layer(y) for layer in members] for y in (x, other)]
    StochasticGroup(members)
    computed = calls(monkeypatch)
    assert torch.equal(members[0](x), alone[0][0])
    assert torch.equal(members[1](other), alone[1][1])  # another input in between
    assert torch.equal(members[1](x), alone[0][1])
    assert torch.equal(members[2](x.clone()), alone[0][2])
    assert len(computed) == 4
    members[0](x)
    changed = x.mul_(2)  # and once more the same tensor: its part was taken, so it is computed again
    assert torch.equal(members[0](changed), 2 * alone[0][0])


def test_it_stands_back(monkeypatch) -> None:
    members, x = layers(), torch.randn(1, 200)
    StochasticGroup(members)
    computed = calls(monkeypatch)
    y = members[0](x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        members[0](torch.randn(MOST_ROWS + 1, 200))
        weight = torch.randn(16, 200)
        members[1].pack(weight)  # no longer a part of the whole
        fresh = StochasticLinear.from_linear(nn.Linear(200, 16, bias=False), STOCHASTIC)
        fresh.pack(weight)
        x = x.detach()
        assert torch.equal(members[1](x), fresh(x)) and torch.equal(members[0](x), y.detach())
        members[1] = members[2]
    assert computed == []
    with torch.no_grad():
        others = layers()
        StochasticGroup(others)
        twin = copy.deepcopy(others)
        expected = [layer(x) for layer in others]
        assert all(torch.equal(layer(x), y) for layer, y in zip(twin, expected, strict=True))
        others[0].int8 = True
        assert torch.equal(others[1](x), expected[1])


def test_refusals() -> None:
    members = layers()
    with pytest.raises(Unsupported, match="cannot share an input: there are fewer than two"):
        StochasticGroup(members[:1])
    members[1].set_lengths([[64]])
    with pytest.raises(Unsupported, match="options, stream lengths, devices or dtypes differ"):
        StochasticGroup(members)
    members = layers()
    members[2].use_int8(True)
    with pytest.raises(Unsupported, match="one runs INT8 or exact, has protected channels or several"):
        StochasticGroup(members)
    members = [*layers()[:2], layers(smooth_scales=torch.full((200,), 2.0))[2]]
    with pytest.raises(Unsupported, match="their smooth_scales differ"):
        StochasticGroup(members)
    assert all(layer.group is None for layer in members)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_models(family: str, monkeypatch, tmp_path) -> None:
    model, ids = tiny(family), tokens(2, 10)
    convert(model, get_recipe("stochastic"))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    decoding = Decoding(model, batch_size=2, max_tokens=32)
    decoding.prefill(ids)
    expected = decoding.decode(8)
    assert share_inputs(model).notes == ["4 groups of linears share their input where few rows pass"]
    assert share_inputs(model).notes[0].startswith("0 groups")
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == size
    computed = calls(monkeypatch)
    decoding.prefill(ids)
    assert torch.equal(decoding.decode(8), expected)
    assert len(computed) == 7 * 4  # steps, groups; the prompt has too many rows
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for (name, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    unshare_inputs(model)
    del computed[:]
    decoding.prefill(ids)
    assert torch.equal(decoding.decode(8), expected) and not computed
    restore(model)


def test_what_does_not_fit_is_said() -> None:
    model = tiny("llama")
    convert(model, get_recipe("stochastic"))
    model.model.layers[0].mlp.up_proj.set_lengths([[32]])
    made, left = share_inputs(model).notes
    assert made.startswith("3 groups") and left.startswith("1 groups do not: their inputs, options, stream")
    assert share_inputs(tiny("llama")).notes[0].startswith("0 groups")
