"""`sc_matmul` in every arithmetic: equal to streams that are generated clock by clock, whatever the path."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fewbits import sc_matmul
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.formats.streams import product_tables
from fewbits.kernels.stochastic import choice, lookup, or_counts, thermometer
from fewbits.kernels.stochastic.codes import (
    stochastic_codes,
    stochastic_codes_ref,
    stochastic_path,
    without_tables,
)
from tests.formats.generated_arithmetic import count_rows, random_arithmetic
from tests.formats.generated_streams import generated_matmul

SMALL = Stochastic(sc_prec=5, halve_bipolar_stoc_len=True, chunk_d=8, n_masks=5)
ARITHMETICS: dict[str, dict[str, Any]] = {
    "and": {"gate": "and"},
    "twos": {"signs": "twos_complement"},
    "twos-and": {"signs": "twos_complement", "gate": "and"},
    "or": {"or_group": 4},
    "or-and": {"or_group": 2, "gate": "and"},
    "cells": {"or_group": 4, "gate": "and", "scramble": "cells"},
    "flips": {"flip_rate": 0.1, "flip_seed": 7},
    "or-flips": {"or_group": 4, "flip_rate": 0.1},
    "early": {"planned_len": 16, "stoc_len": 9},
    "unary": {"sequence": "unary"},
    "unary-and": {"sequence": "unary", "gate": "and"},
    "halton": {"sequence": "halton"},
    "weyl": {"sequence": "weyl", "gate": "and"},
}


def _same_as_generated(seed: int) -> None:
    a, b, o = random_arithmetic(seed)
    y = sc_matmul(torch.from_numpy(a), torch.from_numpy(b), **o)
    expected = generated_matmul(a, b, {**o, "counter": partial(_counter, o)})
    assert torch.equal(y, torch.from_numpy(expected)), (seed, o)


def _counter(o: dict[str, Any], row_a: list[int], row_b: list[int], length: int) -> int:
    return count_rows(row_a, row_b, o, length)


def test_random_configurations_equal_generated_streams() -> None:
    for seed in range(12):
        _same_as_generated(seed)


def test_random_configurations_reach_every_field() -> None:
    seen = [random_arithmetic(seed)[2] for seed in range(60)]
    for field in ("gate", "signs", "or_group", "flip_rate", "planned_len"):
        assert any(field in o for o in seen)
    assert {"unary", "halton", "weyl"} <= {o["sequence"] for o in seen}
    assert any(o["scramble"] == "cells" for o in seen) and any(isinstance(o["stoc_len"], list) for o in seen)


@pytest.mark.parametrize(
    "count", [pytest.param(60, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.nightly)]
)
def test_many_random_configurations_equal_generated_streams(count: int) -> None:
    for seed in range(1000, 1000 + count):
        _same_as_generated(seed)


@pytest.mark.parametrize("name", ARITHMETICS)
def test_the_op_equals_its_definition(name: str) -> None:
    """Codes with zeros and ends, rows and chunks of several lengths, 0 among them."""
    options = replace(SMALL, **ARITHMETICS[name])
    Q = options.max_code
    qa, qb = (torch.randint(-Q, Q + 1, (2, n, 16), dtype=torch.int8) for n in (3, 7))
    qa[0, 0], qb[1, 0, :4] = 0, Q
    sa, sb = torch.rand(2, 3, 2, dtype=torch.float32), torch.rand(2, 7, 2, dtype=torch.float32)
    for levels, index in (
        ((options.length,), None),
        ((0, 3, options.length), torch.randint(0, 3, (2, 3, 2), dtype=torch.uint8)),
    ):
        expected = stochastic_codes_ref(qa, sa, qb, sb, options, levels, index)
        assert torch.equal(stochastic_codes(qa, sa, qb, sb, options, levels, index), expected)
        assert expected.any()


@pytest.mark.parametrize("name", ARITHMETICS)
def test_a_row_does_not_depend_on_its_batch_nor_on_the_call(name: str) -> None:
    options = {**ARITHMETICS[name], "sc_prec": 5, "halve_bipolar_stoc_len": True}
    a, b = torch.randn(6, 16), torch.randn(5, 16)
    y = sc_matmul(a, b, **options)
    assert torch.equal(y, sc_matmul(a, b, **options))
    assert torch.equal(y[2:4], sc_matmul(a[2:4], b, **options))
    assert torch.equal(y[:, 1:2], sc_matmul(a, b[1:2], **options))


def test_words_are_cut_as_rows_need(monkeypatch) -> None:
    a, b, options = torch.randn(9, 32), torch.randn(5, 32), {"or_group": 8, "stoc_len": 60, "sc_prec": 6}
    whole = sc_matmul(a, b, **options)
    monkeypatch.setattr(or_counts, "_VALUES_AT_ONCE", 40)
    assert torch.equal(sc_matmul(a, b, **options), whole)


def test_cells_lose_nothing_to_the_or_and_others_do() -> None:
    """DS-CIM's point: of one shared pair of sequences an OR is a sum where products exclude each other."""
    a, b = torch.rand(16, 64) + 0.5, torch.rand(16, 64) + 0.5
    exact = a @ b.T

    def share(**options: Any) -> float:
        return float(((sc_matmul(a, b, stoc_len=256, gate="and", **options) - exact) / exact).mean())

    assert abs(share(or_group=16, scramble="cells")) < 0.05
    assert share(or_group=16, scramble="off") < -0.5  # collisions: an OR of ones is one


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"or_group": 3}, BadInput, "or_group=3 does not divide the 8 inner dimensions of a chunk; choose"),
        ({"or_group": 4, "chunk_d": 6}, BadInput, "or_group=4 does not divide the 6 inner dimensions"),
        ({"or_group": 2, "emulate_rank": 2}, Unsupported, "emulate_rank models products of magnitudes"),
        ({"signs": "twos_complement", "emulate_rank": 2}, Unsupported, "emulate_rank models"),
        ({"stoc_len": [9, 65, 1], "planned_len": 64}, BadInput, "holds 65; give stream lengths from 0 to 64"),
        (
            {"stoc_len": 65, "planned_len": 64},
            BadInput,
            "65 steps run longer than the streams of planned_len",
        ),
        ({"flip_rate": 2}, BadInput, "flip_rate=2 is refused: give the share"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(options, error, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        sc_matmul(torch.ones(3, 8), torch.ones(2, 8), **options)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_lengths_beyond_the_plan_are_refused_by_the_op() -> None:
    options = replace(STOCHASTIC, planned_len=64)
    codes, scales = torch.ones(1, 1, 4, dtype=torch.int8), torch.ones(1, 1, 1)
    with pytest.raises(BadInput, match="1 to 256 lengths from 0 to 64"):
        stochastic_codes(codes, scales, codes, scales, options, (32, 65))


def test_paths_of_a_gpu_say_why_they_are_not_the_fast_ones() -> None:
    cuda = torch.device("cuda", 0)
    for name, words in (
        ("or", "OR-ed groups of products have no table"),
        ("twos", "signs are in the streams"),
    ):
        path = stochastic_path(cuda, 16, replace(SMALL, **ARITHMETICS[name]))
        assert path.name == "definition" and words in path.reason
        assert path.reason == without_tables(replace(SMALL, **ARITHMETICS[name]))
    assert without_tables(SMALL) == ""


@pytest.mark.parametrize("name", ["and", "flips", "early", "unary-and", "weyl"])
def test_tables_of_the_kernels_hold_the_counts(name: str) -> None:
    """What the kernels look up gives back the product table; those that run streams refuse the gate "and"."""
    options = replace(STOCHASTIC, **ARITHMETICS[name])
    levels, chunk = (options.length,), 16
    lookups = lookup.tables_of(options, levels, chunk, torch.device("cpu"))
    assert lookups is not None
    keys = tuple(dict.fromkeys(options.masks(chunk)))
    expected = product_tables(options.streams, keys, torch.device("cpu")).long()
    codes = torch.arange(128)
    got = lookups.bytes[0].long() - 128 // lookups.added + lookups.slopes[0].long()[..., None] * codes
    assert torch.equal(got, expected)
    steps = thermometer.tables_of(options, levels, chunk, torch.device("cpu"))
    assert steps is not None
    run = torch.arange(steps.ones.shape[2]) < steps.steps[0].long()[..., None]
    assert torch.equal(torch.einsum("kus,kws->kuw", run.long(), steps.ones.long()), expected)
    both = (16, options.length)
    if options.gate == "and":
        assert thermometer.tables_of(options, both, chunk, torch.device("cpu")) is None


def test_products_of_bits_are_not_chosen_for_the_gate_and(monkeypatch) -> None:
    monkeypatch.setattr(choice, "ways", lambda *sizes: (choice.BITS, choice.FEW_ROWS))
    sizes, device = choice.Sizes(1, 64, 64, 16, 16), torch.device("cpu")
    monkeypatch.setattr(choice, "describe", lambda device: None)
    for gate, expected in (("enable", choice.BITS), ("and", choice.FEW_ROWS)):
        options = replace(STOCHASTIC, gate=gate)
        assert choice.choose(sizes, options, (128,), device, mixed=False).way is expected
