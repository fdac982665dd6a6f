"""Errors, traces and evaluations under stochastic computing, against plain computations of the same."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fewbits import sc_matmul
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.formats.streams import product_tables
from fewbits.inference.evaluate import perplexity, text_windows
from fewbits.inference.stochastic.error import (
    capture_operands,
    product_error,
    read_operands,
    settings_of,
    table_error,
)
from fewbits.inference.stochastic.evaluation import EvalSetting, Ledger, evaluate_setting
from fewbits.inference.stochastic.trace import Trace
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from tests.models.tiny import tiny, tokens

OPTIONS = dataclasses.replace(STOCHASTIC, chunk_d=16, stoc_len=32)
WORDS = {"halve_bipolar_stoc_len": True, "chunk_d": 16, "n_masks": 64, "stoc_len": 32}
ALL = StochasticConfig(options=OPTIONS, attention=(("*", AttentionSetting(scores=32, values=64)),))


def test_error_is_that_of_the_products():
    pairs = {"one": (torch.randn(4, 20), torch.randn(3, 20)), "two": (torch.randn(5, 8), torch.randn(2, 8))}
    errors, exact = [], []
    for a, b in pairs.values():
        exact.append((a.double() @ b.double().T).flatten())
        errors.append(sc_matmul(a, b, **WORDS).double().flatten() - exact[-1])
    error, truth = torch.cat(errors), torch.cat(exact)
    found = product_error(pairs, OPTIONS)
    assert found.values == 22
    assert found.mse == pytest.approx(float(error.square().mean()))
    assert found.bias == pytest.approx(float(error.mean()))
    assert found.worst == pytest.approx(float(error.abs().max()))
    assert found.relative == pytest.approx(float(error.norm() / truth.norm()))


def test_published_ordering_on_captured_operands(stories260k, tinystories):
    """bitrev about counter, both far below off for short streams, halve no worse than full."""
    ids = torch.tensor(stories260k.tokenizer(tinystories[:2000])["input_ids"][:128])[None]
    names = [f"model.layers.{i}.mlp.{p}" for i in (0, 4) for p in ("up_proj", "down_proj")]
    operands = capture_operands(stories260k.model, ids, names, rows=24)
    base = Stochastic(chunk_d=128, n_masks=64)
    mse = {
        (o.streams.length, o.scramble, o.halve_bipolar_stoc_len): product_error(operands, o).mse
        for o in settings_of(base, (16, 32, 128), ("bitrev", "counter", "off"), (True, False))
    }
    for length in (16, 32):
        for half in (True, False):
            assert 0.5 < mse[length, "bitrev", half] / mse[length, "counter", half] < 1.5
            assert mse[length, "off", half] > 1.7 * mse[length, "counter", half]
            assert mse[length, "off", half] > 2 * mse[length, "bitrev", half]
    for length in (16, 32, 128):
        assert mse[length, "bitrev", True] < 1.05 * mse[length, "bitrev", False]


def test_table_error_is_the_mean_over_dimensions():
    options = dataclasses.replace(OPTIONS, sc_prec=4, stoc_len=5)
    tables = product_tables(options.streams, options.masks(12), torch.device("cpu")).double()
    Q = options.max_code
    u = torch.arange(Q + 1).double()
    expected = tables.mean(0) / 5 - u[:, None] * u / Q**2
    torch.testing.assert_close(table_error(options, 12).double(), expected, rtol=1e-5, atol=1e-6)


def test_operands_from_files(tmp_path):
    a, b = torch.randn(3, 4), torch.randn(2, 4)
    np.savez(tmp_path / "one.npz", a=a.numpy(), b=b.numpy())
    save_file({"up.a": a, "up.b": b, "left": a.clone()}, tmp_path / "two.safetensors")
    assert torch.equal(read_operands(tmp_path / "one.npz")["a b^T"][1], b)
    assert list(read_operands(tmp_path / "two.safetensors")) == ["up"]
    save_file({"x": a}, tmp_path / "none.safetensors")
    (tmp_path / "broken.npz").write_bytes(b"PK no")
    (tmp_path / "words.txt").write_text("a b")
    for name, sentence in {
        "none.safetensors": r"holds no pair of operands \(it has x\); name them",
        "broken.npz": "cannot be read",
        "words.txt": "neither .npz nor .safetensors",
        "absent.npz": "there is no file",
    }.items():
        with pytest.raises(BadInput, match=sentence):
            read_operands(tmp_path / name)


def test_bad_operands_and_settings():
    nan = torch.full((2, 4), torch.nan)
    for pair, sentence in (
        ((torch.ones(2, 3), torch.ones(2, 4)), r"a is \(2, 3\) and b \(2, 4\)"),
        ((nan, torch.ones(2, 4)), "NaN or infinite"),
    ):
        with pytest.raises(BadInput, match=sentence):
            product_error({"x": pair}, OPTIONS)
    with pytest.raises(BadInput, match="no operands"):
        product_error({}, OPTIONS)
    with pytest.raises(BadInput, match="scramble 'owen' is unknown"):
        settings_of(OPTIONS, (16,), ("owen",), (True,))
    with pytest.raises(BadInput, match="300 is out of range: streams of 8 bits have at most 256 steps"):
        settings_of(OPTIONS, (300,), ("off",), (True, False))
    assert len(settings_of(OPTIONS, (128, 256), ("off",), (True, False))) == 3


def test_trace_counts_every_product(tmp_path):
    model = tiny("llama")
    q, down = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    config = dataclasses.replace(
        ALL,
        linears=(
            (q, LinearSetting(lengths=((64, 16, 16, 0),), protected=(0, 20))),
            (down, LinearSetting(runs="int8")),
            ("*.o_proj", LinearSetting(runs="exact")),
        ),
    )
    apply_stochastic(model, config)
    events: list[dict] = []
    file = tmp_path / "trace.jsonl"
    with Trace(model, events.append) as trace, Trace(model, file), torch.no_grad():
        model(tokens(2, 10))
    assert [json.loads(line) for line in file.read_text().splitlines()] == events
    with torch.no_grad():
        model(tokens(2, 10))
    assert len(events) == 2 * 6 + 2 * 2
    by = {(e["layer"], e["op"]): e for e in events}
    assert by[q, "linear"]["macs"] == 20 * 62 * 64
    assert by[q, "linear"]["cycles"] == 20 * 64 * (15 * 64 + 15 * 16 + 16 * 16)
    assert by[down, "linear"] == {
        "layer": down,
        "op": "linear",
        "runs": "int8",
        "rows": 20,
        "macs": 20 * 128 * 64,
        "cycles": 0,
    }
    scores = by["model.layers.1.self_attn", "scores"]
    assert scores["rows"] == 2 * 4 * 10 and scores["macs"] == 2 * 4 * 10 * 10 * 16
    assert by["model.layers.1.self_attn", "values"]["cycles"] == scores["macs"] * 64
    assert trace.macs == sum(e["macs"] for e in events) and trace.cycles == sum(e["cycles"] for e in events)
    with pytest.raises(Unsupported, match="no stochastic products to trace"):
        Trace(tiny("llama"), file)


def test_trace_follows_lengths_by_rows():
    model = tiny("llama")
    name = "model.layers.0.self_attn.q_proj"
    setting = LinearSetting(lengths=((64,), (16,)), thresholds=(1.0,))
    apply_stochastic(model, StochasticConfig(options=OPTIONS, linears=((name, setting),)))
    x = torch.cat([torch.full((3, 64), 2.0), torch.full((5, 64), 0.5)])
    events: list[dict] = []
    with Trace(model, events.append):
        model.get_submodule(name)(x)
    assert events[0]["cycles"] == (3 * 64 + 5 * 16) * 64 * 64


@pytest.fixture
def small(stories260k, tinystories):
    return stories260k.model, stories260k.tokenizer, tinystories[:4000]


def test_eval_gives_perplexity_and_the_model_back(small):
    model, tokenizer, text = small
    cut = text_windows(model, tokenizer, text, window=64, max_tokens=400)
    ledger = Ledger(None)
    settings = [EvalSetting("plain"), EvalSetting("int8", recipe="int8"), EvalSetting("sc", ALL)]
    rows = [evaluate_setting(model, cut, s, ledger, facts={}, batch_size=3) for s in settings]
    expected = perplexity(model, tokenizer, text, window=64, max_tokens=400, batch_size=3)
    assert rows[0]["perplexity"] == pytest.approx(expected.perplexity)
    assert rows[1]["perplexity"] == pytest.approx(expected.perplexity, rel=0.02)
    assert rows[2]["perplexity"] > 1.1 * expected.perplexity and rows[2]["tokens"] == 400
    again = evaluate_setting(model, cut, settings[0], Ledger(None), facts={}, batch_size=3)
    assert again["nll"] == rows[0]["nll"]


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_where_it_stopped(small, tmp_path):
    model, tokenizer, text = small
    cut = text_windows(model, tokenizer, text, window=64, max_tokens=400)
    whole = evaluate_setting(model, cut, EvalSetting("sc", ALL), Ledger(None), facts={}, batch_size=2)
    file = tmp_path / "eval.jsonl"

    def kill(scored: int, total: int) -> None:
        if scored > total / 2:
            raise Killed

    with pytest.raises(Killed):
        evaluate_setting(
            model, cut, EvalSetting("sc", ALL), Ledger(file), facts={}, batch_size=2, progress=kill
        )
    file.write_text(file.read_text() + '{"id": "cut sho')
    scored: list[int] = []
    rest = evaluate_setting(
        model,
        cut,
        EvalSetting("renamed", ALL),
        Ledger(file),
        facts={},
        batch_size=2,
        progress=lambda done, _: scored.append(done),
    )
    assert math.isclose(rest["nll"], whole["nll"], rel_tol=1e-12) and rest["setting"] == "renamed"
    assert scored[0] > 200
    scored.clear()
    other = dataclasses.replace(ALL, options=OPTIONS.with_length(33))
    ledger = Ledger(file)
    evaluate_setting(model, cut, EvalSetting("sc", ALL), ledger, facts={}, batch_size=2, progress=kill_never)
    with pytest.raises(Killed):
        evaluate_setting(
            model, cut, EvalSetting("sc", other), ledger, facts={}, batch_size=2, progress=kill_at_once
        )


def kill_never(scored: int, total: int) -> None:
    assert scored == total


def kill_at_once(scored: int, total: int) -> None:
    raise Killed


def test_a_ledger_of_something_else(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"b": 2}\n')
    with pytest.raises(BadInput, match="line 1, is no line of an evaluation"):
        Ledger(file)


@pytest.mark.parametrize(
    "fields",
    [{"signs": "twos_complement"}, {"gate": "and"}, {"or_group": 4, "gate": "and", "scramble": "cells"}],
)
def test_errors_of_further_arithmetics(fields):
    options = dataclasses.replace(OPTIONS, stoc_len=128, **fields)
    table = table_error(options, 16)
    assert table.shape == (options.streams.num_codes,) * 2 and 0 < table.abs().max() < 0.5
    a, b = torch.randn(8, 32), torch.randn(8, 32)
    error = product_error({"x": (a, b)}, options)
    expected = sc_matmul(a, b, **{**WORDS, "stoc_len": 128, **fields}).double() - a.double() @ b.double().T
    assert error.mse == pytest.approx(float(expected.square().mean()))


def test_settings_of_an_arithmetic_stop_at_its_plan_and_keep_its_cells():
    planned = dataclasses.replace(OPTIONS, stoc_len=None, planned_len=64)
    lengths = [o.length for o in settings_of(planned, (16, 64, 128), ("off",), (True,))]
    assert lengths == [16, 64]
    with pytest.raises(BadInput, match="fits halved streams of 8 bits planned for 64 steps"):
        settings_of(planned, (100,), ("off",), (True,))
    cells = dataclasses.replace(OPTIONS, gate="and", or_group=4, scramble="cells")
    assert {o.scramble for o in settings_of(cells, (32,), ("bitrev", "off"), (True,))} == {"cells"}
