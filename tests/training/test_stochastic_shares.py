"""Attention's share of a budget: the choice fits it and is no worse than equal lengths on its text."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from fewbits.cli.sc.commands import words_of_shares
from fewbits.errors import BadInput
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.stochastic.trace import Trace
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.recipes.stochastic_config import config_from_plain, config_to_plain
from fewbits.training.calibration.stochastic import Calibration, calibrate_stochastic
from tests.models.tiny import tiny, tokens

OPTIONS = dataclasses.replace(STOCHASTIC, chunk_d=32)
LEVELS = (16, 24, 32, 48, 64, 128)


def calibrated(ids, **settings):
    how = Calibration(levels=LEVELS, rows=512, **{"smoothing": "none", **settings})
    return calibrate_stochastic(tiny("llama"), [ids], how, options=OPTIONS)


def loss_and_cycles(config, ids):
    model = tiny("llama")
    apply_stochastic(model, config, fuse_norms=False)
    with Trace(model, lambda event: None) as trace, torch.no_grad():
        loss = model(ids, labels=ids).loss
    return float(loss), trace.cycles / trace.macs


def test_the_whole_meets_the_budget_and_the_best_was_taken():
    ids, seen = tokens(6, 40, seed=3), []
    how = Calibration(levels=LEVELS, rows=512, smoothing="none", budget=32, attention="auto")
    config = calibrate_stochastic(
        tiny("llama"), [ids], how, options=OPTIONS, screening=lambda *at: seen.append(at)
    )
    facts = config.calibration["attention_shares"]
    setting = dict(config.attention)["*"]
    assert (facts["scores"], facts["values"]) == (setting.scores, setting.values)
    assert facts["tried"] > 10 and seen and seen[-1][0] == seen[-1][1]
    loss, cycles = loss_and_cycles(config, ids)
    assert 31 < cycles <= 32 * 1.001
    assert cycles == pytest.approx(config.calibration["mean_cycles"], abs=2e-3)
    equal, equal_cycles = loss_and_cycles(calibrated(ids, budget=32, attention=32), ids)
    assert equal_cycles <= 32 * 1.001 and loss <= equal
    if facts["against_equal"] is not None:
        assert loss - equal == pytest.approx(facts["against_equal"][0], abs=1e-4)
    assert config_from_plain(config_to_plain(config)) == config


def test_linears_that_run_int8_leave_the_budget_to_the_others():
    ids = tokens(5, 24, seed=4)
    config = calibrated(ids, budget=40, attention="auto", int8_share=0.3)
    assert config.calibration["int8_macs_share"] > 0
    assert loss_and_cycles(config, ids)[1] <= 40 * 1.001


def test_refusals():
    with pytest.raises(BadInput, match="attention='all' is refused; give a length, 'auto' or None"):
        Calibration(attention="all")
    for length in (0, 300):
        with pytest.raises(BadInput, match=f"length of {length} is out of range; choose from 1 to 128"):
            calibrated(tokens(4, 24), attention=length)
    with pytest.raises(BadInput, match="leaves attention no lengths to choose between"):
        calibrated(tokens(4, 24), budget=500, attention="auto")
    with pytest.raises(BadInput, match="no lengths to choose between"):
        calibrated(tokens(4, 24), budget=8, attention="auto")


def test_one_window_says_nothing_that_json_cannot() -> None:
    config = calibrated(tokens(1, 16), budget=64, attention="auto")
    facts = config.calibration["attention_shares"]
    json.dumps(config_to_plain(config), allow_nan=False)
    assert facts["against_equal"] is not None and facts["against_equal"][1:] == [None, None]
    assert "one window says not how surely" in words_of_shares(facts)
