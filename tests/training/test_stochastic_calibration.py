"""Calibration from a model to a configuration that fits it, meets its budget and makes errors smaller."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.stochastic.trace import Trace
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.models.packing.split_experts import experts_split
from fewbits.models.stochastic.in_model import check_config
from fewbits.nn.split_experts import SplitExperts
from fewbits.recipes.stochastic_config import (
    LinearSetting,
    StochasticConfig,
    config_from_plain,
    config_to_plain,
)
from fewbits.training.calibration.stochastic import Calibration, calibrate_stochastic
from tests.models.mixtures import mixture
from tests.models.tiny import tiny, tokens

OPTIONS = dataclasses.replace(STOCHASTIC, chunk_d=32)
LEVELS = (16, 32, 64, 128)


def _calibrate(model, **settings):
    made = Calibration(levels=LEVELS, rows=64, **settings)
    return calibrate_stochastic(model, [tokens(4, 24)], made, options=OPTIONS)


@pytest.mark.parametrize("smoothing", ["smoothquant", "awq", "none"])
def test_a_configuration_that_fits_and_meets_its_budget(smoothing):
    model = tiny("llama")
    config = _calibrate(
        model, budget=40, groups=2, smoothing=smoothing, protected=2, int8_share=0.2, attention=64
    )
    check_config(model, config)
    assert config_from_plain(config_to_plain(config)) == config
    assert config.calibration["mean_cycles"] <= 40
    runs = [s.runs for _, s in config.linears]
    assert 0 < runs.count("int8") < len(runs) == 14
    assert 0 < config.calibration["int8_macs_share"] <= 0.2
    found = [s for _, s in config.linears if s.runs == "stochastic"]
    assert all(len(s.lengths) == 2 and len(s.thresholds) == 1 and len(s.protected) == 2 for s in found)
    assert len({n for s in found for row in s.lengths for n in row}) > 1
    if smoothing == "smoothquant":
        assert all(s.smooth_scales is not None for s in found)
    receipt = apply_stochastic(model, config)
    with torch.no_grad():
        assert model(tokens()).logits.isfinite().all()
    assert any("64 cycles" in note for note in receipt.notes)


def test_mixed_lengths_change_the_loss_less_than_a_uniform_one():
    ids = tokens(8, 24, seed=5)

    def change(config):
        exact, model = tiny("llama"), tiny("llama")
        apply_stochastic(model, config, fuse_norms=False)
        with torch.no_grad():
            p, q = exact(ids).logits.log_softmax(-1), model(ids).logits.log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    uniform = change(StochasticConfig(options=OPTIONS.with_length(32)))
    mixed = change(_calibrate(tiny("llama"), budget=32, smoothing="none"))
    assert mixed < uniform


def test_the_budget_decides():
    few = _calibrate(tiny("llama"), budget=16)
    assert {n for _, s in few.linears for row in s.lengths for n in row} == {16}
    many = _calibrate(tiny("llama"), budget=1000)
    assert many.calibration["mean_cycles"] > 100


def test_refusals():
    for settings, sentence in (
        ({"smoothing": "gptq"}, "smoothing 'gptq' is unknown"),
        ({"int8_share": 1.0}, "from 0 to below 1"),
        ({"groups": 0}, "groups=0 is refused"),
    ):
        with pytest.raises(BadInput, match=sentence):
            Calibration(**settings)
    with pytest.raises(BadInput, match="256 is out of range; choose from 1 to 128"):
        calibrate_stochastic(tiny("llama"), [tokens()], Calibration(levels=(16, 256)), options=OPTIONS)
    with pytest.raises(BadInput, match="below the shortest"):
        _calibrate(tiny("llama"), budget=8)
    model = tiny("llama")
    apply_stochastic(model, StochasticConfig(options=OPTIONS, linears=(("*", LinearSetting()),)))
    with pytest.raises(Unsupported, match="calibrate its original form"):
        _calibrate(model)


def test_experts_are_calibrated_as_often_as_rows_come_to_them():
    model = mixture("mixtral")
    names = {name for name, _ in model.named_modules()}
    ids = tokens(1, 3).repeat(32, 1)  # six rows at most are told apart, so some expert has none
    settings = Calibration(levels=LEVELS, rows=64, budget=40, smoothing="smoothquant")
    config = calibrate_stochastic(model, [ids], settings, options=OPTIONS)
    assert {name for name, _ in model.named_modules()} == names
    of_experts = {name: s for name, s in config.linears if ".experts." in name}
    rows = rows_by_expert(model, ids)
    assert 0 in rows.values() and len({*rows.values()}) > 2
    assert set(of_experts) == {
        f"{n}.{w}" for n in rows for w in ("gate_proj", "up_proj", "down_proj") if rows[n]
    }
    apply_stochastic(model, config)
    with Trace(model, lambda event: None) as trace, torch.no_grad():
        model(ids)
    # Where all rows were measured, the budget is met in what the model really runs.
    assert trace.cycles / trace.macs <= 40 * 1.01 and config.calibration["tokens"] == 96


def rows_by_expert(model, ids):
    rows = {}
    with experts_split(model), torch.no_grad():
        split = {n: m for n, m in model.named_modules() if isinstance(m, SplitExperts)}
        for name, module in split.items():
            rows |= {f"{name}.{i}": 0 for i in range(module.count)}
        hooks = [
            module.get_submodule(f"{i}.up_proj").register_forward_pre_hook(
                lambda _, args, key=f"{name}.{i}": rows.__setitem__(key, len(args[0]))
            )
            for name, module in split.items()
            for i in range(module.count)
        ]
        model(ids)
        for hook in hooks:
            hook.remove()
    return rows
