"""What is counted, what it costs, and which settings no other beats."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.stochastic.energy import best_points, energy_of
from fewbits.inference.stochastic.trace import Trace
from fewbits.inference.stochastic.work import Product, Work, count_work
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.recipes.energy_prices import PUBLISHED, Prices
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from tests.models.tiny import tiny, tokens

OPTIONS = dataclasses.replace(STOCHASTIC, chunk_d=16, stoc_len=32)
DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.up_proj"
MIXED = StochasticConfig(
    options=OPTIONS,
    linears=(
        (DOWN, LinearSetting(runs="int8")),
        (UP, LinearSetting(lengths=((64,), (16,)), thresholds=(2.6,), protected=(3, 40))),
        ("*.o_proj", LinearSetting(runs="exact")),
    ),
    attention=(("*.0.self_attn", AttentionSetting(scores=32)),),
)


def test_every_product_of_a_plain_model_is_counted():
    model = tiny("llama")
    work = count_work(model, tokens(2, 10))
    linears = sum(20 * m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    attention = 2 * 2 * (2 * 4 * 10 * 10 * 16)  # layers, products; rows, keys, head
    assert sum(p.macs for p in work.products) == linears + attention
    assert work.tokens == 20 and work.mean_cycles is None
    assert {p.runs for p in work.products} == {"exact"} and {p.bits for p in work.products} == {32}


def test_what_a_mixed_table_counts_agrees_with_the_trace():
    model = tiny("llama")
    apply_stochastic(model, MIXED)
    ids, events = tokens(2, 10), []
    with Trace(model, events.append) as trace, torch.no_grad():
        model(ids)
    work = count_work(model, ids)
    by = {(p.layer, p.op, p.runs): p for p in work.products}
    streams = [p for p in work.products if p.runs == "stochastic"]
    assert sum(p.cycles for p in work.products) == trace.cycles
    assert sum(p.macs for p in work.products if p.runs != "exact") == trace.macs
    assert work.mean_cycles == trace.cycles / sum(p.macs for p in streams)
    up = by[UP, "linear", "stochastic"]
    assert (up.inner, up.chunks) == (62, 4) and by[UP, "linear", "exact"].inner == 2
    assert 20 * 16 * 62 * 128 < up.cycles < 20 * 64 * 62 * 128  # rows of both groups
    assert by[DOWN, "linear", "int"].macs == 20 * 128 * 64
    scores = by["model.layers.0.self_attn", "scores", "stochastic"]
    assert (scores.sharing, scores.cycles) == (2, scores.macs * 32)
    assert by["model.layers.0.self_attn", "values", "exact"].macs == scores.macs


PRICES = Prices(
    sc_cycle=2.0, sc_product=3.0, stream_bit=5.0, count=7.0, quantize=11.0, int_mac={8: 13.0},
    float_mac={16: 17.0}, near_byte=19.0, far_byte=23.0, rows=4, columns=8,
)  # fmt: skip


def test_an_energy_is_the_sum_of_its_operations():
    linear = {"op": "linear", "rows": 6, "inner": 10, "outputs": 20, "chunks": 3, "b_bytes": 1.0}
    streams = Product(layer="l", runs="stochastic", bits=8, cycles=12000, **linear)
    found = energy_of(Work((streams,), 6), PRICES, tokens_per_pass=2)
    macs, moved = 1200, 1200 / 8 + 1200 / 2  # 8 columns; 2 tokens meet a weight, though 4 rows would fit
    expected = {
        "streams": 12000 * 2 + macs * 3,
        "conversion": (12000 / 8 + 12000 / 2) * 5 + 6 * 20 * 3 * 7 + 60 * 11,
        "near": (moved + 120 * 2) * 19,
        "far": macs / 2 * 23,
        "integer": 0,
        "float": 0,
    }
    assert found.parts == pytest.approx({k: v * 1e-12 / 6 for k, v in expected.items()})
    assert found.joules == pytest.approx(sum(expected.values()) * 1e-12 / 6)
    whole = energy_of(Work((dataclasses.replace(streams, runs="int", cycles=0),), 6), PRICES)
    assert whole.parts["integer"] == pytest.approx(macs * 13e-12 / 6) and whole.parts["streams"] == 0
    exact = dataclasses.replace(streams, runs="exact", bits=16, layer="lm_head", cycles=0)
    half = energy_of(Work((exact,), 6), PRICES)
    assert half.parts["float"] == pytest.approx(macs * 17e-12 / 6) and half.parts["conversion"] == 0
    assert half.by_op == pytest.approx({"lm_head": half.joules})


def test_keys_are_quantised_once_for_the_heads_that_share_them():
    scores = Product(
        layer="a", op="scores", runs="stochastic", bits=8, rows=40, inner=16, outputs=10, sharing=4, cycles=0
    )
    free = Prices(sc_cycle=0.0, stream_bit=0.0, count=0.0, quantize=1.0, near_byte=0.0, far_byte=0.0)
    assert energy_of(Work((scores,), 1), free).joules == pytest.approx((640 + 160) * 1e-12)
    values = dataclasses.replace(scores, op="values", inner=10, outputs=16)
    assert energy_of(Work((values,), 1), free).joules == pytest.approx((400 + 160) * 1e-12)


def test_shorter_streams_cost_less_and_more_tokens_share_the_weights():
    energies = {}
    for length in (16, 64):
        model = tiny("qwen3")
        options = dataclasses.replace(OPTIONS, stoc_len=length)
        apply_stochastic(model, StochasticConfig(options=options))
        work = count_work(model, tokens(1, 12))
        energies[length] = energy_of(work, PUBLISHED["horowitz-45nm"])
        many = energy_of(work, PUBLISHED["horowitz-45nm"], tokens_per_pass=12)
        assert many.parts["far"] == pytest.approx(energies[length].parts["far"] / 12)
    assert energies[64].parts["streams"] == pytest.approx(4 * energies[16].parts["streams"])
    assert energies[16].joules < energies[64].joules


def test_what_cannot_be_priced_is_refused():
    model = tiny("llama")
    apply_stochastic(model, MIXED)
    work = count_work(model, tokens(1, 8))
    with pytest.raises(BadInput, match="tubgemm-5nm has no price for near_byte"):
        energy_of(work, PUBLISHED["tubgemm-5nm"])
    with pytest.raises(BadInput, match="no price for float_mac of 32 bits"):
        energy_of(work, dataclasses.replace(PUBLISHED["horowitz-45nm"], float_mac={16: 1.5}))
    with pytest.raises(BadInput, match="0 tokens in a pass"):
        energy_of(work, PUBLISHED["horowitz-45nm"], tokens_per_pass=0)
    with pytest.raises(BadInput, match="hold no rows of tokens"):
        count_work(model, torch.zeros(0, 4, dtype=torch.long))
    other = tiny("llama")
    other.model.layers[0].mlp.extra = torch.nn.Conv1d(2, 2, 1)
    with pytest.raises(Unsupported, match=r"mlp\.extra\.weight is a weight of Conv1d, whose products"):
        count_work(other, tokens(1, 8))


def test_the_front_holds_what_no_other_point_beats():
    points = [(3, 1.0), (1, 3.0), (2, 2.0), (2, 2.5), (3, 1.0), (4, math.nan), (5, 1.0)]
    front = best_points(points, (lambda p: p[0], lambda p: p[1]))
    assert front == [(1, 3.0), (2, 2.0), (3, 1.0), (3, 1.0)]
