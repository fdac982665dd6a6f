"""Models whose experts run in streams: found by name, put in, saved, loaded, taken out; or refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbits import convert, restore
from fewbits.errors import SpecMismatch, Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.models.packing.split_experts import experts_split, join_experts, split_experts
from fewbits.models.stochastic.switch import Switched, linear_names
from fewbits.nn.split_experts import SplitExperts
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from tests.models.mixtures import mixture
from tests.models.tiny import tokens

KINDS = ("mixtral", "qwen3_moe")


def config_of(*linears, length=64):
    attention = (("*", AttentionSetting(scores=length, values=length)),)
    return StochasticConfig(options=STOCHASTIC.with_length(length), linears=linears, attention=attention)


@torch.no_grad()
def logits(model):
    return model(input_ids=tokens()).logits


@pytest.mark.parametrize("kind", KINDS)
def test_split_and_joined_again(kind):
    model = mixture(kind)
    expected, weights = logits(model), {n: p.clone() for n, p in model.named_parameters()}
    with experts_split(model):
        assert any(isinstance(m, SplitExperts) for m in model.modules())
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(model), expected)
    split_experts(model)
    joined = join_experts(model)
    assert len(joined) == 2 and joined[0].endswith("mlp.experts")
    after = dict(model.named_parameters())
    assert after.keys() == weights.keys() and all(torch.equal(after[n], weights[n]) for n in weights)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_run_as_the_configuration_says(kind, tmp_path):
    model = mixture(kind)
    before = logits(model)
    names = linear_names(model, STOCHASTIC)
    assert sum(".experts." in name for name in names) == 2 * 3 * (8 if kind == "qwen3_moe" else 4)
    config = config_of(
        ("*.experts.1.down_proj", LinearSetting(runs="int8")),
        ("*.experts.*.gate_proj", LinearSetting(lengths=((32,),))),
    )
    receipt = convert(model, config, keep_original=True)
    assert not any("experts" in left.name for left in receipt.left)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, StochasticLinear)}
    assert set(layers) == set(names)
    assert layers["model.layers.1.mlp.experts.1.down_proj"].int8
    assert layers["model.layers.0.mlp.experts.3.gate_proj"].levels == (32,)
    ours = logits(model)
    assert 0 < (ours - before).norm() < before.norm()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), ours)
    restore(model)
    assert torch.equal(logits(model), before)


def test_one_configuration_after_another():
    model = mixture("mixtral")
    before, first = logits(model), config_of()
    second = config_of(("*.experts.*.up_proj", LinearSetting(lengths=((16,),))))
    with Switched(model, first) as switched:
        changed = switched.to(second)
        assert len(changed) == 8 and all(name.endswith("up_proj") for name in changed)
        ours = logits(model)
    assert torch.equal(logits(model), before)
    convert(model, second, fuse_norms=False)
    assert torch.equal(logits(model), ours)


def test_a_named_recipe_takes_experts_too():
    model = mixture("mixtral")
    receipt = convert(model, "stochastic")
    assert sum(".experts." in change.name for change in receipt.changes) == 24
    restore(model)
    assert not any(isinstance(m, SplitExperts) for m in model.modules())


def test_experts_that_cannot_be_split_are_refused_unless_exact():
    model = mixture("gpt_oss")
    before = {n: type(m) for n, m in model.named_modules()}
    with pytest.raises(Unsupported, match=r"experts cannot be linears of their own .* let them be exact"):
        convert(model, config_of())
    assert {n: type(m) for n, m in model.named_modules()} == before


def test_a_slip_leaves_the_experts_as_they_were():
    model = mixture("mixtral")
    with pytest.raises(SpecMismatch, match="matches nothing"):
        convert(model, config_of(("*.experts.9.down_proj", LinearSetting(runs="int8"))))
    assert not any(isinstance(m, SplitExperts) for m in model.modules())
